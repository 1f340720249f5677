"""Rounding of the formats of kernels/cpu in numpy."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.kernels.cpu import Format

from .specs import Floats

Doubles = NDArray[np.float64]


def to_bfloat16(values: Floats) -> Floats:
    """Rounds to the nearest bfloat16."""
    rounded: Floats = torch.from_numpy(values).bfloat16().float().numpy()
    return rounded


def product_in_doubles(x_RD: Floats, weight_ND: Floats, bias_N: Floats | None, form: Format) -> tuple[Doubles, Doubles]:
    """x W^T + b, rounded as a format does and then exact.

    Returns:
        The product [R, N] and the sum of the absolute values of its terms, which bounds the error.
    """
    rows, weights = x_RD, weight_ND
    if form is Format.INT8:
        rows, weights = _int8(x_RD, np.rint), _int8(weight_ND, _half_away)
    elif form is not Format.F32:
        weights = to_bfloat16(weight_ND)
        rows = to_bfloat16(x_RD) if form is Format.DOT else x_RD
    x, w = np.asarray(rows, np.float64), np.asarray(weights, np.float64)
    bias = np.zeros(len(w)) if bias_N is None else bias_N.astype(np.float64)
    return x @ w.T + bias, np.abs(x) @ np.abs(w).T + np.abs(bias)


def _int8(values: Floats, to_whole: Any) -> Doubles:
    """Each row as whole multiples of a 127th of its largest value."""
    largest = np.abs(values).max(1, keepdims=True)
    scaled = values * (np.float32(127) / largest) if to_whole is np.rint else values / largest * np.float32(127)
    whole: Doubles = to_whole(scaled).astype(np.float64)
    return whole * (largest / np.float32(127)).astype(np.float64)


def _half_away(values: Floats) -> Floats:
    away: Floats = np.trunc(values + np.copysign(np.float32(0.5), values))
    return away
