"""Comparison of a kernel's result with its reference."""

import torch
from torch import Tensor


def assert_close(name: str, expected: Tensor, actual: Tensor, tolerance: float, scale: float | None = None) -> None:
    """Fails unless |actual - expected| <= tolerance * scale everywhere; `scale` is the largest |expected| unless given.

    NaN must stand where NaN is expected, and nowhere else.
    """
    assert actual.shape == expected.shape, f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    expected, actual = expected.double().cpu(), actual.double().cpu()
    assert torch.equal(expected.isnan(), actual.isnan()), f"{name}: NaN at other targets than expected"
    if expected.numel() == 0:
        return
    expected, actual = expected.nan_to_num(nan=0.0), actual.nan_to_num(nan=0.0)
    limit = tolerance * (expected.abs().max().item() if scale is None else scale)
    error = (actual - expected).abs().max().item()
    assert error <= limit, f"{name}: largest error {error:.3g}, limit {limit:.3g}"
