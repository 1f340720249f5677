"""Norms compute in float32 and round once."""

import pytest
import torch
import torch.nn.functional as F

from penstock.engine.executors.torch.layers.norm import LayerNorm, Residual, RmsNorm, load_norm
from penstock.engine.executors.torch.layers.weights import Weights
from penstock.engine.families.spec import Bias, NormSpec

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@dtypes
def test_layer_norm_takes_statistics_in_float32(dtype):
    x = (torch.randn(5, 64) + 30).to(dtype)  # a mean in bfloat16 would be wrong in the first digit
    weight, bias = torch.randn(64), torch.randn(64)
    expected = F.layer_norm(x.double(), (64,), weight.double(), bias.double(), 1e-12)
    normed = LayerNorm(weight, bias, 1e-12)(x)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.double(), expected, rtol=torch.finfo(dtype).eps, atol=2e-5)


@dtypes
def test_rms_norm_is_rounded_once(dtype):
    x = (torch.randn(5, 16) * 30).to(dtype)
    weight = 1.0 + 0.01 * torch.randn(16)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    normed = RmsNorm(weight, 1e-6)(x)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


class Tensors(dict):
    """A checkpoint in memory."""

    read = dict.__getitem__


def test_weights_of_norms_on_the_cpu_are_float32():
    stored = torch.randn(4)
    weights = Weights(Tensors({"n.weight": stored}), torch.bfloat16, torch.device("cpu"))
    for expected, options in (
        (stored, {"name": "n", "bias": Bias.OPTIONAL}),
        (stored + 1, {"name": "n", "is_rms": True, "offset": 1.0}),
        (torch.ones(4), {"name": None, "is_rms": True}),
    ):
        norm = load_norm(weights, NormSpec(size=4, eps=1e-6, **options)).norm
        assert norm.weight.dtype == torch.float32
        assert torch.equal(norm.weight, expected)
        assert norm.bias is None


@pytest.mark.parametrize("is_fused", [False, True])
def test_fused_residual_leaves_its_term_to_the_next_norm(is_fused):
    hidden, term, weight = torch.randn(5, 16), torch.randn(5, 16), torch.rand(16) + 0.5
    norm, start = RmsNorm(weight, 1e-6), Residual(hidden, is_fused=is_fused)

    def mapping(x, *, add=None):
        return 2 * x if add is None else 2 * x + add

    for found, total in (
        (start.plus_term(term), hidden + term),
        (start.plus(mapping, term), hidden + 2 * term),
        (start.plus(mapping, term, scale=0.5), hidden + term),
        (start.plus_normed(norm, term), hidden + norm(term)),
    ):
        assert is_fused or found.term is None
        normed, rest = found.normed_and_sum(norm)
        torch.testing.assert_close(normed, norm(total))
        torch.testing.assert_close(found.normed(norm), normed)
        torch.testing.assert_close(rest.hidden, total)
        assert (rest.term, rest.is_fused) == (None, is_fused)
