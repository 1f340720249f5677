"""Norms compute in float32 and round once."""

import pytest
import torch
import torch.nn.functional as F

from penstock.engine.executors.torch.layers.norm import LayerNorm, RmsNorm

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
