"""kernels/selective_scan: the reference against the formula, every backend against it, chunks against the whole."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.selective_scan import selective_scan

from ..interpreter import IS_INTERPRETED
from .assertions import assert_close
from .cases import SCAN_CASES, ScanCase, SsmInputs, make_cu_seqlens, make_scan_inputs
from .parameters import FLOAT_DTYPES, PLACES, TRITON_PLACES, Place, every_pair

# float32: sums in another order. Else one unit in the last place.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}

cases = pytest.mark.parametrize("case", SCAN_CASES, ids=lambda case: case.name)


def scan(
    case: ScanCase, inputs: SsmInputs, has_states: bool, rows: slice = slice(None), **options: Any
) -> tuple[Tensor, Tensor]:
    y, final = selective_scan(
        inputs.x[rows],
        inputs.dt[rows],
        inputs.a,
        inputs.b[rows],
        inputs.c[rows],
        make_cu_seqlens(case.seq_lens, inputs.x.device),
        case.seq_lens,
        d=inputs.d,
        initial_states=inputs.initial_states if has_states else None,
        return_final_states=True,
        **options,
    )
    assert final is not None
    return y, final


def test_reference_equals_formula() -> None:
    """One number at a time, in Python's double precision."""
    case = ScanCase("", (4, 0, 3), 2, 3)
    inputs = make_scan_inputs(case)
    y, final = scan(case, inputs, True, backend="reference")
    x, dt, b, c = (v.tolist() for v in (inputs.x, inputs.dt, inputs.b, inputs.c))
    start = 0
    for n, length in enumerate(case.seq_lens):
        for i in range(case.channels):
            state = inputs.initial_states[n, i].tolist()
            for t in range(start, start + length):
                for s in range(case.state_size):
                    state[s] *= math.exp(dt[t][i] * inputs.a[i, s].item())
                    state[s] += dt[t][i] * x[t][i] * b[t][s]
                expected = math.fsum(h * weight for h, weight in zip(state, c[t], strict=True))
                expected += inputs.d[i].item() * x[t][i]
                assert y[t, i].item() == pytest.approx(expected, rel=1e-5, abs=1e-5)
            assert final[n, i].tolist() == pytest.approx(state, rel=1e-5, abs=1e-5)
        start += length


@every_pair(
    lambda case, dtype, **_: not IS_INTERPRETED or (case.is_quick and dtype != torch.float16),
    place=PLACES,
    case=SCAN_CASES,
    dtype=FLOAT_DTYPES,
    has_states=[False, True],
)
def test_backend_equals_reference(place: Place, case: ScanCase, dtype: torch.dtype, has_states: bool) -> None:
    backend, device = place
    inputs = make_scan_inputs(case, dtype, device)
    expected, expected_final = scan(case, inputs, has_states, backend="reference")
    actual, final = scan(case, inputs, has_states, backend=backend)
    assert actual.dtype == dtype
    assert final.dtype == torch.float32
    assert actual.is_contiguous()
    assert_close("y", expected, actual, TOLERANCE[dtype])
    assert_close("final", expected_final, final, 5e-6)


