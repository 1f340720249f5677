"""kernels/ssd: the reference against selective_scan, every backend against it, chunks against the whole."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.selective_scan import selective_scan
from penstock.kernels.ssd import ssd

from ..interpreter import IS_INTERPRETED
from .assertions import assert_close
from .cases import SSD_CASES, SsdCase, SsmInputs, make_cu_seqlens, make_ssd_inputs
from .parameters import FLOAT_DTYPES, PLACES, TRITON_PLACES, Place, every_pair

# float32: sums in another order. bfloat16: weights and states are rounded before products.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
# So small that a few rows make several chunks.
INTERPRETED_CHUNK = 16


def run_ssd(
    case: SsdCase, inputs: SsmInputs, has_states: bool, rows: slice = slice(None), **options: Any
) -> tuple[Tensor, Tensor]:
    if IS_INTERPRETED:
        options = {"chunk_size": INTERPRETED_CHUNK} | options
    y, final = ssd(
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


def test_reference_equals_selective_scan() -> None:
    """A head is a few channels of the selective scan with one decay."""
    case = SsdCase("", (4, 0, 9), 4, 3, 2, 5)
    inputs = make_ssd_inputs(case)
    y, final = run_ssd(case, inputs, True, backend="reference")
    for head in range(4):
        group = head // 2
        expected, expected_final = selective_scan(
            inputs.x[:, head],
            inputs.dt[:, head, None].expand(-1, 3),
            inputs.a[head].expand(3, 5),
            inputs.b[:, group],
            inputs.c[:, group],
            inputs.cu_seqlens,
            case.seq_lens,
            d=inputs.d[head].expand(3),
            initial_states=inputs.initial_states[:, head],
            return_final_states=True,
            backend="reference",
        )
        assert expected_final is not None
        assert_close("y", expected, y[:, head], 1e-6)
        assert_close("final", expected_final, final[:, head], 1e-6)


@every_pair(place=PLACES, dtype=[torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16])
def test_chunks_of_the_size_that_long_sequences_take(place: Place, dtype: torch.dtype) -> None:
    backend, device = place
    case = SsdCase("", (129, 3, 0, 128, 65), 2, 8, 1, 16)
    inputs = make_ssd_inputs(case, dtype, device)
    expected = run_ssd(case, inputs, True, backend="reference")
    actual = run_ssd(case, inputs, True, backend=backend, chunk_size=None)
    for name, one, other in zip(("y", "final"), expected, actual, strict=True):
        assert_close(name, one, other, TOLERANCE[dtype])


@every_pair(place=TRITON_PLACES, dtype=[torch.float32, torch.float16] if IS_INTERPRETED else FLOAT_DTYPES)
def test_rows_do_not_depend_on_the_lengths_beside_them(
    place: Place, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU torch chooses the order of sums by the shape of a product."""
    backend, device = place
    from penstock.kernels.ssd import _triton

    sizes: list[int] = []
    make_options = _triton.tile_options

    def seen(*sizes_given: Any) -> dict[str, Any]:
        options = make_options(*sizes_given)
        sizes.append(options["SIZE"])
        return options

    monkeypatch.setattr(_triton, "tile_options", seen)
    case = SsdCase("", (64, 150), 2, 8, 1, 16)
    inputs = make_ssd_inputs(case, dtype, device)
    together, _ = run_ssd(case, inputs, False, backend=backend, chunk_size=None)
    given = (inputs.x[:64], inputs.dt[:64], inputs.a, inputs.b[:64], inputs.c[:64], inputs.cu_seqlens[:2], (64,))
    alone, _ = ssd(*given, d=inputs.d, backend=backend)
    assert sizes == [64 if dtype == torch.float32 else 128] * 2, "chunks follow from the lengths of the batch"
    assert torch.equal(together[:64], alone)


@every_pair(
    lambda case, dtype, has_states, **_: (
        not IS_INTERPRETED or (case.is_quick and (dtype == torch.float32 or (dtype == torch.float16 and has_states)))
    ),
    place=PLACES,
    case=SSD_CASES,
    dtype=FLOAT_DTYPES,
    has_states=[False, True],
)
def test_backend_equals_reference(place: Place, case: SsdCase, dtype: torch.dtype, has_states: bool) -> None:
    """The interpreter has no products in bfloat16."""
    backend, device = place
    inputs = make_ssd_inputs(case, dtype, device)
    expected, expected_final = run_ssd(case, inputs, has_states, backend="reference")
    actual, final = run_ssd(case, inputs, has_states, backend=backend)
    assert actual.dtype == dtype
    assert final.dtype == torch.float32
    assert actual.is_contiguous()
    assert_close("y", expected, actual, TOLERANCE[dtype])
    assert_close("final", expected_final, final, TOLERANCE[dtype])


