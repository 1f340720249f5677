"""Which part of its sequence each chunk of a batch is, and what was pooled of its sequence before.

Arrays over the batch; Python objects only for sequences of which the batch holds a part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.upload import upload

from ..protocol.tasks import PoolingType
from .packing import IntArray, cu_seqlens_of, prefix_sums, rows_between
from .states import PoolingStates, finalize_states, update_states


@dataclass(slots=True)
class PoolingCursor:
    """Where a sequence's chunk lies in the current batch, and how much of the sequence was pooled before.

    A chunk begins where pooling stopped, as a rule. It begins earlier where rows are computed again, because what was
    kept of their sequence was given up; and later where the model takes what lies between from its prefix cache.

    Attributes:
        prompt_len: Tokens. The whole sequence.
        num_scheduled: Tokens of the sequence in the current batch.
        start: Tokens pooled before the current batch.
        row: Row of the packed batch at which the chunk begins.
        offset: Tokens from `start` to the beginning of the chunk: below 0 for rows that are computed again, above 0
            for a gap.
    """

    prompt_len: int
    num_scheduled: int
    start: int = 0
    row: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError that names the values."""
        if not 0 <= self.start <= self.prompt_len:
            raise ValueError(f"{self.start} tokens cannot have been pooled of a sequence of {self.prompt_len} tokens")
        if self.chunk_start < 0 or self.num_scheduled < 0 or self.chunk_end > self.prompt_len:
            raise ValueError(
                f"{self.num_scheduled} tokens at {self.chunk_start} do not lie in a sequence of "
                f"{self.prompt_len} tokens"
            )

    @property
    def chunk_start(self) -> int:
        """Place of the chunk's first token in the sequence."""
        return self.start + self.offset

    @property
    def chunk_end(self) -> int:
        """One past the place of the chunk's last token in the sequence."""
        return self.chunk_start + self.num_scheduled

    @property
    def num_repeated(self) -> int:
        """Rows at the head of the chunk that were pooled before."""
        return min(max(-self.offset, 0), self.num_scheduled)

    @property
    def global_start(self) -> int:
        """First row of the chunk in the packed batch."""
        return self.row

    @property
    def global_end(self) -> int:
        """One past the last row of the chunk in the packed batch."""
        return self.row + self.num_scheduled

    @property
    def remaining(self) -> int:
        """Tokens not pooled yet, those of the current batch included."""
        return self.prompt_len - self.start

    @property
    def is_complete(self) -> bool:
        """True once every token was pooled."""
        return self.start >= self.prompt_len

    @property
    def is_whole(self) -> bool:
        """True where the current batch holds the sequence from its first token to its last."""
        return self.chunk_start == 0 and self.num_scheduled == self.prompt_len

    def advance(self, num_tokens: int) -> None:
        """Counts `num_tokens` more as pooled.

        Raises:
            ValueError: More than remain.
        """
        if not 0 <= num_tokens <= self.remaining:
            raise ValueError(f"cannot advance by {num_tokens}: {self.remaining} of {self.prompt_len} tokens remain")
        self.start += num_tokens
        self.num_scheduled = self.offset = 0

    def finish_chunk(self) -> None:
        """Counts everything up to the end of the chunk as pooled; a chunk of repeated rows changes nothing."""
        self.advance(max(self.chunk_end - self.start, 0))

    def schedule(self, num_tokens: int, row: int, chunk_start: int | None = None) -> None:
        """Places the next chunk: `num_tokens` tokens from `row` of a new batch.

        Args:
            num_tokens: Tokens.
            row: Row.
            chunk_start: Place of the first of them in the sequence; None means where pooling stopped.

        Raises:
            ValueError: More than remain.
        """
        offset = 0 if chunk_start is None else chunk_start - self.start
        remaining = self.remaining - offset
        if not 0 <= num_tokens <= remaining or remaining > self.prompt_len:
            raise ValueError(f"cannot schedule {num_tokens}: {remaining} of {self.prompt_len} tokens remain")
        self.num_scheduled, self.row, self.offset = num_tokens, row, offset

    def reset(self) -> None:
        """Starts over from the first token, with nothing scheduled."""
        self.start = self.num_scheduled = self.row = self.offset = 0


