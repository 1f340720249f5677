"""Images as inputs: the encoded file of a client, and the patches that a model reads.

Shape letters: P patches, S patch size in pixels.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image as the client sent it.

    Attributes:
        data: The encoded file, such as PNG or JPEG.
        location: Place in the body of the request for messages, such as `input[3].image`. Empty: messages name
            the position of the input.
    """

    data: bytes
    location: str = field(default="", compare=False, repr=False)

    def error(self, index: int, reason: str) -> InvalidRequestError:
        """Returns the error of this image.

        Args:
            index: Position among the inputs of the request.
            reason: Text after the location of the image, without the final period.
        """
        param = re.split(r"[.\[]", self.location, maxsplit=1)[0] or "input"
        return InvalidRequestError(f"{self.location or f'Input {index}'} {reason}.", param=param)


@dataclass(frozen=True, slots=True)
class MixedInput:
    """One input of texts and images.

    Attributes:
        parts: Texts and images in their order; at least one image.
    """

    parts: tuple[str | ImageInput, ...]

    @property
    def images(self) -> tuple[ImageInput, ...]:
        """The images, in order."""
        return tuple(part for part in self.parts if isinstance(part, ImageInput))


class ImageResize(StrEnum):
    """How an image is brought to the size that the model reads.

    Attributes:
        EXACT: To ImageSpec.size; the proportions may change.
        SHORTEST_EDGE: The shorter edge to the height of ImageSpec.size; the proportions stay.
        PATCHES: To the largest size of whole patches with about the same proportions and at most `max_patches` patches
            (SigLIP 2, naflex).
        AREA: To whole blocks of patches with about the same proportions, and an area between `min_pixels` and
            `max_pixels` (Qwen2-VL and its successors).
        FILL: To the largest whole blocks of patches with about the same proportions and at most `max_patches` patches
            (Gemma 4).
        TILES: The longer edge to the height of ImageSpec.size, then both edges to multiples of the patch size. The
            patches are tiles; the whole image is added as the last one unless there is one tile (Idefics3).
    """

    EXACT = "exact"
    SHORTEST_EDGE = "shortest_edge"
    PATCHES = "patches"
    AREA = "area"
    FILL = "fill"
    TILES = "tiles"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """The preprocessing of a model's images, from preprocessor_config.json.

    Attributes:
        patch_size: S.
        resize: How an image is resized.
        size: (height, width) in pixels; (0, 0) for PATCHES, AREA and FILL. SHORTEST_EDGE needs `crop`.
        crop: (height, width) of the centre to cut out after the resize; None: no crop.
        resample: Filter of the resize, as Pillow's number: 1 Lanczos, 2 bilinear, 3 bicubic.
        rescale: Factor of the pixel values before `mean` and `std`.
        mean: Subtracted from red, green and blue after `rescale`.
        std: Divides red, green and blue after `mean` is subtracted.
        max_patches: Patches of the largest image.
        num_class_rows: Rows that the model puts before the patches: 1 for a class embedding, otherwise 0.
        merge_size: Edge of a block in patches. ImagePatches.pixels has the patches of a block one after another. In a
            language model a block is one token.
        min_pixels: AREA: smallest area after the resize.
        max_pixels: AREA: largest area after the resize.
    """

    patch_size: int
    resize: ImageResize
    size: tuple[int, int]
    crop: tuple[int, int] | None = None
    resample: int = 3
    rescale: float = 1 / 255
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    max_patches: int
    num_class_rows: int = 0
    merge_size: int = 1
    min_pixels: int = 0
    max_pixels: int = 0

    def num_tokens(self, image: ImagePatches) -> int:
        """Returns the tokens of an image in a language model, except with TILES."""
        return len(image.pixels) // self.merge_size**2

    def cells(self, image: ImagePatches, num_tokens: int) -> NDArray[np.intp]:
        """Returns [R, C]: for each cell of a grid on the image the index of its token in a language model.

        Args:
            image: An image.
            num_tokens: Its tokens, without the tags of tiles.
        """
        if self.resize is not ImageResize.TILES:
            rows, columns = (edge // self.merge_size for edge in image.grid)
            return np.arange(rows * columns).reshape(rows, columns)
        rows, columns = image.grid if image.grid != (0, 0) else (1, 1)
        side = math.isqrt(num_tokens // len(image.pixels))
        tiles = np.arange(rows * columns * side**2).reshape(rows, columns, side, side)
        return tiles.swapaxes(1, 2).reshape(rows * side, columns * side)

    def max_bytes(self, width: int, height: int) -> int:
        """Returns the most bytes of a preprocessed image.

        Args:
            width: Pixels of the image.
            height: Pixels of the image.
        """
        if self.resize is ImageResize.AREA:
            block = self.patch_size * self.merge_size
            scale = max(1.0, math.sqrt(self.min_pixels / (width * height)))
            # Each edge is rounded up to whole blocks.
            return 3 * min(math.ceil((width * scale + block) * (height * scale + block)), self.max_pixels)
        return 3 * self.max_patches * self.patch_size**2

    def gray(self) -> ImagePatches:
        """Returns a gray image for warm-up: the largest square; with AREA and FILL four blocks, with TILES one tile."""
        height, width = self.crop or self.size
        grid = (height // self.patch_size, width // self.patch_size)
        if self.resize is ImageResize.PATCHES:
            side = math.isqrt(self.max_patches)
            grid = (side, side)
        elif self.resize in (ImageResize.AREA, ImageResize.FILL):
            grid = (2 * self.merge_size, 2 * self.merge_size)
        elif self.resize is ImageResize.TILES:
            return ImagePatches(np.full((1, 3 * self.patch_size**2), 127, np.uint8), (0, 0))
        return ImagePatches(np.full((grid[0] * grid[1], 3 * self.patch_size**2), 127, np.uint8), grid)


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """The token vectors of an image as cells of a grid that covers the image, for heat maps.

    Attributes:
        rows: R.
        columns: C.
        vectors: [R * C]: index of the token vector of each cell, from left to right, then from top to bottom.
    """

    rows: int
    columns: int
    vectors: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class ImagePatches:
    """A preprocessed image. The model's first product includes `rescale`, `mean` and `std`.

    Attributes:
        pixels: [P, S * S * 3] uint8. Blocks from left to right, then from top to bottom, and the patches of a block
            likewise; within a patch rows, then columns, then red, green and blue.
        grid: (rows, columns) of patches; with TILES without the whole image, and (0, 0) for one tile.
    """

    pixels: NDArray[np.uint8]
    grid: tuple[int, int]
