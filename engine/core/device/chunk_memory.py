"""The device memory of sequences in chunks: KV blocks and SSM slots, and the slots that a batch reads and writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...executors.torch.packed_batch import BatchCache, KvCache, SsmStates
from ...scheduling import Allocation, CacheSpec, InputSequence, KvCacheMetadata, PoolSize, PrefillChunk
from .stream import DeviceStream


@dataclass(slots=True, eq=False)
class _SlotUse:
    """Location of the SSM states of a sequence in chunks.

    Attributes:
        buffer: Index of the buffer with the states: each slot has two buffers.
        host_states: The states on the host while the sequence has no slot. The copy may still run; see
            DeviceStream.save.
    """

    buffer: int = 0
    host_states: list[Tensor] | None = None


class ChunkMemory:
    """Storage of the blocks and slots of a SequencePool.

    A slot has two buffers for its states: a forward reads one and writes the other, and `advance` swaps them. A chunk
    that runs again writes its keys and values to the same slots. So a failed forward changes nothing.
    """

    def __init__(
        self,
        spec: CacheSpec,
        pool_size: PoolSize,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        stream: DeviceStream,
    ) -> None:
        self._stream = stream
        self._num_slots = pool_size.num_slots
        self._kv = KvCache.allocate(spec, pool_size.num_blocks, block_size, dtype, device) if spec.kv_layers else None
        self._ssm = SsmStates.allocate(spec, 2 * pool_size.num_slots, dtype, device) if spec.ssm_layers else None
        self._uses: defaultdict[InputSequence, _SlotUse] = defaultdict(_SlotUse)

    def batch_cache(
        self, chunks: Sequence[PrefillChunk], allocations: Sequence[Allocation | None]
    ) -> BatchCache | None:
        """Returns the cache for a forward over `chunks`, with indices on the host; None if no chunk uses the cache.

        Args:
            chunks: First the chunks that start a sequence, then the later chunks.
            allocations: The allocation of each chunk's sequence.
        """
        if all(allocation is None for allocation in allocations):
            return None
        num_new = sum(c.start == 0 for c in chunks)
        cache: dict[str, Tensor | None] = {}
        if self._kv is not None:
            cache |= _kv_slots(KvCacheMetadata.of(chunks, allocations, self._kv.block_size), num_new)
        if self._ssm is not None:
            cache |= self._state_slots(chunks, allocations)
        return BatchCache(
            num_new_seqs=num_new,
            num_new_tokens=sum(c.num_tokens for c in chunks[:num_new]),
            context_lens=tuple(c.start for c in chunks),
            total_lens=tuple(c.sequence.num_tokens for c in chunks),
            kv=self._kv,
            ssm=self._ssm,
            **cache,
        )

    def advance(self, chunks: Sequence[PrefillChunk]) -> None:
        """Records that a forward over `chunks` was started. Later forwards read the states that it writes."""
        if self._ssm is None:
            return
        for chunk in chunks:
            if chunk.is_last:
                self._uses.pop(chunk.sequence, None)
            elif chunk.sequence.allocation is not None:
                self._uses[chunk.sequence].buffer ^= 1

    def save(self, sequence: InputSequence, allocation: Allocation) -> None:
        """Copies the states of a preempted sequence to the host, so that it can continue in another slot.

        Does not wait: the copy is queued after the forwards that write the states.
        """
        if self._ssm is None or self._kv is not None or not sequence.num_pooled_tokens:
            return
        use = self._uses[sequence]
        if use.host_states is not None:
            return  # it was preempted before it ran in this slot, which has the states of another sequence
        use.host_states = self._stream.save(self._ssm.at(self._state_slot(use, allocation)))

    def restore(self, chunks: Sequence[PrefillChunk]) -> None:
        """Copies saved states into the new slots of the sequences."""
        for sequence in [chunk.sequence for chunk in chunks]:
            use = self._uses.get(sequence)
            if self._ssm is None or sequence.allocation is None or use is None or use.host_states is None:
                continue
            self._stream.restore(use.host_states, self._ssm.at(self._state_slot(use, sequence.allocation)))
            use.host_states = None

    def drop_states(self, sequence: InputSequence) -> None:
        """Drops the saved states of a sequence that has ended."""
        self._uses.pop(sequence, None)

    def _state_slots(
        self, chunks: Sequence[PrefillChunk], allocations: Sequence[Allocation | None]
    ) -> dict[str, Tensor | None]:
        """Returns the indices of the states to read and to write."""
        allocated = enumerate(zip(chunks, allocations, strict=True))
        written = [(i, c, self._uses[c.sequence], a) for i, (c, a) in allocated if a is not None]
        read = [(i, use, a) for i, c, use, a in written if c.start]
        return {
            "load_indices": _indices([i for i, *_ in read]),
            "load_slots": _indices([self._state_slot(use, a) for _, use, a in read]),
            "save_indices": _indices([i for i, *_ in written]),
            "save_slots": _indices([self._state_slot(use, a, is_next=True) for *_, use, a in written]),
        }

    def _state_slot(self, use: _SlotUse, allocation: Allocation, *, is_next: bool = False) -> int:
        """Returns the index of the states of a sequence now, or after the next forward."""
        assert allocation.state_slot is not None, "a model with SSM layers has a pool of slots"
        return allocation.state_slot + (use.buffer ^ is_next) * self._num_slots


def _kv_slots(kv: KvCacheMetadata, num_new: int) -> dict[str, Tensor | None]:
    """Returns the block tables of the later chunks, and the slot of every row that is stored."""
    stored = np.flatnonzero(kv.slot_mapping >= 0)
    return {
        "block_tables": torch.from_numpy(kv.block_tables[num_new:]),
        "continued_context_lens_on_device": torch.from_numpy(kv.context_lens[num_new:]),
        "store_rows": None if len(stored) == len(kv.slot_mapping) else _indices(stored),
        "store_slots": _indices(kv.slot_mapping[stored]),
    }


def _indices(values: Sequence[int] | np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values, np.int64))