@dataclass(slots=True, kw_only=True, eq=False)
class BatchChunks:
    """The chunks of a batch of N sequences, of which many may be whole.

    Attributes:
        prompt_lens: [N], tokens of each whole sequence.
        chunk_starts: [N], place of each chunk's first token in its sequence.
        seq_lens: [N], tokens of each chunk.
        bounds: [N+1], prefix sums of `seq_lens`.
        cursors: By index, for sequences of which something was pooled before or is left for later; none for the
            others, so that they cost no object.
        states: Running states by index.
    """

    prompt_lens: IntArray
    chunk_starts: IntArray
    seq_lens: IntArray
    bounds: IntArray
    cursors: dict[int, PoolingCursor]
    states: dict[int, PoolingStates]

    @classmethod
    def build(
        cls,
        prompt_lens: Sequence[int],
        seq_lens: Sequence[int],
        chunk_starts: Sequence[int],
        states: Sequence[PoolingStates | None] | None = None,
    ) -> BatchChunks | None:
        """Returns the chunks of a batch; None where it holds whole sequences only. See `PoolingMetadata.for_batch`.

        Raises:
            ValueError: The lengths do not fit together.
        """
        whole, sizes, starts = (np.asarray(values, np.int64) for values in (prompt_lens, seq_lens, chunk_starts))
        running = {i: s.copy() for i, s in enumerate(states or ()) if s is not None}
        misfits = np.flatnonzero((starts < 0) | (sizes < 0) | (starts + sizes > whole))
        if len(misfits):
            n = misfits[0]
            raise ValueError(f"{sizes[n]} tokens at {starts[n]} do not lie in a sequence of {whole[n]} tokens")
        has_cursor = starts + sizes != whole
        has_cursor[list(running)] = True
        if not has_cursor.any() and not starts.any():
            return None
        bounds = prefix_sums(sizes)
        chunks = cls(prompt_lens=whole, chunk_starts=starts, seq_lens=sizes, bounds=bounds, cursors={}, states=running)
        for index in np.flatnonzero(has_cursor).tolist():
            chunks._place(index)
        return chunks

    @classmethod
    def of_sequences(
        cls, prompt_lens: Sequence[int], chunk_sizes: Sequence[int], seq_starts: Sequence[int]
    ) -> BatchChunks:
        """Returns the first chunks of sequences that begin at given rows. See `PoolingMetadata.create`."""
        whole, sizes, bounds = (np.asarray(values, np.int64) for values in (prompt_lens, chunk_sizes, seq_starts))
        starts = np.zeros(len(whole), np.int64)
        return cls(prompt_lens=whole, chunk_starts=starts, seq_lens=sizes, bounds=bounds, cursors={}, states={})

    def needs_no_state(self, *, is_last_only: bool) -> NDArray[np.bool_]:
        """Returns [N]: the sequences whose pooled row can be had from the rows of this batch alone.

        Args:
            is_last_only: LAST is the only pooling type, so that the end of a sequence will do.
        """
        is_complete: NDArray[np.bool_] = self.chunk_starts + self.seq_lens == self.prompt_lens
        will_do: NDArray[np.bool_] = self.seq_lens > 0 if is_last_only else self.chunk_starts == 0
        return is_complete & will_do

    def stateful(self) -> list[int]:
        """Returns the sequences that are not whole, and so need a state unless their end will do."""
        return sorted(self.cursors.keys() | set(np.flatnonzero(self.chunk_starts).tolist()))

    def initialize(
        self, hidden_size: int, pooling_types: Mapping[int, Sequence[PoolingType]], device: torch.device
    ) -> None:
        """Starts the states of some sequences, where they have none; see `PoolingMetadata.initialize_states`."""
        for index, types in pooling_types.items():
            if index not in self.cursors:
                self._place(index)
            if index not in self.states:
                self.states[index] = PoolingStates.initialize(hidden_size, types, device)

    def schedule(self, chunk_sizes: Sequence[int]) -> None:
        """Places the next chunk of every sequence, end to end in the next batch. Every sequence must have a cursor."""
        self.seq_lens, self.bounds = np.asarray(chunk_sizes, np.int64), prefix_sums(chunk_sizes)
        for index, cursor in self.cursors.items():
            cursor.schedule(chunk_sizes[index], int(self.bounds[index]))

    def update(
        self, hidden_states: Tensor, attention_weights: Tensor | Mapping[int, Tensor] | None, skip_tokens: Tensor | None
    ) -> None:
        """Adds the rows of this batch to the states; see `PoolingMetadata.update_all`."""
        missing = len(self.cursors.keys() - self.states.keys())
        if missing:
            raise ValueError(f"{missing} sequences have no running state; call initialize_states")
        weights = self._weights(attention_weights) if isinstance(attention_weights, Tensor) else attention_weights or {}
        device = hidden_states.device
        for indices in self._by_types().values():
            picked = np.array(indices)
            seq_lens = self.seq_lens[picked]
            update_states(
                [self.states[i] for i in indices],
                hidden_states[rows_between(self.bounds[picked], self.bounds[picked + 1], device)],
                seq_lens.tolist(),
                cu_seqlens_of(seq_lens, device),
                [self.cursors[i].chunk_start for i in indices],
                [weights.get(i) for i in indices],
                skip_tokens=None if skip_tokens is None else skip_tokens[upload(torch.from_numpy(picked), device)],
            )
        for cursor in self.cursors.values():
            cursor.finish_chunk()

    def finalize(self) -> dict[int, Tensor]:
        """Returns the pooled rows of complete sequences by index; see `PoolingMetadata.finalize_all`."""
        results: dict[int, Tensor] = {}
        for types, indices in self._by_types().items():
            complete = [i for i in indices if self.cursors[i].is_complete]
            if complete and not types[0].is_token_level:
                pooled = finalize_states([self.states[i] for i in complete])
                results.update(zip(complete, pooled.unbind(), strict=True))
        return dict(sorted(results.items()))

    def drop(self, indices: Iterable[int]) -> None:
        """Forgets sequences that are answered."""
        for index in indices:
            self.cursors.pop(index, None)
            self.states.pop(index, None)

    def weight_bounds(self, num_weights: int) -> IntArray:
        """Returns [N+1]: where the attention weights of each sequence begin, those before its chunk included.

        Raises:
            ValueError: There are not `num_weights` of them.
        """
        bounds = prefix_sums(self.chunk_starts + self.seq_lens)
        if num_weights != bounds[-1]:
            raise ValueError(
                f"attention weights hold {num_weights} rows for {bounds[-1]} tokens up to the ends of the chunks"
            )
        return bounds

    def _weights(self, attention_weights: Tensor) -> dict[int, Tensor]:
        """The weights of whole sequences by index, for those that end in this batch."""
        bounds = self.weight_bounds(attention_weights.shape[0])
        ending = [i for i, cursor in self.cursors.items() if cursor.chunk_end == cursor.prompt_len]
        return {i: attention_weights[bounds[i] : bounds[i + 1]] for i in ending}

    def _place(self, index: int) -> None:
        """Gives a sequence its cursor; its state, where it has one, says what was pooled before."""
        num_pooled = self.states[index].num_tokens if index in self.states else 0
        self.cursors[index] = PoolingCursor(
            prompt_len=int(self.prompt_lens[index]),
            num_scheduled=int(self.seq_lens[index]),
            start=num_pooled,
            row=int(self.bounds[index]),
            offset=int(self.chunk_starts[index]) - num_pooled,
        )

    def _by_types(self) -> dict[tuple[PoolingType, ...], list[int]]:
        """The sequences that have a state, by the pooling types that they keep."""
        groups: dict[tuple[PoolingType, ...], list[int]] = defaultdict(list)
        for index in sorted(self.states):
            groups[self.states[index].pooling_types].append(index)
        return groups