@pytest.mark.parametrize("step", [0.0, 1e-4, 10.0, 50.0])
def test_extreme_steps(place: Place, step: float) -> None:
    backend, device = place
    case = SsdCase("", (33 if IS_INTERPRETED else 200,), 2, 4, 1, 8)
    inputs = make_ssd_inputs(case, device=device)
    inputs.dt.fill_(step)
    # Small steps after large ones: a difference of running sums alone would lose them.
    inputs.dt[case.seq_lens[0] // 2 :, 0] = 1e-3
    expected, expected_final = run_ssd(case, inputs, True, backend="reference")
    actual, final = run_ssd(case, inputs, True, backend=backend)
    assert_close("y", expected, actual, 1e-5)
    assert_close("final", expected_final, final, 1e-5)


def test_without_skip_and_states(place: Place) -> None:
    backend, device = place
    case = SsdCase("", (5, 33), 2, 4, 1, 8)
    inputs = make_ssd_inputs(case, device=device)
    arguments = (inputs.x, inputs.dt, inputs.a, inputs.b, inputs.c, inputs.cu_seqlens, case.seq_lens)
    expected, _ = ssd(*arguments, backend="reference")
    for chunk_size in (16, 64):
        actual, final = ssd(*arguments, backend=backend, chunk_size=chunk_size)
        assert final is None
        assert_close("y", expected, actual, 1e-5)


@pytest.mark.parametrize("size", [7] if IS_INTERPRETED else [1, 7, 64])
def test_chunks_equal_the_whole(place: Place, size: int) -> None:
    backend, device = place
    case = SsdCase("", (20 if IS_INTERPRETED else 150,), 4, 8, 2, 16)
    inputs = make_ssd_inputs(case, device=device)
    whole, whole_final = run_ssd(case, inputs, True, backend=backend)
    state = inputs.initial_states
    for start in range(0, case.seq_lens[0], size):
        part = replace(case, seq_lens=(min(size, case.seq_lens[0] - start),))
        rows = slice(start, start + size)
        y, state = run_ssd(part, replace(inputs, initial_states=state), True, rows, backend=backend)
        assert_close(f"rows from {start}", whole[rows], y, 1e-5, whole.abs().max().item())
    assert_close("final", whole_final, state, 1e-5)


@every_pair(place=[] if IS_INTERPRETED else PLACES, dtype=[torch.float32, torch.bfloat16])
def test_sequence_is_the_same_alone_and_in_a_batch(place: Place, dtype: torch.dtype) -> None:
    backend, device = place
    lengths = (3, 9, 64, 0, 12, 12, 100, 65)
    case = SsdCase("", lengths, 4, 8, 2, 16)
    inputs = make_ssd_inputs(case, dtype, device)
    together, _ = run_ssd(case, inputs, False, backend=backend)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        alone, _ = run_ssd(replace(case, seq_lens=(length,)), inputs, False, rows, backend=backend)
        assert_close(f"length {length}", alone, together[rows], 1e-6 if dtype == torch.float32 else 1e-2)
        start += length


# The interpreter computes with numpy, which warns.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_poisoned_sequence_touches_no_other(place: Place) -> None:
    backend, device = place
    lengths = (2, 5, 0, 1, 17) if IS_INTERPRETED else (2, 130, 0, 1, 67)
    case = SsdCase("", lengths, 2, 4, 1, 8)
    clean, dirty = make_ssd_inputs(case, device=device), make_ssd_inputs(case, device=device)
    end = 2 + lengths[1]
    for tensor in (dirty.x, dirty.dt, dirty.b, dirty.c):
        tensor[2:end] = float("nan")
    dirty.initial_states[1] = float("nan")
    expected, expected_final = run_ssd(case, clean, True, backend=backend)
    actual, final = run_ssd(case, dirty, True, backend=backend)
    assert actual[2:end].isnan().all()
    others = [0, 2, 3, 4]
    assert torch.equal(actual[end:], expected[end:])
    assert torch.equal(actual[:2], expected[:2])
    assert torch.equal(final[others], expected_final[others])


@pytest.mark.parametrize("chunk_size", [16, 32, 128])
def test_chunk_size_changes_nothing(chunk_size: int) -> None:
    case = SSD_CASES[0]
    inputs = make_ssd_inputs(case)
    expected, expected_final = run_ssd(case, inputs, True, backend="torch")
    actual, final = run_ssd(case, inputs, True, backend="torch", chunk_size=chunk_size)
    assert_close("y", expected, actual, 1e-5)
    assert_close("final", expected_final, final, 1e-5)


INPUTS = make_ssd_inputs(SsdCase("", (1, 3), 4, 6, 2, 5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(4, 6)}, "x must be"),
        ({"x": INPUTS.x.double()}, "x must be float32"),
        ({"b": torch.ones(4, 3, 5)}, "H a multiple of G"),
        ({"b": torch.ones(3, 2, 5)}, r"b must be torch.float32 \[4, 2, 5\]"),
        ({"c": torch.ones(4, 2, 6)}, r"c must be torch.float32 \[4, 2, 5\]"),
        ({"dt": INPUTS.dt.half()}, r"dt must be torch.float32 \[4, 4\]"),
        ({"a": torch.ones(5)}, r"a must be torch.float32 \[4\]"),
        ({"d": torch.ones(5)}, r"d must be \[4\]"),
        ({"seq_lens": (1, 2)}, "seq_lens must sum to the 4 rows"),
        ({"initial_states": torch.ones(2, 4, 5, 6)}, r"initial_states must be torch.float32 \[2, 4, 6, 5\]"),
        ({"chunk_size": 48}, "chunk_size must be a power of two"),
        ({"backend": "cuda"}, "backend must be one of"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    names = ("x", "dt", "a", "b", "c", "cu_seqlens")
    arguments = {name: getattr(INPUTS, name) for name in names} | {"seq_lens": (1, 3)} | changes
    with pytest.raises(ValueError, match=message):
        ssd(**arguments)
