"""The images of a batch as arguments of a network of transformers.

Shape letters: P patches of all images, S patch size in pixels, F frames of a patch, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....protocol.images import ImagePatches, ImageSpec
from ..packed_batch import PackedBatch
from ..staging import copy_to_device

Grid = tuple[int, int]


class ImageInputs:
    """Builds the arguments for images of the Qwen-VL families.

    Args:
        spec: Preprocessing of the images.
        config: Config of the network.
        device: Device of the arguments.

    Attributes:
        token_id: Placeholder of the rows of an image.
    """

    def __init__(self, spec: ImageSpec, config: Any, device: torch.device) -> None:
        self.token_id: int = config.image_token_id
        self._spec = spec
        self._num_frames: int = config.vision_config.temporal_patch_size
        self._device = device

    def arguments(self, images: Sequence[ImagePatches]) -> dict[str, Tensor]:
        """Returns `pixel_values` [P, 3 * F * S * S] float32 and `image_grid_thw` [N, 3] of N images."""
        spec, size = self._spec, self._spec.patch_size
        pixels = np.concatenate([image.pixels for image in images])
        grids = np.array([(1, *image.grid) for image in images], np.int64)
        mean, std = (torch.tensor(values, device=self._device)[:, None, None] for values in (spec.mean, spec.std))
        colours = self._put(pixels).reshape(-1, size, size, 3).permute(0, 3, 1, 2).float()
        colours = (colours * spec.rescale - mean) / std
        frames = colours[:, :, None].expand(-1, -1, self._num_frames, -1, -1)
        return {"pixel_values": frames.flatten(1), "image_grid_thw": self._put(grids)}

    def positions(self, batch: PackedBatch) -> Tensor:
        """Returns the positions [3, 1, T] of the tokens in time, in rows and in columns."""
        assert batch.token_ids is not None, "the batch was built from arrays"
        bounds = np.cumsum([0, *batch.seq_lens])
        positions = [
            rotary_positions(batch.token_ids[first:last], self.token_id, [self._merged(image) for image in images])
            for first, last, images in zip(bounds, bounds[1:], batch.images, strict=False)
        ]
        return self._put(np.concatenate(positions, axis=1)[:, None])

    def _put(self, array: NDArray[Any]) -> Tensor:
        tensor = copy_to_device({"array": torch.from_numpy(array)}, self._device)["array"]
        assert tensor is not None, "there is an array"
        return tensor

    def _merged(self, image: ImagePatches) -> Grid:
        """Returns the rows and columns of the tokens of an image."""
        rows, columns = image.grid
        return rows // self._spec.merge_size, columns // self._spec.merge_size


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
