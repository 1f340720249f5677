"""gated and gated_norm on triton equal their torch path, which equals torch's activations."""

import pytest
import torch
import torch.nn.functional as F

from penstock.kernels.gated import GATE_ACTIVATIONS, GateActivation, gated, gated_norm

from .assertions import assert_close
from .parameters import FLOAT_DTYPES, TARGETS, Target, dtypes, every_pair

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
FUNCTIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}

activations = pytest.mark.parametrize("activation", GATE_ACTIVATIONS)


@activations
def test_reference_equals_torch(activation: GateActivation) -> None:
    x = torch.cat([torch.linspace(-30, 30, 1001)[:, None], torch.full((1001, 1), 2.0)], dim=1)
    expected = 2 * FUNCTIONS[activation](x[:, :1].double())
    assert_close("gated", expected, gated(x, activation, backend="torch"), 1e-6)


@every_pair(
    target=TARGETS, activation=GATE_ACTIVATIONS, shape=[(1, 1), (5, 63), (33, 80), (3, 3000)], dtype=FLOAT_DTYPES
)
def test_backend_equals_reference(
    target: Target, activation: GateActivation, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    backend, device = target
    num_rows, width = shape
    generator = torch.Generator().manual_seed(width)
    x = (3 * torch.randn(num_rows, 2 * width + 16, generator=generator)).to(dtype).to(device)[:, : 2 * width]
    copy = x.clone()
    actual = gated(x, activation, backend=backend)
    assert actual.dtype == dtype
    expected = gated(x, activation, backend="torch")
    assert_close("gated", expected, actual, TOLERANCE[dtype], scale=max(1.0, expected.abs().max().item()))
    assert torch.equal(x, copy)


@activations
def test_large_gates_saturate_and_nan_stays(target: Target, activation: GateActivation) -> None:
    backend, device = target
    gates = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4, float("nan")])
    x = torch.stack([gates, torch.ones(8)], dim=1).to(device)
    actual = gated(x, activation, backend=backend).flatten().cpu()
    assert torch.equal(actual[4:7], gates[4:7])
    assert (actual[:4].abs() < 1e-6).all()
    assert actual[7].isnan()


def test_batch_without_rows_gives_no_rows(target: Target) -> None:
    backend, device = target
    assert gated(torch.ones(0, 10, device=device), "silu", backend=backend).shape == (0, 5)


@dtypes
@pytest.mark.parametrize(
    ("num_rows", "width", "num_groups"), [(1, 1, 1), (5, 63, 3), (33, 80, 1), (3, 3000, 2), (2, 64, 64)]
)
def test_gated_norm_equals_reference(
    target: Target, num_rows: int, width: int, num_groups: int, dtype: torch.dtype
) -> None:
    backend, device = target
    generator = torch.Generator().manual_seed(width)
    gate = (3 * torch.randn(num_rows, 2 * width + 16, generator=generator)).to(dtype).to(device)[:, :width]
    x = torch.randn(num_rows, width, generator=generator).to(dtype).to(device)
    weight = torch.randn(width, generator=generator).to(device)
    actual = gated_norm(x, gate, weight, num_groups, 1e-5, backend=backend)
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    expected = gated_norm(x, gate, weight, num_groups, 1e-5, backend="torch")
    assert_close("normed", expected, actual, TOLERANCE[dtype])


def test_nan_stays_in_its_group(target: Target) -> None:
    backend, device = target
    x, weight = torch.ones(3, 40, device=device), torch.ones(40, device=device)
    expected = gated_norm(x, x, weight, 4, 1e-5, backend=backend)
    poisoned = x.clone()
    poisoned[1, 15] = float("nan")
    actual = gated_norm(poisoned, x, weight, 4, 1e-5, backend=backend)
    assert actual[1, 10:20].isnan().all()
    actual[1, 10:20] = expected[1, 10:20]
    assert torch.equal(actual, expected)
    assert gated_norm(x[:0], x[:0], weight, 4, 1e-5, backend=backend).shape == (0, 40)
