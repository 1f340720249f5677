"""Resizes, crops and cuts a decoded image into patches, with the pixels of transformers' processors on Pillow.

`resize_part` computes a part of an enlarged image without the rest of it, with the pixels of Pillow's resize
(Resample.c). Pillow resizes the rows of an enlarged image first, then the columns. If it shrinks an image, the order
depends on the size and on Pillow's version, and affects the roundings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..protocol.images import ImagePatches, ImageResize, ImageSpec
from .header import ImageError

_MAX_ENLARGED_PIXELS: Final = 1 << 22
"""A larger image is enlarged only inside the crop: one of 1 x 65,535 pixels would become 224 x 14,679,840."""
_SCALE_STEP: Final = 1e-5
_MAX_SCALE: Final = 100.0
_MAX_RATIO: Final = 200
"""Largest ratio of the edges of an image that is resized to an area, as in transformers."""


def preprocess(image: Image.Image, spec: ImageSpec) -> ImagePatches:
    """Returns the patches of an image of mode RGB.

    Raises:
        ImageError: The proportions of the image are not supported, or the model cannot read as many patches.
    """
    if spec.resize is ImageResize.PATCHES:
        height, width = patches_size(image.height, image.width, spec.patch_size, spec.max_patches)
    elif spec.resize is ImageResize.AREA:
        height, width = area_size(image.height, image.width, spec)
    elif spec.resize is ImageResize.FILL:
        height, width = fill_size(image.height, image.width, spec)
    elif spec.resize is ImageResize.TILES:
        return _tiles(image, spec)
    elif spec.resize is ImageResize.EXACT:
        height, width = spec.size
    else:
        height, width = _shortest_edge_size(image.height, image.width, spec.size[0])
    resample = Image.Resampling(spec.resample)
    if spec.crop is None:
        pixels = np.asarray(image.resize((width, height), resample))
    else:
        pixels = _resize_and_crop(image, (height, width), spec.crop, resample)
    return _patches(pixels, spec.patch_size, spec.merge_size)


def _shortest_edge_size(height: int, width: int, edge: int) -> tuple[int, int]:
    """Returns height and width after the shorter edge becomes `edge` (`get_resize_output_image_size`)."""
    if width <= height:
        return int(edge * height / width), edge
    return edge, int(edge * width / height)


def patches_size(height: int, width: int, patch_size: int, max_patches: int) -> tuple[int, int]:
    """Returns the height and width in pixels of the largest image of at most `max_patches` patches.

    The proportions stay nearly the same. Each edge is a multiple of the patch size. The search and its roundings are
    those of transformers' `get_image_size_for_max_num_patches` (SigLIP 2).
    """

    def scaled(scale: float, edge: int) -> int:
        return max(patch_size, math.ceil(edge * scale / patch_size) * patch_size)

    low, high = _SCALE_STEP / 10, _MAX_SCALE
    while high - low >= _SCALE_STEP:
        middle = (low + high) / 2
        if (scaled(middle, height) / patch_size) * (scaled(middle, width) / patch_size) <= max_patches:
            low = middle
        else:
            high = middle
    return scaled(low, height), scaled(low, width)


def area_size(height: int, width: int, spec: ImageSpec) -> tuple[int, int]:
    """Returns the height and width in pixels of whole blocks of patches: `smart_resize` of Qwen2-VL in transformers.

    Raises:
        ImageError: The longer edge is too long for the shorter one.
    """
    if max(height, width) / min(height, width) > _MAX_RATIO:
        raise ImageError(f"has {width} x {height} pixels; the longer edge may be {_MAX_RATIO} times the shorter one")
    block = spec.patch_size * spec.merge_size
    rows, columns = round(height / block) * block, round(width / block) * block
    if rows * columns > spec.max_pixels:
        scale = math.sqrt(height * width / spec.max_pixels)
        rows, columns = (max(block, math.floor(edge / scale / block) * block) for edge in (height, width))
    elif rows * columns < spec.min_pixels:
        scale = math.sqrt(spec.min_pixels / (height * width))
        rows, columns = (math.ceil(edge * scale / block) * block for edge in (height, width))
    if not rows * columns:
        raise ImageError(f"has {width} x {height} pixels; the model reads blocks of {block} x {block}")
    num_blocks = rows * columns // block**2
    limit = spec.max_patches // spec.merge_size**2
    if num_blocks > limit:
        raise ImageError(f"has {num_blocks} tokens; the model reads up to {limit}. Send a smaller image")
    return rows, columns


def fill_size(height: int, width: int, spec: ImageSpec) -> tuple[int, int]:
    """Returns the height and width in pixels that fill the patches: `get_aspect_ratio_preserving_size` of Gemma 4."""
    block = spec.patch_size * spec.merge_size
    area = spec.max_patches * spec.patch_size**2
    scale = math.sqrt(area / (height * width))
    rows, columns = (math.floor(scale * edge / block) * block for edge in (height, width))
    longest = spec.max_patches // spec.merge_size**2 * block
    if not rows and columns:
        rows, columns = block, min(width // height * block, longest)
    elif not columns and rows:
        rows, columns = min(height // width * block, longest), block
    return rows, columns


def _tiles(image: Image.Image, spec: ImageSpec) -> ImagePatches:
    """Returns the tiles of an image, and the whole image as the last one (Idefics3)."""
    tile = spec.patch_size
    resample = Image.Resampling(spec.resample)
    height, width = longest_edge_size(image.height, image.width, spec.size[0])
    resized = image.resize((width, height), resample)
    # transformers computes the other edge from the rounded one.
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(max(int(width / ratio), 1) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(max(int(height * ratio), 1) / tile) * tile
    if (height // tile) * (width // tile) + 1 > spec.max_patches:
        raise ImageError(f"has {image.width} x {image.height} pixels; its edges differ too much")
    resized = resized.resize((width, height), resample)
    if height == width == tile:
        return ImagePatches(np.asarray(resized).reshape(1, -1), (0, 0))
    cut = _patches(np.asarray(resized), tile, 1)
    whole = np.asarray(resized.resize((tile, tile), resample)).reshape(1, -1)
    return ImagePatches(np.concatenate([cut.pixels, whole]), cut.grid)


def longest_edge_size(height: int, width: int, edge: int) -> tuple[int, int]:
    """Returns height and width after the longer edge becomes `edge`; the other one becomes even."""
    ratio = width / height
    if width >= height:
        other = int(edge / ratio)
        return max(other + other % 2, 1), edge
    other = int(edge * ratio)
    return edge, max(other + other % 2, 1)


def _resize_and_crop(
    image: Image.Image, size: tuple[int, int], crop: tuple[int, int], resample: Image.Resampling
) -> NDArray[np.uint8]:
    """Resizes to `size` and cuts out the centre; a smaller image gets a black border (transformers' `center_crop`)."""
    (top, bottom), (left, right) = (_centre(edge, cut) for edge, cut in zip(size, crop, strict=True))
    if size[0] * size[1] > max(_MAX_ENLARGED_PIXELS, image.width * image.height):
        pixels = resize_part(image, size, (top, bottom), (left, right), resample)
    else:
        resized = image.resize((size[1], size[0]), resample)
        pixels = np.asarray(resized.crop((left, top, right, bottom)))
    if pixels.shape[:2] == crop:
        return pixels
    bordered = np.zeros((*crop, 3), np.uint8)
    first_row, first_column = (math.ceil((cut - edge) / 2) for edge, cut in zip(pixels.shape, crop, strict=False))
    bordered[first_row : first_row + pixels.shape[0], first_column : first_column + pixels.shape[1]] = pixels
    return bordered


def _centre(edge: int, cut: int) -> tuple[int, int]:
    """Returns the bounds of the middle `cut` pixels of an edge; the whole edge if it is shorter."""
    if cut >= edge:
        return 0, edge
    first = (edge - cut) // 2
    return first, first + cut


def _patches(pixels: NDArray[np.uint8], patch_size: int, merge_size: int) -> ImagePatches:
    """Cuts [H, W, 3] pixels into whole patches; the remaining pixels at the right and at the bottom are left out."""
    rows, columns = pixels.shape[0] // patch_size, pixels.shape[1] // patch_size
    whole = pixels[: rows * patch_size, : columns * patch_size]
    side = merge_size
    cut = whole.reshape(rows // side, side, patch_size, columns // side, side, patch_size, 3)
    cut = cut.transpose(0, 3, 1, 4, 2, 5, 6)
    return ImagePatches(cut.reshape(rows * columns, patch_size * patch_size * 3), (rows, columns))


_PRECISION_BITS: Final = 22
"""Bits after the binary point in Pillow's weights for 8-bit pixels."""
_Filter = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def _bilinear(x: NDArray[np.float64]) -> NDArray[np.float64]:
    x = np.abs(x)
    return np.where(x < 1, 1 - x, 0)


def _bicubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    a = -0.5
    x = np.abs(x)
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
