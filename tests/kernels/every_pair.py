"""Parameters of kernel tests: the places where kernels run, and cases that cover every pair of values."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import pytest
import torch

from ..interpreter import IS_INTERPRETED

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Place(NamedTuple):
    """A backend and a device that it runs on."""

    backend: Any
    device: str


def places(*backends: str | None, cuda: Sequence[str | None] = ()) -> list[Place]:
    """Backends on a CPU and on CUDA; in a process with triton's interpreter, triton on a CPU alone."""
    if IS_INTERPRETED:
        return [Place("triton", "cpu")]
    return [*(Place(backend, "cpu") for backend in backends), *(Place(backend, "cuda") for backend in cuda)]


def every_pair(is_possible: Callable[..., bool] = lambda **_: True, **values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with cases in which every pair of values of two parameters occurs.

    Args:
        is_possible: Whether a combination makes sense, by parameter names; no other is tested.
        values: Of each parameter. A parameter `place` is combined with all pairs of the others, so that a machine
            without a GPU tests them all.
    """
    cases = [
        pytest.param(*case.values(), id="-".join(map(name_of, case.values())), marks=marks_of(case))
        for place in values.get("place", [None])
        for case in covering(is_possible, values | ({} if place is None else {"place": [place]}))
    ]
    return pytest.mark.parametrize(",".join(values), cases)


def covering(is_possible: Callable[..., bool], values: dict[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yields possible cases until every possible pair has occurred: each time the case with the most new pairs."""
    possible = []
    for choice in product(*(range(len(options)) for options in values.values())):
        case = {name: values[name][index] for name, index in zip(values, choice, strict=True)}
        if is_possible(**case):
            # With one parameter, the pair is a value and itself.
            pairs = set(combinations(enumerate(choice), 2)) or {(choice, choice)}
            possible.append((case, pairs))
    missing = set().union(*(pairs for _, pairs in possible))
    while missing:
        case, pairs = max(possible, key=lambda item: len(item[1] & missing))
        yield case
        missing -= pairs


def name_of(value: object) -> str:
    """The value in the name of a test."""
    if isinstance(value, Place):
        return f"{value.backend or 'chosen'}-{value.device}"
    if isinstance(value, torch.dtype):
        return str(value)[len("torch.") :]
    return str(getattr(value, "name", value))


def marks_of(case: dict[str, Any]) -> list[pytest.MarkDecorator]:
    """Marks cases for a GPU."""
    place = case.get("place")
    return [pytest.mark.gpu] if isinstance(place, Place) and place.device == "cuda" else []
