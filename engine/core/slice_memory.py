"""The device memory of sliced sequences: which rows of a batch read what, and where they leave what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ..packed_batch import BatchCache, KvCache, SsmStates
from ..pooling import PoolingStates
from ..scheduling.sequence import SequenceSlice
from ..sequence_pool import PoolPlan
from ..sequence_pool.cache_spec import CacheSpec

_NO_BLOCKS: Final = np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class Carry:
    """What a sequence takes from one slice to the next, apart from its blocks and slot. Lives in `Sequence.carry`.

    Attributes:
        states: Of its pooling.
        side: Which of the two places of its slot holds its SSM states.
        saved: SSM states per layer, convolution and recurrence, on the host, while it has no slot.
    """

    states: PoolingStates | None = None
    side: int = 0
    saved: list[tuple[Tensor, Tensor]] | None = None


class SliceMemory:
    """Storage behind the pools. A slot has two places for its states: a forward reads one and writes the other.

    So a forward that fails leaves everything as it was: keys and values are written to the same places again, and
    states are looked for in their new place only once `advance` has said so.

    Args:
        spec: What the model keeps.
        plan: Sizes of the pools.
        block_size: Tokens of a block.
        dtype: Of the model.
        device: Of the model.
    """

    def __init__(
        self, spec: CacheSpec, plan: PoolPlan, *, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._device = device
        self._num_slots = plan.num_slots
        self._kv = KvCache.allocate(spec, plan.num_blocks, block_size, dtype, device) if spec.kv_layers else None
        self._ssm = SsmStates.allocate(spec, 2 * plan.num_slots, dtype, device) if spec.ssm_layers else None

    def batch_cache(self, slices: Sequence[SequenceSlice]) -> BatchCache | None:
        """Returns what a forward over `slices` reads and writes; None where that is nothing.

        Args:
            slices: Those that begin a sequence before those that go on with one.
        """
        if all(s.allocation is None for s in slices):
            return None
        num_fresh = sum(s.start == 0 for s in slices)
        cache: dict[str, Tensor | None] = {}
        if self._kv is not None:
            cache |= self._kv_places(slices, num_fresh, self._kv.block_size)
        if self._ssm is not None:
            cache |= self._state_places(slices)
        return BatchCache(
            num_new_seqs=num_fresh,
            num_new_tokens=sum(s.num_tokens for s in slices[:num_fresh]),
            context_lens=tuple(s.start for s in slices),
            prompt_lens=tuple(s.sequence.num_tokens for s in slices),
            kv=self._kv,
            ssm=self._ssm,
            **cache,
        )

    def advance(self, slices: Sequence[SequenceSlice]) -> None:
        """Says that a forward over `slices` has succeeded."""
        if self._ssm is None:
            return
        for slice_ in slices:
            if slice_.allocation is not None:
                carry_of(slice_).side ^= 1

    def save(self, slice_: SequenceSlice) -> None:
        """Copies the states of a sequence that loses its slot to the host, so that it can go on in another."""
        if self._ssm is None or self._kv is not None or slice_.allocation is None or not slice_.start:
            return
        if carry_of(slice_).saved is not None:
            return  # it lost the slot before it ran there: what lies in it is not its own
        place = self._place(slice_, 0)
        carry_of(slice_).saved = [
            (conv[place].to("cpu", copy=True), ssm[place].to("cpu", copy=True))
            for conv, ssm in zip(self._ssm.conv, self._ssm.ssm, strict=True)
        ]

    def restore(self, slices: Sequence[SequenceSlice]) -> None:
        """Puts saved states into the slots that the sequences have now."""
        for slice_ in slices:
            carry: Carry | None = slice_.sequence.carry
            if self._ssm is None or slice_.allocation is None or carry is None or carry.saved is None:
                continue
            place = self._place(slice_, 0)
            for layer, (conv, ssm) in enumerate(carry.saved):
                self._ssm.conv[layer][place] = conv
                self._ssm.ssm[layer][place] = ssm
            carry.saved = None

    def _kv_places(self, slices: Sequence[SequenceSlice], num_fresh: int, block_size: int) -> dict[str, Tensor | None]:
        """Blocks of the sequences with a past, and the place of every row that is kept."""
        blocks = [np.asarray(s.allocation.block_ids, np.int64) if s.allocation else _NO_BLOCKS for s in slices]
        tables = [b[: -(-s.end // block_size)] for s, b in zip(slices[num_fresh:], blocks[num_fresh:], strict=True)]
        table = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
        for line, ids in zip(table, tables, strict=True):
            line[: len(ids)] = ids
        lengths = np.array([s.num_tokens for s in slices])
        first_rows = np.cumsum(lengths) - lengths
        first_blocks = np.cumsum([len(b) for b in blocks]) - [len(b) for b in blocks]
        is_kept = np.repeat([s.allocation is not None for s in slices], lengths)
        positions = np.arange(lengths.sum()) + np.repeat([s.start for s in slices] - first_rows, lengths)
        # Block of every row; rows that are not kept are left out below.
        places = np.repeat(first_blocks, lengths) + positions // block_size
        kept = np.flatnonzero(is_kept)
        slots = np.concatenate(blocks)[places[kept]] * block_size + positions[kept] % block_size
        return {
            "block_tables": torch.from_numpy(table).to(self._device, non_blocking=True),
            "past_lens_on_device": self._past_lens(slices[num_fresh:]),
            "store_rows": None if len(kept) == len(positions) else self._indices(kept),
            "store_slots": self._indices(slots),
        }

    def _past_lens(self, slices: Sequence[SequenceSlice]) -> Tensor:
        """[N - num_fresh] int32."""
        return torch.tensor([s.start for s in slices], dtype=torch.int32).to(self._device, non_blocking=True)

    def _state_places(self, slices: Sequence[SequenceSlice]) -> dict[str, Tensor | None]:
        """Places that states are read from and written to."""
        kept = [(i, s) for i, s in enumerate(slices) if s.allocation is not None]
        loaded = [(i, s) for i, s in kept if s.start]
        return {
            "load_indices": self._indices([i for i, _ in loaded]),
            "load_slots": self._indices([self._place(s, 0) for _, s in loaded]),
            "save_indices": self._indices([i for i, _ in kept]),
            "save_slots": self._indices([self._place(s, 1) for _, s in kept]),
        }

    def _place(self, slice_: SequenceSlice, ahead: int) -> int:
        """Where the states of a sequence are, or with `ahead` 1 will be after the next forward."""
        assert slice_.allocation is not None, "only sequences with pool memory have states"
        assert slice_.allocation.state_slot is not None, "a model with SSM layers has a pool of slots"
        return slice_.allocation.state_slot + (carry_of(slice_).side ^ ahead) * self._num_slots

    def _indices(self, values: Sequence[int] | np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.int64)).to(self._device, non_blocking=True)


def carry_of(slice_: SequenceSlice) -> Carry:
    """Returns what the sequence of a slice carries; begins it where there is nothing yet."""
    if slice_.sequence.carry is None:
        slice_.sequence.carry = Carry()
    carry: Carry = slice_.sequence.carry
    return carry
