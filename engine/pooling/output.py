"""The pooled results of a batch, and their copy to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, cast

import numpy as np
from numpy.typing import NDArray

from ..protocol.batch_outputs import Arrays, BatchOutputs, OutputArray
from .row_ops import R, Rows

if TYPE_CHECKING:
    from torch import Tensor


class PoolerOutput(Generic[R]):
    """The results of one batch, by sequence and name. They stay on the device until a method returns arrays.

    Args:
        batch_size: Sequences in the batch, complete or not.
        arrays: A sequence is in at most one array of each name.
    """

    def __init__(self, batch_size: int, arrays: Sequence[OutputArray[R]]) -> None:
        self.batch_size = batch_size
        self.arrays = tuple(arrays)
        self._on_host: BatchOutputs | None = None

    def to_host(self) -> BatchOutputs:
        """Returns the results on the host. Copies them only from a device, and then waits; see `begin_copy`."""
        if self._on_host is None:
            arrays = [array.with_values(_to_host(array.values)) for array in self.arrays]
            self._on_host = BatchOutputs.of(self.batch_size, arrays)
        return self._on_host

    def begin_copy(self: PoolerOutput[Tensor], to_host: Callable[[Sequence[Tensor]], list[Tensor]]) -> OutputCopy:
        """Starts to copy the results to the host, with a flag for each array whether its values are finite.

        Args:
            to_host: See DeviceStream.to_host.
        """
        values = [array.values for array in self.arrays]
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
        values: The copies of the arrays. Read them after the copy has ended.
        are_finite: The copies of one bool per array: whether all values are finite.
    """

    output: PoolerOutput[Tensor]
    values: Sequence[Tensor]
    are_finite: Sequence[Tensor]

    def arrived(self) -> BatchOutputs:
        """Returns the results, views of the copies. Call it after the copy has ended."""
        pairs = zip(self.output.arrays, self.values, strict=True)
        arrays = tuple(array.with_values(values.numpy()) for array, values in pairs)
        if not all(is_finite.item() for is_finite in self.are_finite):
            return BatchOutputs.of(self.output.batch_size, arrays)  # finds the sequences with NaN or inf
        return BatchOutputs(self.output.batch_size, arrays, np.ones(self.output.batch_size, np.bool_))


def _to_host(values: Rows) -> NDArray[np.float32]:
    if isinstance(values, np.ndarray):
        return values
    array: NDArray[np.float32] = cast("Tensor", values).cpu().numpy()
    return array


def _is_finite(values: Tensor) -> Tensor:
    """Whether all values are finite, a [] bool tensor. 0 times inf or NaN is NaN, which makes the sum NaN."""
    return values.mul(0.0).sum() == 0.0
