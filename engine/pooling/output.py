"""What pooling a batch gives, and its way off the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Arrays = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutputBlock:
    """Results of one kind for some sequences of a batch.

    Attributes:
        name: "embedding", "scores", "token_embeddings", "token_scores", "similarities" or "sparse".
        values: [N, W] float32, a row per sequence; or [R, W], token rows.
        indices: The sequences that they belong to, in order; None means all of the batch.
        row_lens: Token rows of each sequence in this batch; None for a row per sequence.
        widths: Columns of each sequence, where they differ.
    """

    name: str
    values: Tensor
    indices: Sequence[int] | None = None
    row_lens: tuple[int, ...] | None = None
    widths: tuple[int, ...] | None = None

    def split(self, values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """Returns `values`, this block's on the host, as one array per sequence. Views."""
        if self.row_lens is None:
            parts = list(values)
        else:
            ends = accumulate(self.row_lens)
            parts = [values[end - length : end] for end, length in zip(ends, self.row_lens, strict=True)]
        if self.widths is None:
            return parts
        return [part[..., :width] for part, width in zip(parts, self.widths, strict=True)]


class PoolerOutput:
    """The results of one batch, by sequence and name. On the device until somebody asks for an array.

    Args:
        batch_size: Sequences in the batch, complete or not.
        blocks: At most one of a name per sequence; a sequence may be in none.
    """

    def __init__(self, batch_size: int, blocks: Sequence[OutputBlock]) -> None:
        self.batch_size = batch_size
        self.blocks = tuple(blocks)
        self._arrays: list[Arrays] | None = None

    def to_numpy(self) -> list[Arrays]:
        """Returns the arrays of each sequence by name: [D], [C], [L, D] or [L, C] float32.

        A sequence of which more chunks are to come has, from a token-level task, the rows of this chunk (perhaps
        [0, D] or [0, C]), to be joined along axis 0 with those before and after; from a sequence-level task it has no
        array. All blocks leave the device in one copy, once; the arrays are views of it.
        """
        if self._arrays is None:
            results: list[dict[str, NDArray[np.float32]]] = [{} for _ in range(self.batch_size)]
            for block, values in zip(self.blocks, _to_host([b.values for b in self.blocks]), strict=True):
                indices = range(self.batch_size) if block.indices is None else block.indices
                for index, array in zip(indices, block.split(values), strict=True):
                    results[index][block.name] = array
            self._arrays = list(results)
        return self._arrays

    def get_embedding(self, idx: int) -> NDArray[np.float32]:
        """Returns the embedding [D] of one sequence.

        Raises:
            KeyError: It has none: another task, or more chunks are to come.
        """
        arrays = self.to_numpy()[idx]
        if "embedding" not in arrays:
            raise KeyError(f"sequence {idx} has no embedding; it has {', '.join(arrays) or 'no results yet'}")
        return arrays["embedding"]


def _to_host(tensors: Sequence[Tensor]) -> list[NDArray[np.float32]]:
    """Copies float32 tensors to the host at once; no copy where they are there."""
    if len(tensors) > 1 and any(tensor.device.type != "cpu" for tensor in tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
        parts = flat.split([tensor.numel() for tensor in tensors])
        tensors = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    return [tensor.cpu().numpy() for tensor in tensors]
