"""What a batch gives, as arrays over all of its sequences: one record for a batch, and none for each sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[np.float32]]
"""The outputs of one sequence by name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayBlock:
    """Results of one kind for some sequences of a batch, on the host.

    Attributes:
        name: "embedding", "scores", "token_embeddings", "token_scores", "similarities" or "sparse".
        values: [N, W] float32, a row per sequence; or [R, W], token rows.
        indices: The sequences that they belong to, in order; None means all of the batch.
        row_lens: Token rows of each sequence in this batch; None for a row per sequence.
        widths: Columns of each sequence, where they differ: what lies beyond them says nothing.
    """

    name: str
    values: NDArray[np.float32]
    indices: Sequence[int] | None = None
    row_lens: Sequence[int] | None = None
    widths: Sequence[int] | None = None

    def split(self) -> list[NDArray[np.float32]]:
        """Returns an array for each of its sequences: [W], or of token rows [L, W]. Views."""
        if self.row_lens is None:
            parts = list(self.values)
        else:
            ends = accumulate(self.row_lens)
            parts = [self.values[end - length : end] for end, length in zip(ends, self.row_lens, strict=True)]
        if self.widths is None:
            return parts
        return [part[..., :width] for part, width in zip(parts, self.widths, strict=True)]

    def pick(self, places: NDArray[np.intp]) -> ArrayBlock:
        """Returns a block of some of its sequences, by their places in it, ascending; without indices."""
        widths = None if self.widths is None else [self.widths[place] for place in places]
        if self.row_lens is None:
            return ArrayBlock(name=self.name, values=self.values[places], widths=widths)
        row_lens = np.asarray(self.row_lens)
        is_kept = np.zeros(len(row_lens), np.bool_)
        is_kept[places] = True
        values = self.values[np.repeat(is_kept, row_lens)]
        return ArrayBlock(name=self.name, values=values, row_lens=row_lens[places].tolist(), widths=widths)


@dataclass(frozen=True, slots=True, eq=False)
class BatchOutputs:
    """The results of one batch. `of` makes one where nobody has looked yet whether they are finite.

    They are on their way to whoever asked: nobody writes to their values any more.

    Attributes:
        num_seqs: Sequences in the batch, complete or not.
        blocks: At most one of a name per sequence; a sequence may be in none.
        is_finite: [num_seqs] bool. Whether all that a sequence got are numbers, and finite.
    """

    num_seqs: int
    blocks: tuple[ArrayBlock, ...]
    is_finite: NDArray[np.bool_]

    @classmethod
    def of(cls, num_seqs: int, blocks: Sequence[ArrayBlock]) -> BatchOutputs:
        """Returns the results with what a look at them says."""
        is_finite = np.ones(num_seqs, np.bool_)
        for block in blocks:
            if not np.isfinite(block.values).all():  # looked at together: each by itself takes as long
                found = [bool(np.isfinite(part).all()) for part in block.split()]
                is_finite[slice(None) if block.indices is None else list(block.indices)] &= found
        return cls(num_seqs, tuple(blocks), is_finite)

    def split(self) -> list[Arrays]:
        """Returns the arrays of each sequence by name: [D], [C], [L, D] or [L, C] float32. Views.

        A sequence of which more chunks are to come has, from a token-level task, the rows of this chunk (perhaps
        [0, D] or [0, C]), to be joined along axis 0 with those before and after; from a sequence-level task it has no
        array.
        """
        results: list[dict[str, NDArray[np.float32]]] = [{} for _ in range(self.num_seqs)]
        for block in self.blocks:
            indices = range(self.num_seqs) if block.indices is None else block.indices
            for index, array in zip(indices, block.split(), strict=True):
                results[index][block.name] = array
        return list(results)
