"""The layers that families share, against their definition in plain torch."""

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


def random_linear(num_out, num_in, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_out, num_in, generator=generator) / num_in**0.5
    return weight.to(dtype), torch.randn(num_out, generator=generator).to(dtype)


def assert_close(actual, expected, dtype):
    assert actual.dtype == dtype
    error = (actual.float() - expected.float()).abs().max()
    assert error <= TOLERANCE[dtype] * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("num_rows", [1, 63, 130])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_linear_equals_torch(activation, num_rows, dtype):
    weight, bias = random_linear(37, 60, dtype)
    x = torch.randn(num_rows, 60).to(dtype)
    expected = ACTIVATIONS[activation](F.linear(x.float(), weight.float(), bias.float()))
    assert_close(Linear(weight.clone(), bias, activation=activation)(x), expected, dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_residual_is_added_to_the_product(dtype):
    weight, bias = random_linear(32, 48, dtype)
    x, other = torch.randn(9, 48).to(dtype), torch.randn(9, 32).to(dtype)
    kept = other.clone()
    linear = Linear(weight, bias)
    product = F.linear(x.float(), weight.float(), bias.float())
    assert_close(linear(x, add=other), product + other.float(), dtype)
    assert torch.equal(other, kept)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("has_bias", [True, False])
def test_gated_linear_equals_torch(has_bias, dtype):
    weight, bias = random_linear(2 * 24, 40, dtype)
    x = torch.randn(11, 40).to(dtype)
    both = F.linear(x.float(), weight.float(), bias.float() if has_bias else None)
    gate, value = both.chunk(2, dim=-1)
    gated = GatedLinear(weight, bias if has_bias else None, "gelu")
    assert_close(gated(x), F.gelu(gate) * value, dtype)


def test_rows_of_a_product_do_not_depend_on_the_batch():
    weight, bias = random_linear(384, 1536, torch.float32)
    linear = Linear(weight, bias, activation="gelu")
    x = torch.randn(500, 1536)
    together = linear(x)
    scale = together.abs().max()
    for size in (1, 2, 16, 17, 64, 130):
        assert (linear(x[:size]) - together[:size]).abs().max() <= 1e-6 * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_takes_its_statistics_in_float32(dtype):
    # Far from zero a mean in bfloat16 would be wrong in the first digit.
    x = (torch.randn(5, 64) + 30).to(dtype)
    weight, bias = torch.randn(64), torch.randn(64)
    expected = F.layer_norm(x.float(), (64,), weight, bias, 1e-12)
    assert_close(LayerNorm(weight, bias, 1e-12)(x), expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_is_rounded_once(dtype):
    x = (torch.randn(5, 16) * 30).to(dtype)
    weight = 1.0 + 0.01 * torch.randn(16)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    normed = RmsNorm(weight, 1e-6)(x)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_rotation_of_part_of_a_head_leaves_the_rest(pack):
    rotation = RotaryEmbedding(RopeSpec(theta=100.0, size=4), torch.device("cpu"))(pack([[5, 6, 7]]))
    x = torch.randn(3, 2, 8)
    turned, small = x.clone(), x[..., :4].clone()
    rotary(turned, *rotation, 2)
    rotary(small, *rotation, 2)
    torch.testing.assert_close(turned, torch.cat([small, x[..., 4:]], -1), rtol=0, atol=0)


def test_rotation_turns_each_pair_of_halves(pack):
    embedding = RotaryEmbedding(RopeSpec(theta=100.0, size=8), torch.device("cpu"))
    batch = pack([[5, 6, 7]])
    positions = batch.positions
    x = torch.randn(3, 4, 8)
    expected = torch.empty_like(x)
    for i in range(4):
        angle = positions * 100.0 ** (-2 * i / 8)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        expected[..., i] = x[..., i] * cos - x[..., i + 4] * sin
        expected[..., i + 4] = x[..., i + 4] * cos + x[..., i] * sin
    rotary(x, *embedding(batch), 4)
    torch.testing.assert_close(x, expected)


def test_unknown_activation_is_named():
    with pytest.raises(UnsupportedModelError, match="'glu'"):
        find_activation("glu")
