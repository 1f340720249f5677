"""Which sequences run in slices, and the pool memory that they hold meanwhile. Plain Python.

A long sequence reserves the memory for its whole length when it starts, so that what has started can always finish;
then the ChunkedPrefillManager hands out its chunks, at most one a forward. A short one that may read the prefix cache
runs in one slice, after what the cache holds of it. Between two forwards nothing is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from .chunk_pace import ChunkPace
from .chunked_prefill import ChunkedPrefillConfig, ChunkedPrefillManager
from .sequence import Sequence, SequenceSlice

if TYPE_CHECKING:
    from ..sequence_pool import Allocation, SequenceAllocator

_MAX_RETRIES: Final = 8
"""Failures for want of memory that one chunk may have: each time it comes back about half as long."""
_MIN_SHARED_BLOCKS: Final = 2
"""Full blocks below which a short sequence leaves the prefix cache alone: there is too little to share."""

Key = tuple[int, int]


@dataclass(slots=True, eq=False)
class _Running:
    """A long sequence that has started, and what it holds."""

    sequence: Sequence
    allocation: Allocation


class Slicer:
    """Starts, continues and ends sliced sequences. Not thread-safe: its owner holds a lock.

    Args:
        allocator: The pool.
        threshold: Tokens. Longer sequences run in chunks.
        max_chunk_size: Tokens of a chunk.
        chunk_size: Tokens. A fixed size instead of one that adapts.
        token_s: Seconds by which a sequence's turn is later for every token of it that ran.
    """

    def __init__(
        self,
        allocator: SequenceAllocator,
        *,
        threshold: int,
        max_chunk_size: int,
        chunk_size: int | None = None,
        token_s: float = 0.0,
    ) -> None:
        self.pace = ChunkPace(max_chunk_size)
        self.num_preemptions = 0
        self.num_chunks = 0
        self._allocator = allocator
        self._threshold = threshold
        self._chunk_size = chunk_size
        self._max_chunk_size = chunk_size or max_chunk_size
        self._manager = ChunkedPrefillManager(
            ChunkedPrefillConfig(
                chunk_size=max_chunk_size, min_chunk_size=1, max_retries=_MAX_RETRIES, ageing_s=0.0, token_s=token_s
            )
        )
        self._running: dict[Key, _Running] = {}
        self._in_flight: dict[Key, SequenceSlice] = {}  # slices of this forward that hold memory

    @property
    def num_running(self) -> int:
        """Long sequences that have started."""
        return len(self._running)

    def is_long(self, sequence: Sequence, token_budget: int) -> bool:
        """Whether a sequence runs in chunks. One that the pool could never hold has to run whole."""
        return sequence.num_tokens > min(self._threshold, token_budget) and self.can_hold(sequence)

    def can_hold(self, sequence: Sequence) -> bool:
        """Whether the pool is large enough for a sequence."""
        return self._allocator.fits(sequence.num_tokens)

    def allowance(self, token_budget: int, *, others_wait: bool) -> int:
        """Returns the tokens that chunks may have in the next forward."""
        if self._chunk_size is not None:
            return max(token_budget // 2, 1) if others_wait else token_budget
        return min(self.pace.allowance(others_wait=others_wait), token_budget)

    def wants(self, sequence: Sequence, max_tokens: int) -> bool:
        """Whether a waiting long sequence should start now: those that run leave room, or their turn is later."""
        requests = [r for key in self._running if (r := self._manager.get_request(key)) is not None]
        if all(sequence.turn_s < request.turn[0] for request in requests):
            return True
        wanted = (min(r.total_tokens - r.num_completed_tokens, self._max_chunk_size) for r in requests)
        return sum(wanted) < max_tokens

    def start(self, sequence: Sequence) -> bool:
        """Reserves memory for a long sequence; False if there is not enough at the moment."""
        allocation = self._allocate(sequence)
        if allocation is None:
            return False
        key = _key(sequence)
        self._running[key] = _Running(sequence, allocation)
        self._manager.create_chunks(key, sequence.num_tokens, priority=0, arrival_s=sequence.turn_s)
        # A pure SSM brings its state along, so that nothing is computed twice; see SliceMemory.save.
        first = allocation.num_cached_tokens if self._allocator.pool.kv is not None else sequence.num_done
        if first:
            self._manager.skip_cached(key, first)
        return True

    def preempt_for(self, sequence: Sequence) -> list[SequenceSlice]:
        """Takes memory from long sequences whose turn is later until `sequence` can start; returns what they held.

        None are taken if that were not enough. What was pooled of them is kept; their keys and values stay in the
        prefix cache as long as nobody needs the blocks, and are computed again where they are lost.
        """
        later = sorted(
            (r for r in self._running.values() if r.sequence.turn_s > sequence.turn_s),
            key=lambda r: r.sequence.turn_s,
        )
        victims: list[_Running] = []
        while not self._allocator.has_room(sequence.num_tokens, after=[v.allocation for v in victims]):
            if not later:
                return []
            victims.append(later.pop())
        for victim in victims:
            self._drop(victim)
        self.num_preemptions += len(victims)
        return [SequenceSlice(v.sequence, v.sequence.num_done, 0, v.allocation) for v in victims]

    def next_chunks(self, max_tokens: int, max_chunks: int, *, memory_pressure: float = 0.0) -> list[SequenceSlice]:
        """Returns the chunks of the next forward, each of another sequence.

        Args:
            max_tokens: Tokens of all chunks together.
            max_chunks: Chunks.
            memory_pressure: How short memory is, 0 to 1; chunks are the smaller, the shorter it is.
        """
        slices: list[SequenceSlice] = []
        while max_tokens > 0 and len(slices) < max_chunks:
            chunk = self._manager.schedule_chunk(min(max_tokens, self._max_chunk_size), memory_pressure=memory_pressure)
            if chunk is None:
                break
            self._manager.start_chunk(chunk.chunk_id)
            running = self._running[cast("Key", chunk.request_id)]
            slice_ = SequenceSlice(running.sequence, chunk.start, chunk.num_tokens, running.allocation, chunk.chunk_id)
            self._in_flight[_key(running.sequence)] = slice_
            slices.append(slice_)
            max_tokens -= chunk.num_tokens
        return slices

    def whole(self, sequence: Sequence, max_tokens: int | None = None) -> SequenceSlice | None:
        """Returns the one slice of a short sequence; it begins after what the prefix cache holds of it.

        Args:
            sequence: Not long.
            max_tokens: Tokens that there is room for. None is returned where it is longer.
        """
        reads_cache = (
            sequence.needs_last_row
            and len(sequence.block_keys) >= _MIN_SHARED_BLOCKS
            and self._allocator.fits(sequence.num_tokens)
        )
        num_cached = self._allocator.find(sequence.block_keys, sequence.num_tokens - 1) if reads_cache else 0
        if max_tokens is not None and sequence.num_tokens - num_cached > max_tokens:
            return None
        slice_ = SequenceSlice(sequence, 0, sequence.num_tokens)
        if reads_cache:
            slice_.allocation = self._allocate(sequence)
            if slice_.allocation is not None:
                slice_.start = slice_.allocation.num_cached_tokens
                slice_.num_tokens -= slice_.start
                self._in_flight[_key(sequence)] = slice_
        return slice_

    def put_back(self, slice_: SequenceSlice, *, forget: bool = False) -> None:
        """Releases what a short sequence holds; see `SequenceAllocator.release`."""
        if self._in_flight.pop(_key(slice_.sequence), None) is not None and slice_.allocation is not None:
            self._allocator.release(slice_.allocation, forget=forget)

    def finish(self, slice_: SequenceSlice) -> None:
        """Books a slice that ran. Does nothing for a sequence that was cancelled or is to be tried again."""
        key = _key(slice_.sequence)
        if slice_.allocation is None or self._in_flight.get(key) is not slice_:
            return
        del self._in_flight[key]
        slice_.sequence.num_done = max(slice_.sequence.num_done, slice_.end)
        self._allocator.commit(slice_.allocation, slice_.end)
        if slice_.chunk_id is None:
            self._allocator.release(slice_.allocation)
            return
        self.num_chunks += 1
        if self._manager.complete_chunk(slice_.chunk_id):
            self._drop(self._running[key])

    def retry(self, slice_: SequenceSlice, error: Exception) -> bool:
        """Lets a chunk that failed run again, after the last one that did not; False where it may not."""
        key = _key(slice_.sequence)
        if slice_.chunk_id is None or self._in_flight.get(key) is not slice_:
            return False
        del self._in_flight[key]
        return self._manager.fail_chunk(slice_.chunk_id, error)

    def cancel(self, request_id: int, *, forget: bool = False) -> None:
        """Releases what a request holds; see `SequenceAllocator.release`."""
        for slice_ in [s for s in self._in_flight.values() if s.sequence.request_id == request_id]:
            if slice_.chunk_id is None:
                self.put_back(slice_, forget=forget)
            else:
                del self._in_flight[_key(slice_.sequence)]
        for running in [r for r in self._running.values() if r.sequence.request_id == request_id]:
            self._drop(running, forget=forget)

    def expired(self, now_s: float) -> list[Sequence]:
        """Returns long sequences whose deadline has passed; to end them is the caller's job (`cancel`)."""
        deadlines = ((r.sequence, r.sequence.deadline_s) for r in self._running.values())
        return [sequence for sequence, deadline_s in deadlines if deadline_s is not None and deadline_s <= now_s]

    def _allocate(self, sequence: Sequence) -> Allocation | None:
        readable = sequence.num_tokens - 1 if sequence.needs_last_row else sequence.num_done
        return self._allocator.allocate(_key(sequence), sequence.num_tokens, sequence.block_keys, readable)

    def _drop(self, running: _Running, *, forget: bool = False) -> None:
        """Releases a long sequence, wherever it stands."""
        key = _key(running.sequence)
        del self._running[key]
        self._manager.remove_request(key)
        self._allocator.release(running.allocation, forget=forget)


def _key(sequence: Sequence) -> Key:
    return sequence.request_id, sequence.index
