"""Backends and devices of kernel tests, and cases that cover every pair of values."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import pytest
import torch

from ..interpreter import IS_INTERPRETED
from ..tables import table

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=lambda dtype: str(dtype)[6:])

# See interpreter.py.
interpreted_only = pytest.mark.skipif(not IS_INTERPRETED, reason="needs a GPU, or TRITON_INTERPRET=1 from the start")


class Target(NamedTuple):
    """A backend and a device that it runs on."""

    backend: Any
    device: str


def targets(*backends: str | None, cuda: Sequence[str | None] = ()) -> list[Target]:
    """Backends on a CPU and on CUDA; in a process with triton's interpreter, triton on a CPU alone."""
    if IS_INTERPRETED:
        return [Target("triton", "cpu")]
    return [*(Target(backend, "cpu") for backend in backends), *(Target(backend, "cuda") for backend in cuda)]


TARGETS = targets("torch", cuda=("torch", "triton"))
TRITON_TARGETS = targets(cuda=["triton"])


def every_target(values: Sequence[Target]) -> list[Any]:
    """Parameters of a fixture."""
    return [pytest.param(target, id=name_of(target), marks=marks_of(target)) for target in values]


def every_pair(
    is_possible: Callable[..., bool] = lambda **_: True, *, indirect: Sequence[str] = (), **values: Sequence[Any]
) -> pytest.MarkDecorator:
    """Parametrizes a test with cases that cover every pair of values of two parameters.

    Args:
        is_possible: Whether a combination is tested, by parameter names.
        indirect: Parameters that are fixtures.
        values: Values of each parameter. Each `target` gets all pairs of the other parameters, so a run without a
            GPU covers all pairs. Targets in a list share the pairs.
    """
    names = list(values)
    if "target" in values:
        groups = [group if isinstance(group, list) else [group] for group in values["target"]]
        cases = [case for group in groups for case in covering(is_possible, values | {"target": group})]
    else:
        cases = list(covering(is_possible, values))
    parameters = [
        pytest.param(*case.values(), id="-".join(map(name_of, case.values())), marks=marks_of(case.get("target")))
        for case in cases
    ]
    return pytest.mark.parametrize(",".join(names), parameters, indirect=list(indirect))


def covering(is_possible: Callable[..., bool], values: dict[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yields cases until every possible pair has occurred. Each case has the most new pairs."""
    possible, bits = list[tuple[dict[str, Any], int]](), dict[Any, int]()  # a bit for each pair
    for choice in product(*(range(len(options)) for options in values.values())):
        case = {name: values[name][index] for name, index in zip(values, choice, strict=True)}
        if is_possible(**case):
            mask = sum(bits.setdefault(pair, 1 << len(bits)) for pair in combinations(enumerate(choice), 2))
            possible.append((case, mask))
    missing = sum(bits.values())
    while missing:
        case, mask = max(possible, key=lambda item: (item[1] & missing).bit_count())
        yield case
        missing &= ~mask


def name_of(value: object) -> str:
    """The value in the name of a test."""
    if isinstance(value, Target):
        return f"{value.backend or 'chosen'}-{value.device}"
    if isinstance(value, torch.dtype):
        return str(value)[len("torch.") :]
    if isinstance(value, tuple) and all(isinstance(part, int) for part in value):
        return "x".join(map(str, value))
    return str(getattr(value, "name", value))


def marks_of(target: object) -> list[pytest.MarkDecorator]:
    """Marks cases for a GPU."""
    return [pytest.mark.gpu] if isinstance(target, Target) and target.device == "cuda" else []


def cases_of(kind: Callable[..., Any], name: str) -> list[Any]:
    """Returns the cases of a table in cases.json. Lines: the name, the lengths and the other sizes of a case."""
    return [kind(case, tupled(lengths), **sizes) for case, (lengths, sizes) in table(__file__, name).items()]


def tupled(value: Any) -> Any:
    """Returns tuples for the lists of a table."""
    if isinstance(value, dict):
        return {key: tupled(each) for key, each in value.items()}
    return tuple(map(tupled, value)) if isinstance(value, list) else value
