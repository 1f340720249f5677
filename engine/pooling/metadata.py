"""What the poolers know about a batch besides its rows: who owns which rows, and what each request asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..params import PoolingParams, PoolingType
from .cursor import PoolingCursor
from .states import PoolingStates, finalize_states, update_states

if TYPE_CHECKING:
    from ..packed_batch import PackedBatch


@dataclass(slots=True, kw_only=True, eq=False)
class PoolingMetadata:
    """One batch of N sequences and T packed rows. Lives as long as the batch; the states outlive it.

    Attributes:
        params: N resolved parameters; tasks may be mixed.
        seq_lens: Rows of each sequence in this batch, on the host.
        cu_seqlens: [N+1] int32, prefix sums of `seq_lens`.
        token_ids: [T] int64, for STEP; None where nobody needs them.
        skip_tokens: [N] int32, tokens at the head of each whole sequence that are left out; None where there are none.
        cursors: One per sequence, where the batch holds slices; None where it holds whole sequences only.
        states: The running states that go with `cursors`; None for a sequence that has none yet.
    """

    params: Sequence[PoolingParams]
    seq_lens: tuple[int, ...]
    cu_seqlens: Tensor
    token_ids: Tensor | None = None
    skip_tokens: Tensor | None = None
    cursors: list[PoolingCursor] | None = None
    states: list[PoolingStates | None] | None = None

    @classmethod
    def for_batch(cls, batch: PackedBatch, params: Sequence[PoolingParams]) -> PoolingMetadata:
        """Describes a batch of whole sequences; costs nothing per sequence.

        Args:
            batch: As the model runs it.
            params: One per sequence, resolved.
        """
        return cls(
            params=params,
            seq_lens=batch.seq_lens,
            cu_seqlens=batch.cu_seqlens,
            token_ids=batch.input_ids,
            skip_tokens=batch.skip_tokens,
        )

    @classmethod
    def create(
        cls,
        seq_lens: Sequence[int],
        params: Sequence[PoolingParams] | None = None,
        *,
        chunk_sizes: Sequence[int] | None = None,
        seq_starts: Sequence[int] | None = None,
        states: Sequence[PoolingStates | None] | None = None,
        token_ids: Tensor | None = None,
        skip_tokens: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> PoolingMetadata:
        """Describes a batch of sequences or of slices of them.

        Args:
            seq_lens: Tokens of each whole sequence.
            params: One per sequence, resolved. May be left out by callers that use no ModelPooler.
            chunk_sizes: Tokens of each sequence in this batch; None means all of them.
            seq_starts: Tokens of each sequence that were pooled before; None means none.
            states: Running states from the batches before; None for sequences that begin here.
            token_ids: [T], int64. See `PoolingMetadata`.
            skip_tokens: [N], int32. See `PoolingMetadata`.
            device: Of the rows.

        Raises:
            ValueError: The lengths do not fit together.
        """
        num_seqs = len(seq_lens)
        lists = {"params": params, "chunk_sizes": chunk_sizes, "seq_starts": seq_starts, "states": states}
        for name, values in lists.items():
            if values is not None and len(values) != num_seqs:
                raise ValueError(f"{name} holds {len(values)} values for {num_seqs} sequences")
        starts = list(seq_starts) if seq_starts is not None else [0] * num_seqs
        sizes = list(chunk_sizes) if chunk_sizes is not None else [n - s for n, s in zip(seq_lens, starts, strict=True)]
        bounds = _prefix_sums(sizes)
        cursors = [
            PoolingCursor(length, size, start, row)
            for length, size, start, row in zip(seq_lens, sizes, starts, bounds[:-1].tolist(), strict=True)
        ]
        is_partial = states is not None or not all(cursor.is_whole for cursor in cursors)
        running: list[PoolingStates | None] = list(states) if states is not None else [None] * num_seqs
        return cls(
            params=params if params is not None else [PoolingParams()] * num_seqs,
            seq_lens=tuple(sizes),
            cu_seqlens=torch.from_numpy(bounds).to(device),
            token_ids=token_ids,
            skip_tokens=skip_tokens,
            cursors=cursors if is_partial else None,
            states=running if is_partial else None,
        )

    @property
    def num_seqs(self) -> int:
        """N, the number of sequences."""
        return len(self.seq_lens)

    @property
    def is_partial(self) -> bool:
        """True where the batch may hold slices, so that running states are needed."""
        return self.cursors is not None

    def initialize_states(self, hidden_size: int, pooling_types: Sequence[Sequence[PoolingType]]) -> None:
        """Starts the state of every sequence that has none.

        Args:
            hidden_size: D.
            pooling_types: What each sequence keeps; see `PoolingStates.initialize`.
        """
        if self.states is None:
            return
        for index, state in enumerate(self.states):
            if state is None:
                device = self.cu_seqlens.device
                self.states[index] = PoolingStates.initialize(hidden_size, pooling_types[index], device)

    def update_all(self, hidden_states: Tensor, attention_weights: Tensor | None = None) -> None:
        """Folds this batch's rows into the states and advances the cursors. Call once per batch.

        Args:
            hidden_states: [T, D], any float type. Not modified.
            attention_weights: [T], float32. Row weights, for ATTENTION.

        Raises:
            ValueError: A batch of whole sequences, or a sequence without a state.
        """
        cursors, states = self._running()
        for indices in self._by_types(range(self.num_seqs)).values():
            rows, part = self.select(indices)
            update_states(
                [states[i] for i in indices],
                hidden_states if rows is None else hidden_states.index_select(0, rows),
                part.cu_seqlens,
                attention_weights if attention_weights is None or rows is None else attention_weights[rows],
                token_ids=part.token_ids,
                skip_tokens=part.skip_tokens,
            )
        for cursor in cursors:
            cursor.advance(cursor.num_scheduled)

    def finalize_all(self) -> dict[int, Tensor]:
        """Returns the pooled row [W] float32, or the rows [L, D], of every sequence that is complete, by its index.

        Raises:
            ValueError: A batch of whole sequences, or a sequence without a state.
        """
        cursors, states = self._running()
        complete = [i for i, cursor in enumerate(cursors) if cursor.is_complete]
        results: dict[int, Tensor] = {}
        for indices in self._by_types(complete).values():
            group = [states[i] for i in indices]
            pooled = [s.finalize() for s in group] if group[0].is_token_level else finalize_states(group).unbind()
            results.update(zip(indices, pooled, strict=True))
        return {index: results[index] for index in complete}

    def completed(self, indices: Sequence[int]) -> PoolingMetadata:
        """Returns a description of complete token-level sequences as whole ones, from what their states keep."""
        cursors, states = self._running()
        token_ids = [ids for i in indices for ids in states[i].token_ids]
        return PoolingMetadata.create(
            [cursors[i].prompt_len for i in indices],
            [self.params[i] for i in indices],
            token_ids=torch.cat(token_ids) if token_ids else None,
            device=self.cu_seqlens.device,
        )

    def get_incomplete_indices(self) -> list[int]:
        """Returns the sequences of which more slices are to come."""
        return [i for i, cursor in enumerate(self.cursors or ()) if not cursor.is_complete]

    def select(self, indices: Sequence[int]) -> tuple[Tensor | None, PoolingMetadata]:
        """Returns the packed rows [R] int64 of some sequences, and a description of them alone, without states.

        The rows are None where all sequences are selected.
        """
        if len(indices) == self.num_seqs:
            return None, self
        bounds = _prefix_sums(self.seq_lens)
        rows = np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in indices], dtype=np.int64)
        seq_lens = tuple(self.seq_lens[i] for i in indices)
        device = self.cu_seqlens.device
        row_indices = torch.from_numpy(rows).to(device)
        picked = torch.tensor(indices, device=device)
        return row_indices, PoolingMetadata(
            params=[self.params[i] for i in indices],
            seq_lens=seq_lens,
            cu_seqlens=torch.from_numpy(_prefix_sums(seq_lens)).to(device),
            token_ids=None if self.token_ids is None else self.token_ids[row_indices],
            skip_tokens=None if self.skip_tokens is None else self.skip_tokens[picked],
        )

    def _running(self) -> tuple[list[PoolingCursor], list[PoolingStates]]:
        """The cursors and states of a batch of slices."""
        if self.cursors is None or self.states is None:
            raise ValueError("the batch holds whole sequences, which have no running states")
        states = [state for state in self.states if state is not None]
        if len(states) != self.num_seqs:
            raise ValueError(f"{self.num_seqs - len(states)} sequences have no running state; call initialize_states")
        return self.cursors, states

    def _by_types(self, indices: Sequence[int]) -> dict[tuple[PoolingType, ...], list[int]]:
        """Sequences by the pooling types that they keep."""
        _, states = self._running()
        groups: dict[tuple[PoolingType, ...], list[int]] = defaultdict(list)
        for index in indices:
            groups[states[index].pooling_types].append(index)
        return groups


def _prefix_sums(lengths: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """[N+1] int32."""
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return bounds
