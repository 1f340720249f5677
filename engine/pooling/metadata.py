"""What the poolers know about a batch besides its rows: who owns which rows, and what each request asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.upload import upload

from ..protocol.params import PoolingParams
from ..protocol.tasks import PoolingType
from .chunks import BatchChunks, PoolingCursor
from .packing import Rows, as_rows, cu_seqlens_of, host_rows_between, prefix_sums, rows_between, rows_on_device
from .states import PoolingStates, Strategy, types_of

if TYPE_CHECKING:
    from ..executors.torch.packed_batch import PackedBatch

Array = Tensor | NDArray[Any]


@dataclass(slots=True, kw_only=True, eq=False)
class PoolingMetadata:
    """One batch of N sequences and T packed rows. Lives as long as the batch; the states outlive it.

    Attributes:
        params: N resolved parameters; tasks may be mixed.
        seq_lens: Rows of each sequence in this batch, on the host.
        cu_seqlens: [N+1] int32, prefix sums of `seq_lens`.
        token_ids: [T] int64 on the host, for what depends on a token; None where nobody needs them.
        skip_tokens: [N] int32, tokens at the head of each whole sequence that are left out; None where there are none.
        chunks: Which parts of their sequences the batch holds; None where it holds whole sequences only.
        seq_starts: Row at which each sequence begins, where the caller of `create` says so; None: they lie end to end.
        queries: Per sequence [Q, W] float32 on the host: the vectors that its own are compared with, if any; None where
            no sequence has some.
    """

    params: Sequence[PoolingParams]
    seq_lens: tuple[int, ...]
    cu_seqlens: Tensor
    token_ids: NDArray[np.int64] | None = None
    skip_tokens: Tensor | None = None
    chunks: BatchChunks | None = None
    seq_starts: tuple[int, ...] | None = None
    queries: Sequence[NDArray[np.float32] | None] | None = None

    @classmethod
    def for_batch(
        cls,
        batch: PackedBatch,
        params: Sequence[PoolingParams],
        *,
        prompt_lens: Sequence[int] | None = None,
        states: Sequence[PoolingStates | None] | None = None,
    ) -> PoolingMetadata:
        """Describes a batch as the model runs it; whole sequences cost nothing each.

        Args:
            batch: Whole sequences, or chunks that begin at its `cache.context_lens`.
            params: One per sequence, resolved.
            prompt_lens: Tokens of each whole sequence; None means what its `cache.prompt_lens` say, or else that each
                ends with its chunk.
            states: Running states from the batches before; None for sequences that begin here. They are not changed:
                the batch works on copies.

        A chunk may begin before the end of what was pooled, where rows are computed again after a preemption: those
        rows are left out. It may begin after it, where the model took what lies between from a prefix cache: LAST alone
        allows that, every other type needs all rows and refuses.

        Raises:
            ValueError: The lengths do not fit together.
        """
        _check_lengths(len(batch.seq_lens), params=params, prompt_lens=prompt_lens, states=states)
        chunks = None
        if prompt_lens is not None or states is not None or batch.cache is not None:
            starts = batch.cache.context_lens if batch.cache is not None else (0,) * len(batch.seq_lens)
            ends = [start + size for start, size in zip(starts, batch.seq_lens, strict=True)]
            if prompt_lens is None and batch.cache is not None:
                prompt_lens = batch.cache.prompt_lens
            whole = ends if prompt_lens is None else prompt_lens
            chunks = BatchChunks.build(whole, batch.seq_lens, starts, states)
        return cls(
            params=params,
            seq_lens=batch.seq_lens,
            cu_seqlens=batch.cu_seqlens,
            token_ids=batch.token_ids,
            skip_tokens=batch.skip_tokens,
            chunks=chunks,
        )

    @classmethod
    def create(
        cls,
        seq_starts: Sequence[int],
        seq_lens: Sequence[int],
        hidden_dim: int,
        strategy: Strategy = PoolingType.MEAN,
        chunk_sizes: Sequence[int] | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> PoolingMetadata:
        """Describes sequences that the caller runs itself, in chunks or at once, and begins their states.

            metadata = PoolingMetadata.create([0, 3], [3, 4], hidden_dim=768, strategy="mean", chunk_sizes=[2, 2])
            while metadata.get_incomplete_indices():
                metadata.update_all(hidden_states)  # [7, 768]: takes the next chunk of each sequence from it
            vectors = metadata.finalize_all()  # by sequence

        Args:
            seq_starts: Row at which each sequence begins in the packed hidden states.
            seq_lens: Tokens of each sequence.
            hidden_dim: D.
            strategy: See `PoolingStates.initialize`.
            chunk_sizes: Tokens of each sequence that one `update_all` takes, less at its end; None takes all at once.
            device: Of the rows.

        Raises:
            ValueError: The numbers do not fit together, or `strategy` is no pooling type; the message names it.
        """
        sizes = seq_lens if chunk_sizes is None else [min(pair) for pair in zip(chunk_sizes, seq_lens, strict=False)]
        _check_lengths(len(seq_lens), seq_starts=seq_starts, chunk_sizes=chunk_sizes)
        if min(seq_starts, default=0) < 0 or min(seq_lens, default=0) < 0 or min(chunk_sizes or [1]) < 1:
            raise ValueError(
                f"seq_starts {list(seq_starts)} and seq_lens {list(seq_lens)} must be 0 or more, "
                f"and chunk_sizes {chunk_sizes} at least 1"
            )
        chunks = BatchChunks.of_sequences(seq_lens, sizes, seq_starts)
        chunks.initialize(hidden_dim, dict.fromkeys(range(len(seq_lens)), types_of(strategy)), torch.device(device))
        return cls(
            params=[PoolingParams()] * len(seq_lens),
            seq_lens=tuple(sizes),
            cu_seqlens=cu_seqlens_of(sizes, device),
            chunks=chunks,
            seq_starts=tuple(seq_starts),
        )

    @property
    def num_seqs(self) -> int:
        """N, the number of sequences."""
        return len(self.seq_lens)

    @property
    def is_partial(self) -> bool:
        """True where the batch holds chunks, or sequences of which something was pooled before."""
        if self.chunks is None or self.seq_starts is None:
            return self.chunks is not None
        return any(not cursor.is_whole for cursor in self.cursors.values())

    @property
    def cursors(self) -> dict[int, PoolingCursor]:
        """Cursors by index; whole sequences have none. See `BatchChunks`."""
        return {} if self.chunks is None else self.chunks.cursors

    @property
    def states(self) -> dict[int, PoolingStates]:
        """Running states by index; after `ModelPooler.pool`, those of the incomplete sequences alone.

        Their tensors lie on the device of the rows until the last reference to the state goes.
        """
        return {} if self.chunks is None else self.chunks.states

    def get_incomplete_indices(self) -> list[int]:
        """Returns the sequences of which more chunks are to come."""
        return sorted(i for i, cursor in self.cursors.items() if not cursor.is_complete)

    def initialize_states(
        self, hidden_size: int, pooling_types: Sequence[Sequence[PoolingType]] | Mapping[int, Sequence[PoolingType]]
    ) -> None:
        """Starts the states of sequences that have none.

        Args:
            hidden_size: D.
            pooling_types: What each sequence keeps, see `PoolingStates.initialize`; or what some do, by index.
        """
        if self.chunks is not None:
            kept = pooling_types if isinstance(pooling_types, Mapping) else dict(enumerate(pooling_types))
            self.chunks.initialize(hidden_size, kept, self.cu_seqlens.device)

    def update_all(
        self,
        hidden_states_batch: Array | Sequence[Array],
        attention_weights_batch: Array | Sequence[Array | None] | None = None,
    ) -> None:
        """Adds the rows of a batch to the states and advances the cursors.

        Args:
            hidden_states_batch: [T, D], a tensor or an array of any float type, packed: the rows of each cursor lie
                from `global_start` to `global_end`. Or, after `create`, the next rows [L_i, D] of each sequence. Not
                modified.
            attention_weights_batch: Row weights, for ATTENTION; read for sequences that end in this batch only.
                After `create` [T], beside the rows, or for each sequence the weights of all its tokens so far and of
                these. Else [C + T], float32: for every sequence those of the C_i tokens before its chunk, then those
                of the chunk.

        Raises:
            ValueError: A batch of whole sequences, a chunk without a state, rows missing before one, or more rows than
                remain.
        """
        chunks = self._running()
        rows, weights = hidden_states_batch, attention_weights_batch
        if isinstance(rows, Tensor | np.ndarray) and rows.ndim == 2:
            rows = as_rows(rows)
        if isinstance(weights, Tensor | np.ndarray) and weights.ndim == 1:
            weights = as_rows(weights)
        if self.seq_starts is None:
            assert isinstance(rows, Tensor), "only `create` takes rows by sequence"
            assert weights is None or isinstance(weights, Tensor), "as for the rows"
            chunks.update(rows, weights, self.skip_tokens)
            return
        cursors = [self.cursors[i] for i in range(self.num_seqs)]
        parts: list[Array]
        if isinstance(rows, Tensor):
            parts = [rows[c.global_start : c.global_end] for c in cursors]
        else:
            parts = list(rows)
        own_weights: list[Array | None] = []
        if isinstance(weights, Tensor):
            own_weights = [weights[c.global_end - c.chunk_end : c.global_end] for c in cursors]
        elif weights is not None:
            own_weights = list(weights)
        given = None if weights is None else own_weights
        _check_lengths(self.num_seqs, hidden_states_batch=parts, attention_weights_batch=given)
        device = self.cu_seqlens.device
        packed = torch.cat([upload(as_rows(part), device) for part in parts])
        chunks.schedule([len(part) for part in parts])
        own = {i: upload(as_rows(w).float(), device) for i, w in enumerate(own_weights) if w is not None}
        chunks.update(packed, own, self.skip_tokens)
        for cursor, start, size in zip(cursors, self.seq_starts, self.seq_lens, strict=True):
            cursor.schedule(min(size, cursor.remaining), start + cursor.start)

    def finalize_all(self) -> dict[int, Tensor]:
        """Returns the pooled row [W] float32 of every sequence that has a state and is complete, by its index.

        The rows of token-level types are nowhere kept: `ModelPooler` answers them chunk by chunk.

        Raises:
            ValueError: A batch of whole sequences.
        """
        return self._running().finalize()

    def packed(self, rows: Tensor) -> Tensor:
        """Returns the rows of the batch's sequences end to end: `rows` as they are unless `create` says otherwise."""
        if self.seq_starts is None:
            return rows
        firsts = np.asarray(self.seq_starts, np.int64)
        return rows[rows_between(firsts, firsts + self.seq_lens, rows.device)]

    def as_whole(self) -> PoolingMetadata:
        """Returns a description of the rows of this batch as if they were all of their sequences."""
        skip_tokens = self.skip_tokens
        if skip_tokens is not None and self.chunks is not None:
            starts = upload(torch.from_numpy(self.chunks.chunk_starts.astype(np.int32)), skip_tokens.device)
            skip_tokens = (skip_tokens - starts).clamp(min=0)
        return replace(self, skip_tokens=skip_tokens, chunks=None)

    def select(self, indices: Sequence[int], *, new_only: bool = False) -> tuple[Rows, PoolingMetadata]:
        """Returns the packed rows of some sequences, and a description of them alone, without states.

        Args:
            indices: In ascending order.
            new_only: Leave out rows that were pooled before.
        """
        bounds = prefix_sums(self.seq_lens) if self.chunks is None else self.chunks.bounds
        picked, device = np.asarray(indices, np.int64), self.cu_seqlens.device
        firsts, ends = bounds[picked], bounds[picked + 1]
        if new_only and self.cursors:
            firsts += [self.cursors[i].num_repeated if i in self.cursors else 0 for i in indices]
        rows, lengths = host_rows_between(firsts, ends), ends - firsts
        skip_tokens = self.skip_tokens
        return rows_on_device(rows, device), PoolingMetadata(
            params=[self.params[i] for i in indices],
            seq_lens=tuple(lengths.tolist()),
            cu_seqlens=cu_seqlens_of(lengths, device),
            token_ids=None if self.token_ids is None else self.token_ids[rows],
            skip_tokens=None if skip_tokens is None else skip_tokens[upload(torch.from_numpy(picked), device)],
            queries=None if self.queries is None else [self.queries[i] for i in indices],
        )

    def _running(self) -> BatchChunks:
        """The chunks, where the batch has some."""
        if self.chunks is None:
            raise ValueError("the batch holds whole sequences, which have no running states")
        return self.chunks


def _check_lengths(num_seqs: int, **lists: Sequence[object] | None) -> None:
    for name, values in lists.items():
        if values is not None and len(values) != num_seqs:
            raise ValueError(f"{name} holds {len(values)} values for {num_seqs} sequences")
