"""Which part of its sequence every slice of a batch is, and what was kept of its sequence before.

Arrays over the batch; Python objects only for sequences that are not whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..protocol.tasks import PoolingType
from .cursor import PoolingCursor
from .packing import IntArray, cu_seqlens_of, prefix_sums, rows_between
from .states import PoolingStates, finalize_states, update_states


@dataclass(slots=True, kw_only=True, eq=False)
class BatchSlices:
    """The slices of a batch of N sequences, of which many may be whole.

    Attributes:
        prompt_lens: [N], tokens of each whole sequence.
        slice_starts: [N], place of each slice's first token in its sequence.
        seq_lens: [N], tokens of each slice.
        bounds: [N+1], prefix sums of `seq_lens`.
        cursors: By index, for sequences of which something was pooled before or is left for later; none for the
            others, so that they cost no object.
        states: Running states by index.
    """

    prompt_lens: IntArray
    slice_starts: IntArray
    seq_lens: IntArray
    bounds: IntArray
    cursors: dict[int, PoolingCursor]
    states: dict[int, PoolingStates]

    @classmethod
    def build(
        cls,
        prompt_lens: Sequence[int],
        seq_lens: Sequence[int],
        slice_starts: Sequence[int] | None = None,
        seq_starts: Sequence[int] | None = None,
        states: Sequence[PoolingStates | None] | None = None,
    ) -> BatchSlices | None:
        """Returns the slices of a batch; None where it holds whole sequences only. See `PoolingMetadata.create`.

        Raises:
            ValueError: The lengths do not fit together.
        """
        whole, sizes = np.asarray(prompt_lens, np.int64), np.asarray(seq_lens, np.int64)
        running = {i: s.copy() for i, s in enumerate(states or ()) if s is not None}
        pooled = np.zeros(len(whole), np.int64) if seq_starts is None else np.array(seq_starts, np.int64)
        for index, state in running.items():
            if seq_starts is not None and pooled[index] != state.num_tokens:
                raise ValueError(
                    f"seq_starts says that {pooled[index]} tokens of sequence {index} were pooled; "
                    f"its state holds {state.num_tokens}"
                )
            pooled[index] = state.num_tokens
        starts = pooled if slice_starts is None else np.asarray(slice_starts, np.int64)
        misfits = np.flatnonzero((starts < 0) | (sizes < 0) | (starts + sizes > whole))
        if len(misfits):
            n = misfits[0]
            raise ValueError(f"{sizes[n]} tokens at {starts[n]} do not lie in a sequence of {whole[n]} tokens")
        has_cursor = (pooled != 0) | (starts + sizes != whole)
        has_cursor[list(running)] = True
        if not has_cursor.any() and not starts.any():
            return None
        bounds = prefix_sums(sizes)
        slices = cls(prompt_lens=whole, slice_starts=starts, seq_lens=sizes, bounds=bounds, cursors={}, states=running)
        for index in np.flatnonzero(has_cursor).tolist():
            slices._place(index, int(pooled[index]))
        return slices

    def direct(self, *, is_last_only: bool) -> NDArray[np.bool_]:
        """Returns [N]: the sequences whose pooled row can be had from the rows of this batch alone.

        Args:
            is_last_only: LAST is the only pooling type, so that the end of a sequence will do.
        """
        is_complete: NDArray[np.bool_] = self.slice_starts + self.seq_lens == self.prompt_lens
        will_do: NDArray[np.bool_] = self.seq_lens > 0 if is_last_only else self.slice_starts == 0
        return is_complete & will_do

    def stateful(self) -> list[int]:
        """Returns the sequences that are not whole, and so need a state unless their end will do."""
        return sorted(self.cursors.keys() | set(np.flatnonzero(self.slice_starts).tolist()))

    def initialize(
        self, hidden_size: int, pooling_types: Mapping[int, Sequence[PoolingType]], device: torch.device
    ) -> None:
        """Starts the states of some sequences, where they have none; see `PoolingMetadata.initialize_states`."""
        for index, types in pooling_types.items():
            if index not in self.cursors:
                self._place(index)
            if index not in self.states:
                state = PoolingStates.initialize(hidden_size, types, device)
                if state.is_token_level:
                    state.num_tokens = self.cursors[index].start
                self.states[index] = state

    def update(self, hidden_states: Tensor, attention_weights: Tensor | None, skip_tokens: Tensor | None) -> None:
        """Folds the rows of this batch into the states; see `PoolingMetadata.update_all`."""
        missing = len(self.cursors.keys() - self.states.keys())
        if missing:
            raise ValueError(f"{missing} sequences have no running state; call initialize_states")
        weights = {} if attention_weights is None else self._weights(attention_weights)
        device = hidden_states.device
        for indices in self._by_types().values():
            picked = np.array(indices)
            seq_lens = self.seq_lens[picked]
            update_states(
                [self.states[i] for i in indices],
                hidden_states[rows_between(self.bounds[picked], self.bounds[picked + 1], device)],
                seq_lens.tolist(),
                cu_seqlens_of(seq_lens, device),
                [self.cursors[i].slice_start for i in indices],
                [weights.get(i) for i in indices],
                skip_tokens=None if skip_tokens is None else skip_tokens[torch.from_numpy(picked).to(device)],
            )
        for cursor in self.cursors.values():
            cursor.finish_slice()

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
        """Returns [N+1]: where the attention weights of each sequence begin, those before its slice included.

        Raises:
            ValueError: There are not `num_weights` of them.
        """
        bounds = prefix_sums(self.slice_starts + self.seq_lens)
        if num_weights != bounds[-1]:
            raise ValueError(
                f"attention weights hold {num_weights} rows for {bounds[-1]} tokens up to the ends of the slices"
            )
        return bounds

    def _weights(self, attention_weights: Tensor) -> dict[int, Tensor]:
        """The weights of whole sequences by index, for those that end in this batch."""
        bounds = self.weight_bounds(attention_weights.shape[0])
        ending = [i for i, cursor in self.cursors.items() if cursor.slice_end == cursor.prompt_len]
        return {i: attention_weights[bounds[i] : bounds[i + 1]] for i in ending}

    def _place(self, index: int, num_pooled: int = 0) -> None:
        """Gives a sequence, of which `num_pooled` tokens were pooled before, its cursor."""
        self.cursors[index] = PoolingCursor(
            prompt_len=int(self.prompt_lens[index]),
            num_scheduled=int(self.seq_lens[index]),
            start=num_pooled,
            row=int(self.bounds[index]),
            offset=int(self.slice_starts[index]) - num_pooled,
        )

    def _by_types(self) -> dict[tuple[PoolingType, ...], list[int]]:
        """The sequences that have a state, by the pooling types that they keep."""
        groups: dict[tuple[PoolingType, ...], list[int]] = defaultdict(list)
        for index in sorted(self.states):
            groups[self.states[index].pooling_types].append(index)
        return groups
