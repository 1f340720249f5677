"""Resizes, crops and cuts a decoded image into patches, with the pixels of transformers' processors on Pillow."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..protocol.images import ImagePatches, ImageResize, ImageSpec
from .resampling import resize_part

_MAX_ENLARGED_PIXELS: Final = 1 << 22
"""A larger image is enlarged only inside the crop: one of 1 x 65,535 pixels would become 224 x 14,679,840."""
_SCALE_STEP: Final = 1e-5
_MAX_SCALE: Final = 100.0


def preprocess(image: Image.Image, spec: ImageSpec) -> ImagePatches:
    """Returns the patches of an image of mode RGB."""
    if spec.resize is ImageResize.PATCHES:
        height, width = patches_size(image.height, image.width, spec.patch_size, spec.max_patches)
    elif spec.resize is ImageResize.EXACT:
        height, width = spec.size
    else:
        height, width = _shortest_edge_size(image.height, image.width, spec.size[0])
    resample = Image.Resampling(spec.resample)
    if spec.crop is None:
        pixels = np.asarray(image.resize((width, height), resample))
    else:
        pixels = _resize_and_crop(image, (height, width), spec.crop, resample)
    return _patches(pixels, spec.patch_size)


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


def _patches(pixels: NDArray[np.uint8], patch_size: int) -> ImagePatches:
    """Cuts [H, W, 3] pixels into whole patches; the remaining pixels at the right and at the bottom are left out."""
    rows, columns = pixels.shape[0] // patch_size, pixels.shape[1] // patch_size
    whole = pixels[: rows * patch_size, : columns * patch_size]
    cut = whole.reshape(rows, patch_size, columns, patch_size, 3).swapaxes(1, 2)
    return ImagePatches(cut.reshape(rows * columns, patch_size * patch_size * 3), (rows, columns))
