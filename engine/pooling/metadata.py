"""Metadata of a batch for the poolers: its sequences, their parameters, and the position of chunks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..protocol.params import PoolingParams
from ..protocol.tasks import PoolingType

if TYPE_CHECKING:
    from torch import Tensor

    from ..executors.cpu.array_encoder import PackedArrays
    from ..executors.torch.packed_batch import PackedBatch

IntArray = NDArray[np.int64]
PickedRows = slice | IntArray
"""Packed rows of some sequences: a slice if they are contiguous, which avoids a copy, else [R] int64."""


@dataclass(slots=True)
class PoolingCursor:
    """The pooled tokens of a sequence, and the position of its current chunk in the packed batch.

    Attributes:
        total_len: Tokens of the whole sequence.
        num_pooled: Tokens pooled so far.
        global_start: First row of the chunk in the packed batch; a name of the specification.
        chunk_len: Tokens of the chunk, for `global_end`.
    """

    total_len: int
    num_pooled: int = 0
    global_start: int = 0
    chunk_len: int = 0

    @property
    def remaining(self) -> int:
        """Tokens that are not pooled yet."""
        return self.total_len - self.num_pooled

    @property
    def is_complete(self) -> bool:
        """Whether every token is pooled."""
        return self.num_pooled >= self.total_len

    def advance(self, num_tokens: int) -> None:
        """Counts `num_tokens` more tokens as pooled.

        Raises:
            ValueError: Fewer tokens remain.
        """
        if not 0 <= num_tokens <= self.remaining:
            raise ValueError(f"cannot advance by {num_tokens}: {self.remaining} of {self.total_len} tokens remain")
        self.num_pooled += num_tokens
        self.chunk_len = 0

    # Only library callers use the methods below. docs/internals/names.md explains their names.

    @property
    def global_end(self) -> int:
        """One past the last row of the chunk in the packed batch."""
        return self.global_start + self.chunk_len

    def reset(self) -> None:
        """Resets the cursor to the first token, with no chunk."""
        self.num_pooled = self.global_start = self.chunk_len = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkSpans:
    """The position of each chunk of a batch in its sequence.

    Attributes:
        seq_ids: N keys of the sequences in the ChunkedPoolingManager.
        starts: [N], position of the chunk's first token in its sequence.
        ends: [N], position after its last token.
        total_lens: [N], tokens of the whole sequence.
        num_pooled: [N], tokens that were pooled before this batch. More than `starts` if rows are computed again after
            a preemption, less after a prefix cache hit.
    """

    seq_ids: Sequence[Hashable]
    starts: IntArray
    ends: IntArray
    total_lens: IntArray
    num_pooled: IntArray

    @classmethod
    def of(
        cls, seq_ids: Sequence[Hashable], starts: IntArray, seq_lens: Sequence[int], total_lens: Sequence[int] | None
    ) -> ChunkSpans:
        """Returns the spans of chunks, with `num_pooled` 0.

        Args:
            seq_ids: N keys of the sequences.
            starts: [N], position of each chunk in its sequence.
            seq_lens: [N], tokens of each chunk.
            total_lens: [N], tokens of each sequence; None: it ends with its chunk.

        Raises:
            ValueError: A chunk is not within its sequence.
        """
        ends = starts + np.asarray(seq_lens, np.int64)
        whole = ends if total_lens is None else np.asarray(total_lens, np.int64)
        misfits = np.flatnonzero((starts < 0) | (ends < starts) | (ends > whole))
        if len(misfits):
            n = misfits[0]
            raise ValueError(f"{seq_lens[n]} tokens at {starts[n]} are not within a sequence of {whole[n]} tokens")
        return cls(seq_ids=seq_ids, starts=starts, ends=ends, total_lens=whole, num_pooled=np.zeros_like(starts))

    @property
    def is_complete(self) -> NDArray[np.bool_]:
        """[N]: whether all tokens of the sequence are pooled after this batch."""
        complete: NDArray[np.bool_] = np.maximum(self.ends, self.num_pooled) >= self.total_lens
        return complete

    @property
    def num_repeated(self) -> IntArray:
        """[N]: rows at the start of each chunk that were pooled before."""
        return (self.num_pooled - self.starts).clip(0, self.ends - self.starts)

    def needs_no_state(self, *, is_last_only: bool) -> NDArray[np.bool_]:
        """Returns [N]: whether the rows of this batch are enough to pool the sequence.

        Args:
            is_last_only: LAST is the only pooling type, so that the last row is enough.
        """
        enough = self.ends > self.starts if is_last_only else self.starts == 0
        result: NDArray[np.bool_] = enough & (self.ends == self.total_lens)
        return result

    def weight_bounds(self, num_weights: int) -> IntArray:
        """Returns [N+1]: first attention weight of each sequence, including the weights before its chunk.

        Raises:
            ValueError: `num_weights` is not the number of weights.
        """
        bounds = prefix_sums(self.ends)
        if num_weights != bounds[-1]:
            raise ValueError(
                f"attention weights have {num_weights} rows for {bounds[-1]} tokens up to the ends of the chunks"
            )
        return bounds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolingMetadata:
    """One batch of N sequences and T packed rows.

    The runner creates it with `for_batch`. In a batch of chunks, `ChunkedPoolingManager.with_cursors` then returns it
    with the cursors and the tokens that were pooled before.

    Attributes:
        params: N resolved parameters; tasks may be mixed.
        seq_lens: Rows of each sequence in this batch, on the host.
        cu_seqlens: [N+1] int32, prefix sums of `seq_lens`, on the device of the rows or on the host.
        token_ids: [T] int64 on the host; None if no result depends on tokens.
        skip_tokens: [N] int32 on the host, tokens at the start of each sequence to leave out; None: no tokens.
        chunks: The position of each chunk in its sequence; None if the batch has only whole sequences.
        cursors: Cursors of partial sequences by index, before this batch. `ChunkedPoolingManager.commit` advances them.
        queries: [Q, W] float32 on the host for each sequence: query vectors to compare its vectors with, or None. None
            if no sequence has query vectors.
    """

    params: Sequence[PoolingParams]
    seq_lens: tuple[int, ...]
    cu_seqlens: Tensor | NDArray[np.int32]
    token_ids: NDArray[np.int64] | None = None
    skip_tokens: NDArray[np.int32] | None = None
    chunks: ChunkSpans | None = None
    cursors: Mapping[int, PoolingCursor] = field(default_factory=dict)
    queries: Sequence[NDArray[np.float32] | None] | None = None

    @classmethod
    def for_batch(
        cls,
        batch: PackedBatch | PackedArrays,
        params: Sequence[PoolingParams],
        *,
        seq_ids: Sequence[Hashable] | None = None,
        starts: Sequence[int] | None = None,
        total_lens: Sequence[int] | None = None,
        queries: Sequence[NDArray[np.float32] | None] | None = None,
    ) -> PoolingMetadata:
        """Returns the metadata of a batch.

        Args:
            batch: Whole sequences, or chunks.
            params: One per sequence, resolved.
            seq_ids: Keys of the sequences in the ChunkedPoolingManager; None for whole sequences.
            starts: Position of each chunk in its sequence; None: all begin at 0.
            total_lens: Tokens of each whole sequence; None: each sequence ends with its chunk.
            queries: Query vectors of each sequence, [Q, W], or None; None if no sequence has query vectors.

        Raises:
            ValueError: The lists have different lengths, or a chunk is not within its sequence.
        """
        num_seqs = len(batch.seq_lens)
        _check_lengths(num_seqs, params=params, total_lens=total_lens, seq_ids=seq_ids, starts=starts)
        chunks = None
        if seq_ids is not None:
            chunk_starts = np.zeros(num_seqs, np.int64) if starts is None else np.array(starts, np.int64)
            chunks = ChunkSpans.of(seq_ids, chunk_starts, batch.seq_lens, total_lens)
        return cls(
            params=params,
            seq_lens=batch.seq_lens,
            cu_seqlens=batch.cu_seqlens,
            token_ids=batch.token_ids,
            skip_tokens=batch.skip_tokens,
            chunks=chunks,
            queries=queries,
        )

    @classmethod
    def of_rows(
        cls, seq_lens: IntArray, *, skips: IntArray | None = None, token_ids: NDArray[np.int64] | None = None
    ) -> PoolingMetadata:
        """Returns the metadata of packed rows without parameters.

        Args:
            seq_lens: [N], rows of each sequence.
            skips: [N], rows at the start of each sequence to leave out; None: no rows.
            token_ids: [T] int64; None if no result depends on tokens.
        """
        return cls(
            params=(),
            seq_lens=tuple(seq_lens.tolist()),
            cu_seqlens=prefix_sums(seq_lens).astype(np.int32),
            token_ids=token_ids,
            skip_tokens=skips.astype(np.int32) if skips is not None and skips.any() else None,
        )

    @property
    def num_seqs(self) -> int:
        """N, the number of sequences."""
        return len(self.seq_lens)

    @property
    def is_partial(self) -> bool:
        """Whether the batch has parts of sequences, or sequences with tokens that were pooled before."""
        chunks = self.chunks
        return chunks is not None and bool(
            chunks.starts.any() or chunks.num_pooled.any() or (chunks.ends < chunks.total_lens).any()
        )

    def as_whole(self) -> PoolingMetadata:
        """Returns metadata that treats each chunk of this batch as a whole sequence."""
        skip_tokens = self.skip_tokens
        if skip_tokens is not None and self.chunks is not None:
            skip_tokens = (skip_tokens - self.chunks.starts).clip(0).astype(np.int32)
        return replace(self, skip_tokens=skip_tokens, chunks=None)

    def select(self, indices: Sequence[int], *, new_only: bool = False) -> tuple[PickedRows, PoolingMetadata]:
        """Returns the packed rows of some sequences, and their metadata as whole sequences.

        Args:
            indices: The sequences, ascending.
            new_only: Leave out rows that were pooled before.
        """
        bounds = prefix_sums(self.seq_lens)
        picked = np.asarray(indices, np.int64)
        firsts, ends = bounds[picked], bounds[picked + 1]
        if new_only and self.chunks is not None:
            firsts = firsts + self.chunks.num_repeated[picked]
        rows = rows_between(firsts, ends)
        lengths = ends - firsts
        return rows, PoolingMetadata(
            params=[self.params[i] for i in indices],
            seq_lens=tuple(lengths.tolist()),
            cu_seqlens=prefix_sums(lengths).astype(np.int32),
            token_ids=None if self.token_ids is None else self.token_ids[rows],
            skip_tokens=None if self.skip_tokens is None else self.skip_tokens[picked],
            queries=None if self.queries is None else [self.queries[i] for i in indices],
        )

    # Only library callers use the methods below. docs/internals/names.md explains their names.

    def get_incomplete_indices(self) -> list[int]:
        """Returns the sequences that continue after this batch."""
        incomplete: list[int] = [] if self.chunks is None else np.flatnonzero(~self.chunks.is_complete).tolist()
        return incomplete


def _check_lengths(num_seqs: int, **lists: Sequence[object] | None) -> None:
    for name, values in lists.items():
        if values is not None and len(values) != num_seqs:
            raise ValueError(f"{name} has {len(values)} values for {num_seqs} sequences")


def check_gap(pooling_types: Sequence[PoolingType], chunk_start: int, num_pooled: int) -> None:
    """Checks that a chunk may start at `chunk_start` if `num_pooled` tokens were pooled.

    Raises:
        ValueError: There is a gap, and LAST is not the only type. The other types need all rows.
    """
    if chunk_start > num_pooled and tuple(pooling_types) != (PoolingType.LAST,):
        names = "+".join(pooling_types)
        raise ValueError(
            f"{names} pooling needs every row, but a chunk starts at {chunk_start} and {num_pooled} tokens were pooled"
        )


def prefix_sums(lengths: Sequence[int] | NDArray[np.integer] | NDArray[np.bool_]) -> IntArray:
    """Returns [N+1]: the first row of each sequence, and the end."""
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def ranges(firsts: IntArray, ends: IntArray) -> IntArray:
    """Returns the concatenated ranges firsts[0] to ends[0], firsts[1] to ends[1] and so on."""
    lengths = ends - firsts
    bounds = prefix_sums(lengths)
    return np.arange(bounds[-1]) + np.repeat(firsts - bounds[:-1], lengths)


def rows_between(firsts: IntArray, ends: IntArray) -> PickedRows:
    """Returns the rows firsts[n] to ends[n] of N sequences, in order."""
    if len(firsts) == 0:
        return slice(0, 0)
    if np.array_equal(firsts[1:], ends[:-1]):
        return slice(int(firsts[0]), int(ends[-1]))
    return ranges(firsts, ends)


def selected_rows(is_selected: NDArray[np.bool_], seq_lens: Sequence[int]) -> tuple[IntArray, tuple[int, ...]]:
    """Returns the selected rows [R] of `is_selected` [T] bool, and their number in each sequence."""
    num_before = prefix_sums(is_selected)
    return np.flatnonzero(is_selected), tuple(np.diff(num_before[prefix_sums(seq_lens)]).tolist())
