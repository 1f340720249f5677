"""The pooled results of a batch, and their copy to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, cast

import numpy as np
from numpy.typing import NDArray

from ..protocol.batch_outputs import ArrayBlock, Arrays, BatchOutputs
from .row_ops import R, Rows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutputBlock(Generic[R]):
    """Results of one kind for some sequences of a batch, arrays or tensors on any device. See ArrayBlock."""

    name: str
    values: R
    indices: Sequence[int] | None = None
    row_lens: tuple[int, ...] | None = None
    widths: tuple[int, ...] | None = None

    def on_host(self, values: NDArray[np.float32]) -> ArrayBlock:
        """Returns the block with `values`, the copy of its values on the host."""
        return ArrayBlock(
            name=self.name, values=values, indices=self.indices, row_lens=self.row_lens, widths=self.widths
        )


class PoolerOutput(Generic[R]):
    """The results of one batch, by sequence and name. They stay on the device until a method returns arrays.

    Args:
        batch_size: Sequences in the batch, complete or not.
        blocks: A sequence is in at most one block of each name.
    """

    def __init__(self, batch_size: int, blocks: Sequence[OutputBlock[R]]) -> None:
        self.batch_size = batch_size
        self.blocks = tuple(blocks)
        self._on_host: BatchOutputs | None = None

    def to_host(self) -> BatchOutputs:
        """Returns the results on the host. Copies them only from a device, and then waits; see `begin_copy`."""
        if self._on_host is None:
            blocks = [block.on_host(_to_host(block.values)) for block in self.blocks]
            self._on_host = BatchOutputs.of(self.batch_size, blocks)
        return self._on_host

    def begin_copy(self: PoolerOutput[Tensor], to_host: Callable[[Sequence[Tensor]], list[Tensor]]) -> OutputCopy:
        """Starts to copy the results to the host, with a flag for each block whether its values are finite.

        Args:
            to_host: See DeviceStream.to_host.
        """
        values = [block.values for block in self.blocks]
        copies = to_host([*values, *map(_is_finite, values)])
        return OutputCopy(self, copies[: len(values)], copies[len(values) :])

    def to_numpy(self) -> list[Arrays]:
        """Returns the arrays of each sequence by name; see BatchOutputs.split."""
        return self.to_host().split()

    def get_embedding(self, idx: int) -> NDArray[np.float32]:
        """Returns the embedding [D] of one sequence.

        Raises:
            KeyError: The sequence has no embedding: it has another task, or continues after this batch.
        """
        arrays = self.to_numpy()[idx]
        if "embedding" not in arrays:
            raise KeyError(f"sequence {idx} has no embedding; it has {', '.join(arrays) or 'no results yet'}")
        return arrays["embedding"]


@dataclass(frozen=True, slots=True, eq=False)
class OutputCopy:
    """A running copy of the results of one batch to the host.

    Attributes:
        output: The results on the device.
        values: The copies of the blocks' values. Read them after the copy has ended.
        are_finite: The copies of one bool per block: whether all values are finite.
    """

    output: PoolerOutput[Tensor]
    values: Sequence[Tensor]
    are_finite: Sequence[Tensor]

    def arrived(self) -> BatchOutputs:
        """Returns the results, views of the copies. Call it after the copy has ended."""
        pairs = zip(self.output.blocks, self.values, strict=True)
        blocks = tuple(block.on_host(values.numpy()) for block, values in pairs)
        if not all(is_finite.item() for is_finite in self.are_finite):
            return BatchOutputs.of(self.output.batch_size, blocks)  # finds the sequences with NaN or inf
        return BatchOutputs(self.output.batch_size, blocks, np.ones(self.output.batch_size, np.bool_))


def _to_host(values: Rows) -> NDArray[np.float32]:
    if isinstance(values, np.ndarray):
        return values
    array: NDArray[np.float32] = cast("Tensor", values).cpu().numpy()
    return array


def _is_finite(values: Tensor) -> Tensor:
    """Whether all values are finite, a [] bool tensor. 0 times inf or NaN is NaN, which makes the sum NaN."""
    return values.mul(0.0).sum() == 0.0