@every_pair(place=TRITON_PLACES, has_states=[False, True])
def test_chunks_that_programs_walk_along_equal_reference(
    place: Place, has_states: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, device = place
    from penstock.kernels.selective_scan import _triton

    # Sequences of no row, of some whole chunks, and of one row more or less.
    case = ScanCase("", (3, 8, 0, 9, 24, 1, 31, 16), 40, 6)
    inputs = make_scan_inputs(case, device=device)
    expected, expected_final = scan(case, inputs, has_states, backend="reference")
    for size in (8,) if IS_INTERPRETED else (4, 8, 16):
        monkeypatch.setattr(_triton, "CHUNK_SIZE", size)
        actual, final = scan(case, inputs, has_states, backend=backend)
        assert_close("y", expected, actual, 5e-6)
        assert_close("final", expected_final, final, 5e-6)
        # The rows of a sequence do not depend on those of others, to the last bit.
        alone, _ = scan(replace(case, seq_lens=(24,)), inputs, False, slice(20, 44), backend=backend)
        together, _ = scan(case, inputs, False, backend=backend)
        assert torch.equal(alone, together[20:44])


def test_without_skip_and_states(place: Place) -> None:
    backend, device = place
    case = ScanCase("", (5, 11), 9, 4)
    inputs = make_scan_inputs(case, device=device)
    arguments = (inputs.x, inputs.dt, inputs.a, inputs.b, inputs.c, inputs.cu_seqlens, case.seq_lens)
    expected, _ = selective_scan(*arguments, backend="reference")
    actual, final = selective_scan(*arguments, backend=backend)
    assert final is None
    assert_close("y", expected, actual, 5e-6)


@pytest.mark.parametrize("size", [7] if IS_INTERPRETED else [1, 7, 64])
def test_chunks_equal_the_whole(place: Place, size: int) -> None:
    backend, device = place
    case = ScanCase("", (16 if IS_INTERPRETED else 130,), 6, 8)
    inputs = make_scan_inputs(case, device=device)
    whole, whole_final = scan(case, inputs, True, backend=backend)
    state = inputs.initial_states
    for start in range(0, case.seq_lens[0], size):
        part = ScanCase("", (min(size, case.seq_lens[0] - start),), 6, 8)
        chunked = replace(inputs, initial_states=state)
        y, state = scan(part, chunked, True, slice(start, start + size), backend=backend)
        assert_close(f"rows from {start}", whole[start : start + size], y, 1e-6, whole.abs().max().item())
    assert_close("final", whole_final, state, 1e-6)


def test_sequence_is_the_same_alone_and_in_a_batch(place: Place) -> None:
    backend, device = place
    lengths = (3, 0, 9, 1) if IS_INTERPRETED else (3, 9, 64, 0, 12, 100, 65)
    case = ScanCase("", lengths, 10, 16)
    inputs = make_scan_inputs(case, device=device)
    together, _ = scan(case, inputs, False, backend=backend)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        alone, _ = scan(ScanCase("", (length,), 10, 16), inputs, False, rows, backend=backend)
        assert_close(f"length {length}", alone, together[rows], 1e-6)
        start += length


# The interpreter computes with numpy, which warns.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_poisoned_sequence_touches_no_other(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, device = place
    if backend == "triton":
        from penstock.kernels.selective_scan import _triton

        monkeypatch.setattr(_triton, "CHUNK_SIZE", 4)
    case = ScanCase("", (2, 5, 0, 1, 9), 6, 4)
    clean, dirty = make_scan_inputs(case, device=device), make_scan_inputs(case, device=device)
    for tensor in (dirty.x, dirty.dt, dirty.b, dirty.c):
        tensor[2:7] = float("nan")
    dirty.initial_states[1] = float("nan")
    expected, expected_final = scan(case, clean, True, backend=backend)
    actual, final = scan(case, dirty, True, backend=backend)
    assert actual[2:7].isnan().all()
    others = [0, 2, 3, 4]
    assert torch.equal(actual[7:], expected[7:])
    assert torch.equal(actual[:2], expected[:2])
    assert torch.equal(final[others], expected_final[others])


def test_blocks_and_groups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = SCAN_CASES[0]
    inputs = make_scan_inputs(case)
    expected, expected_final = scan(case, inputs, True, backend="torch")
    monkeypatch.setattr("penstock.kernels.selective_scan.GROUP_ELEMENTS", 3 * case.channels * case.state_size)
    monkeypatch.setattr("penstock.kernels.selective_scan.BLOCK_ELEMENTS", 12 * case.channels * case.state_size)
    actual, final = scan(case, inputs, True, backend="torch")
    assert_close("y", expected, actual, 1e-6)
    assert_close("final", expected_final, final, 1e-6)


INPUTS = make_scan_inputs(ScanCase("", (1, 3), 6, 5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(4, 6, 1)}, "x must be"),
        ({"x": INPUTS.x.double()}, "x must be float32"),
        ({"dt": INPUTS.dt.half()}, r"dt must be torch.float32 \[4, 6\]"),
        ({"a": torch.ones(5, 5)}, r"a must be torch.float32 \[6, 5\]"),
        ({"b": torch.ones(4, 6)}, r"b must be torch.float32 \[4, 5\]"),
        ({"c": torch.ones(3, 5)}, r"c must be torch.float32 \[4, 5\]"),
        ({"d": torch.ones(5)}, r"d must be \[6\]"),
        ({"seq_lens": (1, 2)}, "seq_lens must sum to the 4 rows"),
        ({"initial_states": torch.ones(2, 5, 6)}, r"initial_states must be torch.float32 \[2, 6, 5\]"),
        ({"backend": "cuda"}, "backend must be one of"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    names = ("x", "dt", "a", "b", "c", "cu_seqlens")
    arguments = {name: getattr(INPUTS, name) for name in names} | {"seq_lens": (1, 3)} | changes
    with pytest.raises(ValueError, match=message):
        selective_scan(**arguments)
