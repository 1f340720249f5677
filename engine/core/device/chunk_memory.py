"""The device memory of sequences in chunks: KV blocks and SSM slots, and the places that a batch reads and writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ...executors.torch.packed_batch import BatchCache, KvCache, SsmStates
from ...protocol.config import SchedulerConfig
from ...scheduling import Allocation, CacheSpec, PoolPlan, PrefillChunk, QueuedSequence, SequencePool
from .stream import DeviceStream

_NO_BLOCKS: Final = np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class _SlotUse:
    """Where the SSM states of a sequence in chunks are.

    Attributes:
        place: Which of the two places of its slot holds them.
        saved: The states on the host while it has no slot, perhaps still being copied; see DeviceStream.save.
    """

    place: int = 0
    saved: list[Tensor] | None = None


class ChunkMemory:
    """Storage of the blocks and slots of a SequencePool.

    A slot has two places for its states: a forward reads one and writes the other, and `advance` swaps them. Keys and
    values are written to the same places when a chunk runs again. So a failed forward changes nothing.

    Args:
        spec: Keys, values and states of the model.
        plan: Sizes of the pools.
        block_size: Tokens of a block.
        dtype: Of the model.
        device: Of the model.
        stream: Where its forwards run.
    """

    def __init__(
        self,
        spec: CacheSpec,
        plan: PoolPlan,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        stream: DeviceStream,
    ) -> None:
        self._stream = stream
        self._num_slots = plan.num_slots
        self._kv = KvCache.allocate(spec, plan.num_blocks, block_size, dtype, device) if spec.kv_layers else None
        self._ssm = SsmStates.allocate(spec, 2 * plan.num_slots, dtype, device) if spec.ssm_layers else None
        self._uses: defaultdict[QueuedSequence, _SlotUse] = defaultdict(_SlotUse)

    def batch_cache(self, chunks: Sequence[PrefillChunk]) -> BatchCache | None:
        """Returns the cache that a forward over `chunks` uses, with places on the host; None if it uses none.

        Args:
            chunks: First the chunks that start a sequence, then the later chunks.
        """
        if all(c.sequence.allocation is None for c in chunks):
            return None
        num_new = sum(c.start == 0 for c in chunks)
        cache: dict[str, Tensor | None] = {}
        if self._kv is not None:
            cache |= self._kv_places(chunks, num_new, self._kv.block_size)
        if self._ssm is not None:
            cache |= self._state_places(chunks)
        return BatchCache(
            num_new_seqs=num_new,
            num_new_tokens=sum(c.num_tokens for c in chunks[:num_new]),
            context_lens=tuple(c.start for c in chunks),
            prompt_lens=tuple(c.sequence.num_tokens for c in chunks),
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
                self._uses[chunk.sequence].place ^= 1

    def save(self, sequence: QueuedSequence, allocation: Allocation) -> None:
        """Copies the states of a sequence that loses its slot to the host, so that it can continue in another slot.

        Does not wait: the copy is queued behind the forwards that write the states.
        """
        if self._ssm is None or self._kv is not None or not sequence.num_pooled:
            return
        use = self._uses[sequence]
        if use.saved is not None:
            return  # it lost the slot before it ran there, so the slot holds another sequence's states
        use.saved = self._stream.save(self._ssm.at(self._place(use, allocation)))

    def restore(self, chunks: Sequence[PrefillChunk]) -> None:
        """Puts saved states into the slots that the sequences have now."""
        for sequence in [chunk.sequence for chunk in chunks]:
            use = self._uses.get(sequence)
            if self._ssm is None or sequence.allocation is None or use is None or use.saved is None:
                continue
            self._stream.put_back(use.saved, self._ssm.at(self._place(use, sequence.allocation)))
            use.saved = None

    def forget(self, sequence: QueuedSequence) -> None:
        """Drops the saved states of a sequence that has ended."""
        self._uses.pop(sequence, None)

    def _kv_places(self, chunks: Sequence[PrefillChunk], num_new: int, block_size: int) -> dict[str, Tensor | None]:
        """Returns the block tables of the later chunks, and the block place of every row that is kept."""
        held = [chunk.sequence.allocation for chunk in chunks]
        blocks = [_NO_BLOCKS if a is None else np.asarray(a.block_ids, np.int64) for a in held]
        tables = [b[: -(-c.end // block_size)] for c, b in zip(chunks[num_new:], blocks[num_new:], strict=True)]
        table = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
        for line, ids in zip(table, tables, strict=True):
            line[: len(ids)] = ids
        lengths = np.array([c.num_tokens for c in chunks])
        first_rows = np.cumsum(lengths) - lengths
        first_blocks = np.cumsum([len(b) for b in blocks]) - [len(b) for b in blocks]
        is_kept = np.repeat([a is not None for a in held], lengths)
        positions = np.arange(lengths.sum()) + np.repeat([c.start for c in chunks] - first_rows, lengths)
        # Block of every row. Rows without an allocation are dropped below.
        places = np.repeat(first_blocks, lengths) + positions // block_size
        kept = np.flatnonzero(is_kept)
        slots = np.concatenate(blocks)[places[kept]] * block_size + positions[kept] % block_size
        return {
            "block_tables": torch.from_numpy(table),
            "past_lens_on_device": torch.tensor([c.start for c in chunks[num_new:]], dtype=torch.int32),
            "store_rows": None if len(kept) == len(positions) else _indices(kept),
            "store_slots": _indices(slots),
        }

    def _state_places(self, chunks: Sequence[PrefillChunk]) -> dict[str, Tensor | None]:
        """Returns the places from which states are read and to which they are written."""
        held = [(i, c, c.sequence.allocation) for i, c in enumerate(chunks)]
        saved = [(i, c, self._uses[c.sequence], a) for i, c, a in held if a is not None]
        loaded = [(i, use, a) for i, c, use, a in saved if c.start]
        return {
            "load_indices": _indices([i for i, *_ in loaded]),
            "load_slots": _indices([self._place(use, a) for _, use, a in loaded]),
            "save_indices": _indices([i for i, *_ in saved]),
            "save_slots": _indices([self._place(use, a, is_next=True) for *_, use, a in saved]),
        }

    def _place(self, use: _SlotUse, allocation: Allocation, *, is_next: bool = False) -> int:
        """Returns the place of the states of a sequence now, or after the next forward."""
        assert allocation.state_slot is not None, "a model with SSM layers has a pool of slots"
        return allocation.state_slot + (use.place ^ is_next) * self._num_slots


def _indices(values: Sequence[int] | np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values, np.int64))


def describe_pool(sequence_pool: SequencePool, limits: SchedulerConfig, num_bytes: int) -> str:
    """Returns the size of the pool, whether inputs run in chunks, and whether prefixes are kept.

    Args:
        sequence_pool: Memory of sequences that run in chunks.
        limits: Settings of the operator.
        num_bytes: Bytes of the pool; see PoolPlan.
    """
    kv, ssm = sequence_pool.kv, sequence_pool.ssm
    sizes = []
    if kv is not None:
        sizes.append(f"{kv.num_blocks * kv.block_size:,} tokens ({kv.num_blocks:,} blocks of {kv.block_size})")
    if ssm is not None:
        sizes.append(f"{ssm.num_slots:,} state slot{'s' * (ssm.num_slots != 1)}")
    chunks = "off"
    if limits.enable_chunked_prefill:
        chunks = "of adaptive size" if limits.chunk_size is None else f"of {limits.chunk_size:,} tokens"
    prefixes = "off" if sequence_pool.prefixes is None else "on"
    return f"the pool holds {' and '.join(sizes)} in {_mib(num_bytes)}; chunks: {chunks}; prefix cache: {prefixes}"


def _mib(num_bytes: int) -> str:
    mib = num_bytes / 2**20
    return f"{mib:,.0f} MiB" if mib >= 10 else f"{mib:.2g} MiB"
