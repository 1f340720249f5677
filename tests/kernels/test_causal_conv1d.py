"""kernels/causal_conv1d: the reference against torch's convolution, every backend against it, chunks and the whole."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.causal_conv1d import causal_conv1d

from ..interpreter import IS_INTERPRETED
from .assertions import assert_close
from .cases import CONV_CASES, ConvCase, ConvInputs, make_conv_inputs, make_cu_seqlens
from .parameters import FLOAT_DTYPES, PLACES, Place, every_pair

# float32: sums in another order. Else one unit in the last place.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def convolve(case: ConvCase, inputs: ConvInputs, has_states: bool, **options: Any) -> tuple[Tensor, Tensor]:
    y, final = causal_conv1d(
        inputs.x,
        inputs.weight,
        inputs.bias,
        inputs.cu_seqlens,
        case.seq_lens,
        activation="silu",
        initial_states=inputs.initial_states if has_states else None,
        return_final_states=True,
        **options,
    )
    assert final is not None
    return y, final


@every_pair(case=CONV_CASES, has_states=[False, True])
def test_reference_equals_torch(case: ConvCase, has_states: bool) -> None:
    inputs = make_conv_inputs(case)
    y, final = convolve(case, inputs, has_states, backend="reference")
    start = 0
    for n, length in enumerate(case.seq_lens):
        past = inputs.initial_states[n] if has_states else torch.zeros_like(inputs.initial_states[n])
        row = torch.cat([past, inputs.x[start : start + length].t()], dim=1)
        assert torch.equal(final[n], row[:, length:])
        if length:
            expected = F.silu(F.conv1d(row, inputs.weight[:, None], inputs.bias, groups=case.channels)).t()
            assert_close(f"sequence {n}", expected, y[start : start + length], 2e-6)
        start += length


@every_pair(
    lambda case, dtype, has_states, **_: (
        not IS_INTERPRETED or (case.is_quick and (dtype == torch.float32 or has_states))
    ),
    place=PLACES,
    case=CONV_CASES,
    dtype=FLOAT_DTYPES,
    has_states=[False, True],
)
def test_backend_equals_reference(place: Place, case: ConvCase, dtype: torch.dtype, has_states: bool) -> None:
    backend, device = place
    inputs = make_conv_inputs(case, dtype, device)
    expected, expected_final = convolve(case, inputs, has_states, backend="reference")
    actual, final = convolve(case, inputs, has_states, backend=backend)
    assert actual.dtype == final.dtype == dtype
    assert actual.is_contiguous()
    assert_close("y", expected, actual, TOLERANCE[dtype])
    assert torch.equal(final, expected_final)


def test_without_bias_activation_and_states(place: Place) -> None:
    backend, device = place
    case = ConvCase("", (5, 40), 9)
    inputs = make_conv_inputs(case, device=device)
    arguments = (inputs.x, inputs.weight, None, inputs.cu_seqlens, case.seq_lens)
    expected, _ = causal_conv1d(*arguments, backend="reference")
    actual, final = causal_conv1d(*arguments, backend=backend)
    assert final is None
    assert_close("y", expected, actual, 2e-6)


@pytest.mark.parametrize("size", [2] if IS_INTERPRETED else [1, 2, 7, 64])
def test_chunks_equal_the_whole(place: Place, size: int) -> None:
    backend, device = place
    case = ConvCase("", (20 if IS_INTERPRETED else 130,), 6)
    inputs = make_conv_inputs(case, device=device)
    whole, whole_final = convolve(case, inputs, True, backend=backend)
    state = inputs.initial_states
    for start in range(0, case.seq_lens[0], size):
        rows = inputs.x[start : start + size]
        lengths = (len(rows),)
        y, state = causal_conv1d(
            rows,
            inputs.weight,
            inputs.bias,
            make_cu_seqlens(lengths, device),
            lengths,
            activation="silu",
            initial_states=state,
            return_final_states=True,
            backend=backend,
        )
        assert_close(f"rows from {start}", whole[start : start + size], y, 1e-6, whole.abs().max().item())
    assert torch.equal(state, whole_final)


# The interpreter computes with numpy, which warns.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_poisoned_sequence_touches_no_other(place: Place) -> None:
    backend, device = place
    case = ConvCase("", (2, 5, 0, 1, 9), 6)
    clean, dirty = make_conv_inputs(case, device=device), make_conv_inputs(case, device=device)
    dirty.x[2:7] = float("nan")
    dirty.initial_states[1] = float("nan")
    expected, expected_final = convolve(case, clean, True, backend=backend)
    actual, final = convolve(case, dirty, True, backend=backend)
    assert actual[2:7].isnan().all()
    others = [0, 2, 3, 4]
    assert torch.equal(actual[7:], expected[7:])
    assert torch.equal(actual[:2], expected[:2])
    assert torch.equal(final[others], expected_final[others])


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CONV_CASES[0]
    inputs = make_conv_inputs(case)
    expected, _ = convolve(case, inputs, True, backend="torch")
    monkeypatch.setattr("penstock.kernels.causal_conv1d.BLOCK_ELEMENTS", 1)
    actual, _ = convolve(case, inputs, True, backend="torch")
    assert_close("y", expected, actual, 1e-6)


X, WEIGHT, CU_SEQLENS = torch.ones(4, 6), torch.ones(6, 4), make_cu_seqlens((1, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(4, 6, 1)}, "x must be"),
        ({"x": X.double()}, "x must be float32"),
        ({"weight": torch.ones(5, 4)}, r"weight \[C, W\]"),
        ({"bias": torch.ones(5)}, r"bias must be \[6\]"),
        ({"cu_seqlens": CU_SEQLENS.long()}, "cu_seqlens must be int32"),
        ({"seq_lens": (1, 2)}, "seq_lens must sum to the 4 rows"),
        ({"activation": "gelu"}, "activation must be"),
        ({"initial_states": torch.ones(2, 6, 4)}, r"initial_states must be torch.float32 \[2, 6, 3\]"),
        ({"initial_states": torch.ones(2, 6, 3).half()}, "initial_states must be torch.float32"),
        ({"backend": "cuda"}, "backend must be one of"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    arguments = {"x": X, "weight": WEIGHT, "bias": None, "cu_seqlens": CU_SEQLENS, "seq_lens": (1, 3)} | changes
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**arguments)
