"""The images of a batch as arguments of a network of transformers.

Shape letters: P patches of all images, S patch size in pixels, F frames of a patch, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ....protocol.images import ImagePatches, ImageSpec
from ....protocol.model_info import ModelInfo
from ..packed_batch import PackedBatch, copy_to_device

Grid = tuple[int, int]


class ImageInputs:
    """The arguments for images of one family. This class: images in one size, such as those of SigLIP.

    Args:
        spec: Preprocessing of the images.
        token_id: Placeholder of the rows of an image.
        device: Device of the arguments.

    Attributes:
        token_id: Placeholder of the rows of an image.
    """

    def __init__(self, spec: ImageSpec, token_id: int, device: torch.device) -> None:
        self.token_id = token_id
        self._spec = spec
        self._device = device

    def packed(self, batch: PackedBatch) -> dict[str, Any]:
        """Returns the arguments of a forward with all sequences in one row, in addition to those for texts."""
        return self.of_images([image for images in batch.images for image in images])

    def padded(self, images: Sequence[ImagePatches], input_ids: Tensor) -> dict[str, Any]:
        """Returns the arguments of a padded forward, in addition to those for texts.

        Args:
            images: The images of the sequences in their order.
            input_ids: [N, L].
        """
        return self.of_images(images)

    def of_images(self, images: Sequence[ImagePatches]) -> dict[str, Any]:
        """Returns the arguments of images; none for no images."""
        if not images:
            return {}
        rows, columns = images[0].grid
        size = self._spec.patch_size
        patches = self._colours(images).reshape(len(images), rows, columns, 3, size, size)
        return {"pixel_values": patches.permute(0, 3, 1, 4, 2, 5).reshape(len(images), 3, rows * size, columns * size)}

    def num_rows(self, image: ImagePatches) -> int:
        """Returns the rows of an image in the language model."""
        return self._spec.num_tokens(image)

    def probe_images(self) -> list[ImagePatches]:
        """Returns images of random pixels, of different sizes if the family has different sizes."""
        return [self._random(self._spec.gray().grid, 1), self._random(self._spec.gray().grid, 2)]

    def _random(self, grid: Grid, seed: int) -> ImagePatches:
        count = max(grid[0] * grid[1], 1)
        width = 3 * self._spec.patch_size**2
        return ImagePatches(np.random.default_rng(seed).integers(0, 256, (count, width), np.uint8), grid)

    def _colours(self, images: Sequence[ImagePatches]) -> Tensor:
        """Returns the normalised patches [P, 3, S, S] float32 of images."""
        spec = self._spec
        size = spec.patch_size
        pixels = self._put(np.concatenate([image.pixels for image in images]))
        mean, std = (torch.tensor(values, device=self._device)[:, None, None] for values in (spec.mean, spec.std))
        return (pixels.reshape(-1, size, size, 3).permute(0, 3, 1, 2).float() * spec.rescale - mean) / std

    def _put(self, array: NDArray[Any]) -> Tensor:
        tensor = copy_to_device({"array": torch.from_numpy(array)}, self._device)["array"]
        assert tensor is not None, "there is an array"
        return tensor


class PaliGemmaInputs(ImageInputs):
    """ColPali: attention in both directions, and positions that begin at 1 (those of packed rows are the caller's)."""

    def packed(self, batch: PackedBatch) -> dict[str, Any]:
        """Switches the causal mask off."""
        return {**super().packed(batch), "is_causal": False}

    def padded(self, images: Sequence[ImagePatches], input_ids: Tensor) -> dict[str, Any]:
        """Marks all tokens as prefix, which attends in both directions."""
        return {**super().padded(images, input_ids), "token_type_ids": torch.zeros_like(input_ids)}


class TileInputs(ImageInputs):
    """ColModernVBert: tiles of all images, one after another."""

    def of_images(self, images: Sequence[ImagePatches]) -> dict[str, Any]:
        """Returns the tiles of all images as one sample, [1, tiles, 3, S, S]."""
        return {"pixel_values": self._colours(images)[None]} if images else {}

    def num_rows(self, image: ImagePatches) -> int:
        """Returns `rows_of_tile` for each tile."""
        return len(image.pixels) * self.rows_of_tile

    rows_of_tile = 64
    """Rows of a tile in the language model."""

    def probe_images(self) -> list[ImagePatches]:
        """Returns an image of three tiles and one of a single tile."""
        one, two = (self._random((0, 0), seed) for seed in (1, 2))
        return [ImagePatches(np.concatenate([one.pixels, two.pixels, one.pixels]), (1, 2)), two]


class Gemma4Inputs(ImageInputs):
    """Gemma 4: the patches of each image with their positions, padded to those of the largest image."""

    def of_images(self, images: Sequence[ImagePatches]) -> dict[str, Any]:
        """Returns padded patches and their positions; -1 marks padding."""
        if not images:
            return {}
        length = max(len(image.pixels) for image in images)
        pixels = np.zeros((len(images), length, images[0].pixels.shape[1]), np.uint8)
        positions = np.full((len(images), length, 2), -1, np.int64)
        for number, image in enumerate(images):
            pixels[number, : len(image.pixels)] = image.pixels
            positions[number, : len(image.pixels)] = self._places(image.grid)
        spec = self._spec
        mean, std = (torch.tensor(values, device=self._device) for values in (spec.mean, spec.std))
        values = (self._put(pixels).unflatten(-1, (-1, 3)).float() * spec.rescale - mean) / std
        return {"pixel_values": values.flatten(-2), "image_position_ids": self._put(positions)}

    def probe_images(self) -> list[ImagePatches]:
        """Returns two images of different numbers of patches."""
        side = self._spec.merge_size
        return [self._random((2 * side, 3 * side), 1), self._random((side, 2 * side), 2)]

    def _places(self, grid: Grid) -> NDArray[np.int64]:
        """Returns the column and the row of each patch, [P, 2], in the order of ImagePatches."""
        side = self._spec.merge_size
        rows, columns = np.indices(grid)
        blocks = np.stack([columns, rows], axis=-1).reshape(grid[0] // side, side, grid[1] // side, side, 2)
        return blocks.swapaxes(1, 2).reshape(-1, 2)


class QwenInputs(ImageInputs):
    """Qwen2-VL and its successors: patches of images of different sizes."""

    num_frames = 2
    """F."""

    def of_images(self, images: Sequence[ImagePatches]) -> dict[str, Any]:
        """Returns each patch F times, as a video of one image, and the grids."""
        if not images:
            return {}
        frames = self._colours(images)[:, :, None].expand(-1, -1, self.num_frames, -1, -1)
        grids = np.array([(1, *image.grid) for image in images], np.int64)
        return {"pixel_values": frames.flatten(1), "image_grid_thw": self._put(grids)}

    def probe_images(self) -> list[ImagePatches]:
        """Returns two images of different numbers of patches."""
        side = self._spec.merge_size
        return [self._random((2 * side, 3 * side), 1), self._random((side, 2 * side), 2)]


class Qwen3VlInputs(QwenInputs):
    """Qwen3-VL: tokens of images have positions in rows and columns."""

    def packed(self, batch: PackedBatch) -> dict[str, Any]:
        """Adds the positions of all tokens if there are images."""
        return {**super().packed(batch), "position_ids": self._positions(batch)} if batch.images else {}

    def padded(self, images: Sequence[ImagePatches], input_ids: Tensor) -> dict[str, Any]:
        """Marks the tokens of images: the network derives positions from the marks."""
        if not images:
            return {}
        return {**super().padded(images, input_ids), "mm_token_type_ids": (input_ids == self.token_id).int()}

    def _positions(self, batch: PackedBatch) -> Tensor:
        """Returns the positions [3, 1, T] of the tokens in time, in rows and in columns."""
        assert batch.token_ids is not None, "the batch was built from arrays"
        bounds = np.cumsum([0, *batch.seq_lens])
        side = self._spec.merge_size
        positions = [
            rotary_positions(
                batch.token_ids[first:last],
                self.token_id,
                [(image.grid[0] // side, image.grid[1] // side) for image in images],
            )
            for first, last, images in zip(bounds, bounds[1:], batch.images, strict=False)
        ]
        return self._put(np.concatenate(positions, axis=1)[:, None])


class ColQwen2Inputs(QwenInputs):
    """ColQwen2: the patches of each image are padded to those of the largest one."""

    def of_images(self, images: Sequence[ImagePatches]) -> dict[str, Any]:
        """Returns the patches as [images, patches of the largest, ...], padded with zeros."""
        arguments = super().of_images(images)
        if images:
            patches = arguments["pixel_values"].split([len(image.pixels) for image in images])
            arguments["pixel_values"] = pad_sequence(list(patches), batch_first=True)
        return arguments


_CLASSES: Final[Mapping[str, type[ImageInputs]]] = {
    "qwen3_vl": Qwen3VlInputs,
    "embedding_gemma2": Gemma4Inputs,
    "colqwen2": ColQwen2Inputs,
    "colpali": PaliGemmaInputs,
    "colmodernvbert": TileInputs,
}


def image_inputs(info: ModelInfo, config: Any) -> ImageInputs | None:
    """Returns the arguments for the images of a model; None for a model of texts.

    Args:
        info: The model.
        config: Its config in transformers.
    """
    if info.image_spec is None:
        return None
    config = getattr(config, "vlm_config", config)
    inputs = _CLASSES[info.model_type](info.image_spec, config.image_token_id, torch.device(info.device))
    if isinstance(inputs, QwenInputs):
        inputs.num_frames = config.vision_config.temporal_patch_size
    if isinstance(inputs, TileInputs):
        side = config.vision_config.image_size // config.vision_config.patch_size
        inputs.rows_of_tile = side**2 // config.pixel_shuffle_factor**2
    return inputs


def rotary_positions(token_ids: NDArray[np.int64], image_token_id: int, grids: Sequence[Grid]) -> NDArray[np.int64]:
    """Returns the positions [3, L] of the tokens of a sequence in time, in rows and in columns.

    A text counts up in all three. The tokens of an image have one time, and their row and column after the position of
    the image. The text after it continues at the largest of them plus one (M-RoPE of Qwen2-VL, arXiv 2409.12191).

    Args:
        token_ids: [L].
        image_token_id: Placeholder of the rows of an image.
        grids: Rows and columns of the tokens of each image.
    """
    positions = np.empty((3, len(token_ids)), np.int64)
    first = position = 0
    for rows, columns in grids:
        start = first + int(np.argmax(token_ids[first:] == image_token_id))
        end = start + rows * columns
        positions[:, first:start] = np.arange(position, position + start - first)
        position += start - first
        positions[0, start:end] = position
        positions[1, start:end] = position + np.arange(rows).repeat(columns)
        positions[2, start:end] = position + np.tile(np.arange(columns), rows)
        first, position = end, position + max(rows, columns)
    positions[:, first:] = np.arange(position, position + len(token_ids) - first)
    return positions
