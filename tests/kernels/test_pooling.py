"""pool equals its reference on every backend; test_pool_native.py compares it with formulas."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.cpu import CpuKernelError, CpuLibrary, PoolingCode
from penstock.kernels.pooling import POOLING_KINDS, PoolingKind, pool

from ..interpreter import IS_INTERPRETED
from .assertions import assert_close
from .cases import PoolingCase, PoolingInputs, make_cu_seqlens, make_pooling_inputs
from .parameters import FLOAT_DTYPES, TARGETS, TRITON_TARGETS, Target, cases_of, every_pair, every_target
from .references import pool_reference

# float32: sums in another order. Else one unit in the last target.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


ISAS = ("avx512bf16", "avx512vnni", "avx512", "avx2vnni", "avx2", "plain")
LIBRARY_TARGETS = [] if IS_INTERPRETED else [Target(isa, "cpu") for isa in ISAS]
POOLING_CASES = [*cases_of(PoolingCase, "pooling"), PoolingCase("one_long_many_short", (1000, *([3] * 200)), 384)]
# The instruction sets of the C library share the cases of one target.
ALL_TARGETS = [*TARGETS, LIBRARY_TARGETS]


class PoolTarget(NamedTuple):
    """A function like `pool`, and the device of its tensors."""

    pool: Callable[..., Tensor]
    device: str


@pytest.fixture(params=every_target([*TARGETS, *LIBRARY_TARGETS]))
def target(request: pytest.FixtureRequest) -> Iterator[PoolTarget]:
    """A backend and a device that it runs on, or the C library for an instruction set."""
    backend, device = request.param
    if backend not in ISAS:
        yield PoolTarget(partial(pool, backend=backend), device)
        return
    try:
        library = CpuLibrary(1, isa=backend)
    except CpuKernelError as error:
        pytest.skip(str(error))
    with library:
        yield PoolTarget(partial(pool_with_library, library), device)


def pool_with_library(
    library: CpuLibrary,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    pooling: str,
    *,
    dimensions: int | Tensor | None = None,
    max_dimensions: int | None = None,
    normalize: bool | Tensor = False,
    skip_tokens: Tensor | None = None,
    weights: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    lengths = cu_seqlens.diff()
    norms = normalize if isinstance(normalize, Tensor) else torch.full((len(lengths),), normalize)
    pooled = library.pool(
        hidden_states.numpy(),
        cu_seqlens[:-1].contiguous().numpy(),
        lengths.numpy(),
        PoolingCode[pooling.upper()],
        width=dimensions if isinstance(dimensions, int) else max_dimensions or hidden_states.shape[1],
        dimensions=dimensions.numpy() if isinstance(dimensions, Tensor) else None,
        normalize=norms.numpy().view(np.uint8),
        skips=None if skip_tokens is None else skip_tokens.numpy(),
        weights=None if weights is None else weights.numpy(),
    )
    return torch.from_numpy(pooled).to(out_dtype)


ignores_warnings = pytest.mark.filterwarnings(  # numpy warns in the interpreter
    "ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
)
every_target_and = partial(every_pair, indirect=["target"], target=ALL_TARGETS)


def weights_of(kind: PoolingKind, inputs: PoolingInputs) -> Tensor | None:
    return inputs.weights if kind == "weighted" else None


def is_supported(target: Target, case: PoolingCase, dtype: torch.dtype, **_: str) -> bool:
    """The library pools float32 only; the interpreter takes milliseconds for a row."""
    if target.backend in ISAS:
        return dtype == torch.float32
    return not IS_INTERPRETED or (case.is_quick and dtype != torch.float16)


@every_target_and(is_supported, case=POOLING_CASES, kind=POOLING_KINDS, dtype=FLOAT_DTYPES)
def test_backend_equals_reference(target: PoolTarget, case: PoolingCase, kind: PoolingKind, dtype: torch.dtype) -> None:
    inputs = make_pooling_inputs(case, dtype, target.device)
    everything = {"dimensions": inputs.dimensions, "normalize": inputs.normalize, "skip_tokens": inputs.skip_tokens}
    width = -(-case.hidden_size // 2)
    cut_and_cast = {"dimensions": width, "normalize": True, "out_dtype": dtype}
    cut_by_sequence = {"dimensions": inputs.dimensions, "max_dimensions": width, "normalize": True}
    for options in (everything, cut_and_cast) if IS_INTERPRETED else ({}, everything, cut_and_cast, cut_by_sequence):
        arguments = (inputs.hidden_states, inputs.cu_seqlens, kind)
        options = options | {"weights": weights_of(kind, inputs)}
        expected = pool_reference(*arguments, **options)
        actual = target.pool(*arguments, **options)
        assert actual.dtype == options.get("out_dtype", torch.float32)
        assert actual.device == inputs.hidden_states.device
        assert_close("pooled", expected, actual, TOLERANCE[actual.dtype])


@ignores_warnings
@every_target_and(kind=POOLING_KINDS, poison=[float("nan"), float("inf")])
def test_nan_stays_in_its_sequence_and_column(target: PoolTarget, kind: PoolingKind, poison: float) -> None:
    inputs = make_pooling_inputs(PoolingCase("", (5, 3, 1, 4), 60), device=target.device)
    arguments = (inputs.hidden_states, inputs.cu_seqlens, kind)
    weights = weights_of(kind, inputs)
    expected = target.pool(*arguments, normalize=True, weights=weights)
    clean = inputs.hidden_states.clone()
    inputs.hidden_states[5:8] = poison
    actual = target.pool(*arguments, normalize=True, weights=weights)
    assert torch.equal(actual[[0, 2, 3]], expected[[0, 2, 3]])
    assert actual[1].isnan().all()
    inputs.hidden_states.copy_(clean)
    inputs.hidden_states[{"cls": 5, "last": 7}.get(kind, 6), 7] = float("nan")
    assert target.pool(*arguments, weights=weights).isnan().nonzero().tolist() == [[1, 7]]


@every_target_and(kind=POOLING_KINDS)
def test_strides_and_rows_after_the_batch_are_skipped(target: PoolTarget, kind: PoolingKind) -> None:
    device = target.device
    inputs = make_pooling_inputs(PoolingCase("", (5, 0, 12), 60), device=device)
    wide = torch.full((30, 100), float("nan"), device=device)
    wide[:17, :60] = inputs.hidden_states
    weights = torch.full((30,), float("nan"), device=device)
    weights[:17] = inputs.weights
    cu_seqlens = inputs.cu_seqlens
    expected = pool_reference(inputs.hidden_states, cu_seqlens, kind, weights=weights_of(kind, inputs))
    actual = target.pool(wide[:, :60], cu_seqlens, kind, weights=weights if kind == "weighted" else None)
    assert_close("pooled", expected, actual, TOLERANCE[torch.float32])


@ignores_warnings
@every_target_and(kind=POOLING_KINDS, size=[1e-30, 1e-6, 1e19])
def test_norms_of_rows_of_any_size_equal_reference(target: PoolTarget, kind: PoolingKind, size: float) -> None:
    inputs = make_pooling_inputs(PoolingCase("", (5, 1, 12), 60), device=target.device)
    arguments = (inputs.hidden_states * size, inputs.cu_seqlens, kind)
    options = {"normalize": True, "weights": weights_of(kind, inputs)}
    expected = pool_reference(*arguments, **options)
    assert_close("pooled", expected, target.pool(*arguments, **options), TOLERANCE[torch.float32])


@ignores_warnings
@every_target_and(weight=[0.0, -1.0, 1e-20, float("inf"), float("nan")])
def test_weights_of_any_value_equal_reference(target: PoolTarget, weight: float) -> None:
    inputs = make_pooling_inputs(PoolingCase("", (5, 3, 12), 60), device=target.device)
    inputs.weights[5:8] = weight
    arguments = (inputs.hidden_states, inputs.cu_seqlens, "weighted")
    expected = pool_reference(*arguments, weights=inputs.weights)
    actual = target.pool(*arguments, weights=inputs.weights)
    for row in range(3):
        assert_close(f"row {row}", expected[row], actual[row], TOLERANCE[torch.float32])


@every_pair(indirect=["target"], target=TRITON_TARGETS, kind=POOLING_KINDS)
def test_splitting_a_long_sequence_changes_nothing(
    target: PoolTarget, kind: PoolingKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.kernels.pooling import _triton

    monkeypatch.setattr(_triton, "BLOCK_ROWS", 16)
    inputs = make_pooling_inputs(PoolingCase("", (2, 40, 16, 0, 31, 17, 33), 60), device=target.device)
    arguments = (inputs.hidden_states, inputs.cu_seqlens, kind)
    weights = weights_of(kind, inputs)
    expected = pool_reference(*arguments, weights=weights)
    split = pool(*arguments, weights=weights, backend="triton", max_seqlen=40)
    assert_close("split", expected, split, TOLERANCE[torch.float32])
    # With a bound of one block, one program pools the whole sequence.
    assert torch.equal(split, pool(*arguments, weights=weights, backend="triton", max_seqlen=1))
    monkeypatch.setattr(_triton, "MAX_BLOCK_BYTES", 1)
    assert torch.equal(split, pool(*arguments, weights=weights, backend="triton", max_seqlen=40))


def test_width_of_several_programs_uses_torch(device: torch.device) -> None:
    inputs = make_pooling_inputs(PoolingCase("", (2, 3), 8200), device=device)
    expected = pool_reference(inputs.hidden_states, inputs.cu_seqlens, "mean")
    assert_close("pooled", expected, pool(inputs.hidden_states, inputs.cu_seqlens, "mean"), 1e-6)
    assert pool(inputs.hidden_states[:0], make_cu_seqlens((), device), "mean", dimensions=4).shape == (0, 4)
