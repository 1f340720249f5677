"""Slots for the states of SSM layers: one sequence in flight takes one slot, whatever its length."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..protocol.errors import InvalidSlot, PoolExhausted


class SlotArray(Protocol):
    """States of one layer, indexed by slot first; a tensor in the engine."""

    def __getitem__(self, index: int, /) -> Any:
        """Returns the state in slot `index`, as a view that can be written."""
        ...


class SlotStorage(Protocol):
    """The memory behind the slots, one array per SSM layer; SsmStates in packed_batch.py."""

    @property
    def conv(self) -> Sequence[SlotArray]:
        """Last inputs of the convolutions."""
        ...

    @property
    def ssm(self) -> Sequence[SlotArray]:
        """States of the recurrences."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSlot:
    """One slot in use. Its states are views: writing to them writes to the pool's memory.

    Attributes:
        index: Which slot.
        request_id: Whom it belongs to.
        conv_state: Per SSM layer, last inputs of the convolution; empty in a pool without storage.
        ssm_state: Per SSM layer, state of the recurrence; empty in a pool without storage.
    """

    index: int
    request_id: Hashable
    conv_state: tuple[Any, ...]
    ssm_state: tuple[Any, ...]


class SsmStatePool:
    """Slot numbers bound to requests. Not thread-safe: its owner holds a lock.

    A slot keeps the states of its last owner: a sequence must start from zeros.

    The pool of a served model has no storage. The states of its slots are in ChunkMemory, which keeps two places per
    slot (before and after the chunk that runs), so `slot` returns only the owner there.

    Args:
        num_slots: Slots in the pool.
        storage: The memory that `slot` shows.

    Raises:
        ValueError: `num_slots` is less than 1.
    """

    def __init__(self, num_slots: int, storage: SlotStorage | None = None) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}; it must be at least 1.")
        self.num_slots = num_slots
        self._storage = storage
        self._owners: dict[int, Hashable] = {}
        self._free = list(range(num_slots - 1, -1, -1))  # a stack: slots used last are taken first

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots bound to a request."""
        return len(self._owners)

    def alloc(self, request_id: Hashable) -> int:
        """Takes a slot for a request, which may hold several, and returns its number.

        Raises:
            PoolExhausted: No slot is free.
        """
        if not self._free:
            raise PoolExhausted(f"all {self.num_slots} state slots are in use.")
        index = self._free.pop()
        self._owners[index] = request_id
        return index

    def release(self, index: int) -> None:
        """Gives a slot back.

        Raises:
            InvalidSlot: `index` is not a slot in use.
        """
        if type(index) is not int or index not in self._owners:
            raise InvalidSlot(f"{index!r} is not a state slot in use; slots are numbered 0 to {self.num_slots - 1}.")
        del self._owners[index]
        self._free.append(index)

    def slot(self, index: int) -> SequenceSlot | None:
        """Returns a slot with its states, or None where no slot of that number is in use."""
        if type(index) is not int or index not in self._owners:
            return None
        conv, ssm = ((), ()) if self._storage is None else (self._storage.conv, self._storage.ssm)
        return SequenceSlot(
            index, self._owners[index], tuple(layer[index] for layer in conv), tuple(layer[index] for layer in ssm)
        )
