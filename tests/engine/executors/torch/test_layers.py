"""Layers give the results of their definition in plain torch."""

import pytest
import torch
import torch.nn.functional as F

from penstock.engine.executors.torch.layers.linear import GatedLinear, Linear, find_activation
from penstock.engine.executors.torch.layers.norm import LayerNorm, RmsNorm
from penstock.engine.executors.torch.layers.rotary import RotaryEmbedding
from penstock.engine.families.rope import RopeSpec
from penstock.engine.protocol.errors import UnsupportedModelError
from penstock.kernels.rotary import rotary

ACTIVATIONS = {
    None: lambda x: x,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}

dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE))


def random_linear(num_out, num_in, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_out, num_in, generator=generator) / num_in**0.5
    return weight.to(dtype), torch.randn(num_out, generator=generator).to(dtype)


def assert_close(actual, expected, dtype):
    assert actual.dtype == dtype
    error = (actual.float() - expected.float()).abs().max()
    assert error <= TOLERANCE[dtype] * max(1.0, expected.abs().max().item())


@dtypes
@pytest.mark.parametrize("num_rows", [1, 130])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_linear_equals_torch(activation, num_rows, dtype):
    weight, bias = random_linear(37, 60, dtype)
    x = torch.randn(num_rows, 60).to(dtype)
    expected = ACTIVATIONS[activation](F.linear(x.float(), weight.float(), bias.float()))
    assert_close(Linear(weight.clone(), bias, activation=activation)(x), expected, dtype)


@dtypes
def test_linear_adds_the_residual(dtype):
    weight, bias = random_linear(32, 48, dtype)
    x, residual = torch.randn(9, 48).to(dtype), torch.randn(9, 32).to(dtype)
    copy = residual.clone()
    product = F.linear(x.float(), weight.float(), bias.float())
    assert_close(Linear(weight, bias)(x, add=residual), product + residual.float(), dtype)
    assert torch.equal(residual, copy)


@dtypes
@pytest.mark.parametrize("has_bias", [True, False])
def test_gated_linear_equals_torch(has_bias, dtype):
    weight, bias = random_linear(2 * 24, 40, dtype)
    x = torch.randn(11, 40).to(dtype)
    gate, value = F.linear(x.float(), weight.float(), bias.float() if has_bias else None).chunk(2, dim=-1)
    gated = GatedLinear(weight, bias if has_bias else None, "gelu")
    assert_close(gated(x), F.gelu(gate) * value, dtype)


@dtypes
def test_layer_norm_takes_statistics_in_float32(dtype):
    x = (torch.randn(5, 64) + 30).to(dtype)  # a mean in bfloat16 would be wrong in the first digit
    weight, bias = torch.randn(64), torch.randn(64)
    expected = F.layer_norm(x.float(), (64,), weight, bias, 1e-12)
    assert_close(LayerNorm(weight, bias, 1e-12)(x), expected, dtype)


@dtypes
def test_rms_norm_is_rounded_once(dtype):
    x = (torch.randn(5, 16) * 30).to(dtype)
    weight = 1.0 + 0.01 * torch.randn(16)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    normed = RmsNorm(weight, 1e-6)(x)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("size", [4, 8])
def test_rotation_turns_pairs_of_halves(size, pack):
    embedding = RotaryEmbedding(RopeSpec(theta=100.0, size=size), torch.device("cpu"))
    batch = pack([[5, 6, 7]])
    x = torch.randn(3, 4, 8)
    expected, half = x.clone(), size // 2
    for i in range(half):
        angle = batch.positions * 100.0 ** (-2 * i / size)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        expected[..., i] = x[..., i] * cos - x[..., i + half] * sin
        expected[..., i + half] = x[..., i + half] * cos + x[..., i] * sin
    rotary(x, *embedding(batch), 4)
    torch.testing.assert_close(x, expected)


def test_unknown_activation_is_named():
    with pytest.raises(UnsupportedModelError, match="'glu'"):
        find_activation("glu")
