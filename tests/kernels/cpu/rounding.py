"""Rounding of the formats of kernels/cpu in numpy."""

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
        rows, weights = _int8_rows(x_RD), _int8_columns(weight_ND)
    elif form is not Format.F32:
        weights = to_bfloat16(weight_ND)
        rows = to_bfloat16(x_RD) if form is Format.DOT else x_RD
    x, w = np.asarray(rows, np.float64), np.asarray(weights, np.float64)
    bias = np.zeros(len(w)) if bias_N is None else bias_N.astype(np.float64)
    return x @ w.T + bias, np.abs(x) @ np.abs(w).T + np.abs(bias)


def _int8_rows(values: Floats) -> Doubles:
    """Each row as its middle plus whole multiples of a 127th of half its range."""
    high, low = (values.max(1, keepdims=True) / 2, values.min(1, keepdims=True) / 2)
    spread, middle = high - low, high + low
    whole = np.rint((values - middle) * (np.float32(127) / spread)).astype(np.float64)
    return whole * (spread / np.float32(127)).astype(np.float64) + middle


def _int8_columns(values: Floats) -> Doubles:
    """Each column, a row of `values`, as whole multiples of a 127th of its largest value."""
    largest = np.abs(values).max(1, keepdims=True)
    scaled = values / largest * np.float32(127)
    whole = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.float64)
    return whole * (largest / np.float32(127)).astype(np.float64)
