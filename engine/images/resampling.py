"""Computes a part of an enlarged image without the rest of it. Same pixels as Pillow's resize (Resample.c).

Pillow resizes the rows of an enlarged image first, then the columns. If it shrinks an image, the order depends on the
size and on Pillow's version, and affects the roundings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_PRECISION_BITS: Final = 22
"""Bits after the binary point in Pillow's weights for 8-bit pixels."""
_Filter = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def _bilinear(x: NDArray[np.float64]) -> NDArray[np.float64]:
    x = np.abs(x)
    return np.where(x < 1, 1 - x, 0)


def _bicubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    a, x = -0.5, np.abs(x)
    return np.where(x < 1, ((a + 2) * x - (a + 3)) * x * x + 1, np.where(x < 2, (((x - 5) * x + 8) * x - 4) * a, 0))


def _lanczos(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where((x >= -3) & (x < 3), _sinc(x) * _sinc(x / 3), 0)


def _sinc(x: NDArray[np.float64]) -> NDArray[np.float64]:
    angle = np.where(x == 0, 1, x * math.pi)
    return np.where(x == 0, 1, np.sin(angle) / angle)


_FILTERS: Final[Mapping[Image.Resampling, tuple[_Filter, float]]] = {
    Image.Resampling.BILINEAR: (_bilinear, 1),
    Image.Resampling.BICUBIC: (_bicubic, 2),
    Image.Resampling.LANCZOS: (_lanczos, 3),
}
"""Functions and their support: the pixels on each side that they weight."""


def resize_part(
    image: Image.Image,
    size: tuple[int, int],
    rows: tuple[int, int],
    columns: tuple[int, int],
    resample: Image.Resampling,
) -> NDArray[np.uint8]:
    """Returns the pixels [H, W, 3] of `image.resize` between the given bounds, for an image that is not shrunk.

    Args:
        image: An image of mode RGB.
        size: (height, width) of the whole enlarged image.
        rows: First row and end of the part.
        columns: First column and end of the part.
        resample: Bilinear, bicubic or Lanczos.
    """
    row_weights, row_sources = _weights(image.height, size[0], rows, resample)
    column_weights, column_sources = _weights(image.width, size[1], columns, resample)
    top, bottom = int(row_sources.min()), int(row_sources.max()) + 1
    left, right = int(column_sources.min()), int(column_sources.max()) + 1
    pixels = np.asarray(image.crop((left, top, right, bottom)))
    if size[1] != image.width:
        pixels = _combine(pixels.swapaxes(0, 1), column_weights, column_sources - left).swapaxes(0, 1)
    else:
        pixels = pixels[:, columns[0] - left : columns[1] - left]
    if size[0] == image.height:
        return pixels[rows[0] - top : rows[1] - top]
    return _combine(pixels, row_weights, row_sources - top)


def _combine(pixels: NDArray[np.uint8], weights: NDArray[np.int64], sources: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Returns rows [R, W, 3], each a weighted sum of K rows of pixels [H, W, 3]; weights and sources are [R, K]."""
    sums = np.full((len(weights), *pixels.shape[1:]), 1 << _PRECISION_BITS - 1, np.int64)
    for position in range(weights.shape[1]):
        sums += weights[:, position, None, None] * pixels[sources[:, position]]
    combined: NDArray[np.uint8] = np.clip(sums >> _PRECISION_BITS, 0, 255).astype(np.uint8)
    return combined


def _weights(
    edge: int, resized_edge: int, bounds: tuple[int, int], resample: Image.Resampling
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the weights [R, K] of the source pixels of each resized pixel, in fixed point, and their positions."""
    function, support = _FILTERS[resample]
    scale = edge / resized_edge
    filter_scale = max(scale, 1.0)
    support *= filter_scale
    centres = (np.arange(*bounds, dtype=np.float64)[:, None] + 0.5) * scale
    first = np.maximum((centres - support + 0.5).astype(np.int64), 0)
    end = np.minimum((centres + support + 0.5).astype(np.int64), edge)
    sources = first + np.arange(math.ceil(support) * 2 + 1)
    weights = np.where(sources < end, function((sources - centres + 0.5) * (1 / filter_scale)), 0)
    weights /= np.cumsum(weights, axis=1)[:, -1:]  # summed in Pillow's order
    fixed = np.trunc(np.copysign(0.5, weights) + weights * (1 << _PRECISION_BITS)).astype(np.int64)
    return fixed, np.minimum(sources, edge - 1)
