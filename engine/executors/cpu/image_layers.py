"""The first and last steps of an encoder of images on the C library: patches to rows, and rows to one row per image.

Shape letters: P patches of an image, B bytes of a patch, T packed rows of N images, D width, H heads, K head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu import CpuLibrary, Format, LinearWeights, NormWeights

from ...checkpoint.views import Floats
from ...protocol.images import ImagePatches, ImageSpec
from .array_head import ArrayHead

_CHANNELS: Final = 3
_CENTRE: Final = np.float32(128)
"""Subtracted from pixels before the product: bfloat16 represents -128 to 127 exactly, and small sums more precisely."""


class PatchEmbedding:
    """Maps the patches of images to the rows that enter the first layer.

    The product includes the preprocessing (rescale, mean and std), so that images stay bytes until here.

    Args:
        library: The C library.
        spec: Preprocessing of the images.
        form: Format of the product: F32 or DOT.
        weight: [D, B] float32, in the order of ImagePatches.
        bias: [D] float32; None: no bias.
        class_row: [D] float32, the row before the patches, with its position; None: no such row.
        positions: [P, D] float32; with `resizes_positions`, of a square grid.
        resizes_positions: The positions are resized to the grid of each image.
    """

    def __init__(
        self,
        library: CpuLibrary,
        spec: ImageSpec,
        *,
        form: Format,
        weight: Floats,
        bias: Floats | None,
        class_row: Floats | None,
        positions: Floats,
        resizes_positions: bool,
    ) -> None:
        weight_DB, bias_D = with_preprocessing(weight, bias, spec)
        self._library = library
        self._product = library.pack(weight_DB, bias_D, form)
        self._class_row = class_row
        self._positions_PD = positions
        self._resizes = resizes_positions

    def __call__(self, images: Sequence[ImagePatches]) -> Floats:
        """Returns the rows of all images, [T, D] float32."""
        rows = []
        for image in images:
            if self._class_row is not None:
                rows.append(self._class_row[None])
            positions = resized_grid(self._positions_PD, image.grid) if self._resizes else self._positions_PD
            pixels = np.subtract(image.pixels, _CENTRE, dtype=np.float32)
            rows.append(self._library.product(self._product, pixels, add=positions))
        return np.concatenate(rows)


def with_preprocessing(weight_DB: Floats, bias_D: Floats | None, spec: ImageSpec) -> tuple[Floats, Floats]:
    """Returns the weight and bias of a product of pixels minus _CENTRE: (x * rescale - mean) / std, then x W^T + b."""
    num_pixels = weight_DB.shape[1] // _CHANNELS
    std_B, mean_B = (np.tile(np.array(values, np.float64), num_pixels) for values in (spec.std, spec.mean))
    scaled_DB = weight_DB / std_B
    shift_D = scaled_DB @ (_CENTRE * spec.rescale - mean_B) + (0 if bias_D is None else bias_D)
    return (scaled_DB * spec.rescale).astype(np.float32), shift_D.astype(np.float32)


def resized_grid(positions_PD: Floats, grid: tuple[int, int]) -> Floats:
    """Returns a square grid of rows resized to another grid: bilinear, with antialiasing as in torch's interpolate.

    Args:
        positions_PD: [P, D] float32, P a square number.
        grid: Rows and columns of the result.

    Returns:
        [rows * columns, D] float32.
    """
    side = round(len(positions_PD) ** 0.5)
    if grid == (side, side):
        return positions_PD
    table = positions_PD.reshape(side, side, -1)
    rows, columns = (_interpolation(side, size) for size in grid)
    resized = np.einsum("rs,std->rtd", rows, table, optimize=False)
    resized = np.einsum("ct,rtd->rcd", columns, resized, optimize=False)
    return np.ascontiguousarray(resized.reshape(grid[0] * grid[1], -1), np.float32)


def _interpolation(source: int, target: int) -> NDArray[np.float64]:
    """Returns [target, source]: the weight of each source row in each target row (a triangle filter)."""
    scale = source / target
    support = max(scale, 1.0)
    centers = (np.arange(target) + 0.5) * scale
    distances = (np.arange(source)[None] + 0.5 - centers[:, None]) / support
    weights: NDArray[np.float64] = np.maximum(1 - np.abs(distances), 0)
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


class AttentionPool:
    """Pools the rows of each image with a learned query; see AttentionPoolSpec.

    The query is constant. Its product with the projection of keys is one vector per head, and the projection of values
    follows the weighted sum of rows, so that no row is projected.

    Args:
        library: The C library.
        query: [D] float32.
        in_projection: Projection of query, keys and values, [3 * D, D] and [3 * D] float32.
        out_projection: Projection of the heads, [D, D].
        norm: Norm before the MLP.
        mlp: The two products of the MLP.
        num_heads: H.
    """

    def __init__(
        self,
        library: CpuLibrary,
        *,
        query: Floats,
        in_projection: tuple[Floats, Floats],
        out_projection: LinearWeights,
        norm: NormWeights,
        mlp: tuple[LinearWeights, LinearWeights],
        num_heads: int,
    ) -> None:
        weight, bias = in_projection
        query_w, key_w, value_w = np.split(weight.astype(np.float64), 3)
        query_b, _, value_b = np.split(bias.astype(np.float64), 3)
        size = len(query) // num_heads
        query_HK = (query_w @ query + query_b).reshape(num_heads, size) * size**-0.5
        # The bias of the keys adds the same number to all scores of a head, which the softmax ignores.
        keys_HD = np.einsum("hk,hkd->hd", query_HK, key_w.reshape(num_heads, size, -1))
        self._library = library
        self._scores = library.pack(keys_HD.astype(np.float32), None, Format.F32)
        self._values = [
            library.pack(part.astype(np.float32), value_b[h * size : (h + 1) * size].astype(np.float32), Format.F32)
            for h, part in enumerate(value_w.reshape(num_heads, size, -1))
        ]
        self._out = ArrayHead(library, (out_projection,))
        self._mlp = ArrayHead(library, (norm, *mlp))

    def __call__(self, rows_TD: Floats, cu_seqlens: NDArray[np.int32]) -> Floats:
        """Returns one row for each sequence, [N, D] float32. `cu_seqlens`: [N + 1], prefix sums of the lengths."""
        scores_TH = self._library.product(self._scores, rows_TD)
        sums_NHD = np.stack(
            [_softmax(scores_TH[start:end]).T @ rows_TD[start:end] for start, end in pairwise(cu_seqlens.tolist())]
        )
        heads = [self._library.product(part, sums_NHD[:, h]) for h, part in enumerate(self._values)]
        pooled_ND = self._out(np.concatenate(heads, axis=1))
        result: Floats = pooled_ND + self._mlp(pooled_ND)
        return result


def _softmax(scores_TH: Floats) -> Floats:
    exp = np.exp(scores_TH - scores_TH.max(axis=0))
    result: Floats = exp / exp.sum(axis=0)
    return result
