"""Decides what runs in the next forward. Plain Python without torch.

FairQueue orders the waiting sequences. Short ones run whole; those of similar length near the head of the queue run
together, because attention over equal lengths is one product. Long ones run in chunks, which take a share of each
forward: short and long sequences get half each while both wait. A long sequence gets its memory for all of its length
when it starts, so that it can end. It loses the memory only to a sequence that arrived earlier.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..protocol.config import ChunkedPrefillConfig, SchedulerConfig
from .chunk_size import ChunkSizeController
from .chunked_prefill import ChunkedPrefillManager
from .fair_queue import FairQueue, group_by_length
from .sequence import Batch, ForwardBudget, PrefillChunk, QueuedSequence, Request, Status
from .sequence_pool import Allocation, SequencePool

_FORWARD_S: Final = 1.0
"""Seconds that a full forward is assumed to take before one was measured."""
_WINDOW_BATCHES: Final = 4
"""Sequences of similar length are looked for among the sequences of so many batches."""
MAX_SHRINKAGE: Final = 32
"""The token budget is never lowered to less than its full size over this, if sequences can run in chunks."""
_GOOD_STEPS: Final = 32
"""Forwards after which a lowered budget is doubled again."""
_PART_OF_BATCH: Final = 4
"""A batch that would wait behind another is worth starting from its full size over this: less takes about as long."""
_MIN_SHARED_BLOCKS: Final = 2
"""Full blocks from which a short sequence uses the prefix cache."""
_POOL_PRESSURE: Final = 0.5
"""Memory pressure of a full pool while a sequence waits for memory: chunks are half as long."""


class Scheduler:
    """The table of requests, and the policy over them.

    Not thread-safe: its owner holds a lock. The next batch may be scheduled before one is finished (`finish`). If that
    one has chunks of long sequences, call `allow_next_chunks` before, and wait while `needs_idle_device` is set; such
    batches are finished in order. Failed chunks are cancelled or given to `retry` before `finish`.
    Invariants: a batch exceeds `token_budget` only if it is one sequence that must run whole, and never the maximum
    number of sequences. Only `_release` frees the memory of a sequence.

    Args:
        config: Limits of the number of sequences and of their wait.
        token_budget: Tokens of a batch; raised to `max_seq_len` if no sequence can run in chunks.
        max_seq_len: Tokens of the longest sequence.
        prefill: How long sequences are cut.
        sequence_pool: Memory of sequences that run in chunks; None: sequences run whole.
        num_lanes: Parts of the device that run batches by themselves.

    Attributes:
        requests: Every unfinished request by its id.
        waiting: Sequences that have not started.
        prefill: Long sequences that have started.
        chunk_sizes: Sizes of forwards and of chunks.
        token_budget: Tokens of a batch now.
        memory_pressure: Share of a full chunk for which memory was short when chunks were last cut, 0 to 1.
        needs_idle_device: Whether the next batch should wait until none runs: it takes memory from a running chunk.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        token_budget: int,
        max_seq_len: int,
        prefill: ChunkedPrefillConfig | None = None,
        sequence_pool: SequencePool | None = None,
        num_lanes: int = 1,
    ) -> None:
        self._pool = sequence_pool or SequencePool()
        self._max_num_seqs, self._max_wait_s = config.seqs("cpu"), config.max_wait_s
        self._max_seq_len, self._num_lanes = max_seq_len, num_lanes
        self._full_budget = max(token_budget, max_seq_len) if self._pool.is_empty else token_budget
        self._num_good_steps = 0
        self._finished: list[QueuedSequence] = []  # long sequences, since the last batch
        self._last_num_whole = 0  # whole sequences in the last batch
        self._waits_for_memory = False  # the next long sequence does
        self.requests: dict[int, Request] = {}
        self.waiting = FairQueue(self._full_budget)
        self.prefill = ChunkedPrefillManager(prefill, order=self.waiting.order)
        self.chunk_sizes = ChunkSizeController(
            self.prefill.config.chunk_size, is_dynamic=self.prefill.config.is_dynamic
        )
        self.token_budget = self._full_budget
        self.memory_pressure = 0.0
        self.needs_idle_device = False

    @property
    def has_work(self) -> bool:
        """Whether a batch can be formed."""
        return bool(self.waiting.num_seqs) or self.prefill.peek() is not None

    @property
    def has_long(self) -> bool:
        """Whether the next batch may have chunks of long sequences."""
        return bool(self.waiting.num_long or self.prefill.requests)

    @property
    def has_large_batch(self) -> bool:
        """Whether there is enough for a batch that waits behind another one: a part of a full batch, or a next chunk.

        Fewer sequences run together with those that arrive until the device is free.
        """
        has_tokens = self.waiting.num_tokens >= self.chunk_sizes.forward_tokens(self.token_budget) // _PART_OF_BATCH
        has_seqs = self.waiting.num_seqs >= self._max_num_seqs // _PART_OF_BATCH
        return has_tokens or has_seqs or self.prefill.peek() is not None

    def add(self, request: Request) -> None:
        """Adds a request and queues its sequences. Raises ValueError if one can never run."""
        for sequence in request.sequences:
            num_tokens = sequence.num_tokens
            if not 1 <= num_tokens <= self._max_seq_len:
                raise ValueError(f"a sequence has {num_tokens} tokens; it must have 1 to {self._max_seq_len}.")
            if num_tokens > self.token_budget or self.prefill.should_chunk(num_tokens):
                sequence.is_long = self._pool.can_hold(num_tokens)
        self.requests[request.request_id] = request
        request.num_unfinished = len(request.sequences)
        token_s = self.chunk_sizes.token_s or _FORWARD_S / self._full_budget
        self.waiting.add(request, self.prefill.config.ageing_s / token_s)

    def cancel(self, request_id: int, *, uncache: bool = False) -> Request | None:
        """Ends a request and returns it; None if it is unknown.

        With `uncache` none of its blocks stays in the prefix cache: its results may be wrong.
        """
        request = self.requests.get(request_id)
        for sequence in [] if request is None else [s for s in request.sequences if s.status is not Status.FINISHED]:
            self._release(sequence, Status.FINISHED, uncache=uncache)
        return request

    def schedule(self, now_s: float, free_tokens: int | None = None) -> Batch:
        """Returns the next batch. It is empty only if nothing waits, or all that waited has expired.

        Args:
            now_s: Seconds. Monotonic time, as in Request.arrival_s.
            free_tokens: Tokens of a forward that the device has memory for now; None if unknown.
        """
        self.needs_idle_device = False
        config = self.prefill.config
        batch, self._finished = Batch(finished=self._finished), []
        budget = ForwardBudget(self.chunk_sizes.forward_tokens(self.token_budget), self._max_num_seqs)
        if free_tokens is not None and config.is_dynamic:
            budget.num_tokens = min(budget.num_tokens, max(free_tokens, config.min_chunk_size))
        if self._num_lanes > 1 and not self.has_long:
            budget.num_tokens = min(budget.num_tokens, self.waiting.tokens_per_batch(self._num_lanes))
        self._expire(self.prefill.requests.values(), now_s, batch)
        window = self._short_window(now_s, batch)
        if self.has_long:
            self._add_chunks(window, batch, budget, now_s, free_tokens)
        else:
            self._waits_for_memory = False
        self._add_whole(window, batch, budget)
        batch.chunks.sort(key=lambda chunk: (chunk.start > 0, chunk.end - chunk.start))
        batch.num_left = self.waiting.num_seqs
        return batch

    def allow_next_chunks(self, batch: Batch) -> None:
        """Records that a batch was started on a device that keeps the order: the next chunks may be scheduled now.

        Nothing is committed to the prefix cache before `finish`: the values of a chunk may not be finite.
        """
        for chunk in batch.chunks if batch.num_long else []:
            if chunk.sequence.is_long and chunk.sequence.chunk is chunk:  # otherwise cancelled meanwhile
                self.prefill.allow_next_chunk(chunk.chunk_id)

    def finish(self, batch: Batch) -> list[Request]:
        """Records that a batch ran, except for cancelled and retried chunks; returns the requests that are complete."""
        finished = []
        for chunk in batch.chunks:
            sequence = chunk.sequence
            if not sequence.is_in_flight(chunk):
                continue
            if sequence.is_long:
                self.prefill.complete_chunk(chunk.chunk_id)
            else:
                sequence.num_done = chunk.end
            sequence.num_pooled = max(sequence.num_pooled, chunk.end)
            if sequence.allocation is not None:
                self._pool.commit(sequence.allocation, chunk.end)
            if sequence.is_complete:
                self._release(sequence, Status.FINISHED)
                finished += [] if sequence.request.num_unfinished else [sequence.request]
        self._num_good_steps = (self._num_good_steps + 1) % _GOOD_STEPS
        if not self._num_good_steps:
            self.token_budget = min(2 * self.token_budget, self._full_budget)
        return finished

    def retry(self, chunk: PrefillChunk, error: Exception) -> bool:
        """Lets tokens that ran out of memory run again in smaller chunks; returns False if that cannot help."""
        sequence = chunk.sequence
        if sequence.chunk is not chunk or chunk.num_tokens == 1 or not self._pool.can_hold(sequence.num_tokens):
            return False
        if sequence.is_long:
            return self.prefill.fail_chunk(chunk.chunk_id, error)
        self._wait_again(sequence)
        return True

    def shrink(self, token_budget: int) -> None:
        """Lowers the budget after the device ran out of memory, never below a sequence that must run whole."""
        least = self._max_seq_len if self._pool.is_empty else max(self._full_budget // MAX_SHRINKAGE, 1)
        self.token_budget = min(self.token_budget, max(token_budget, least))
        self._num_good_steps = 0

    def _short_window(self, now_s: float, batch: Batch) -> list[QueuedSequence]:
        """Returns the short sequences that may run now, best first, without those whose deadline has passed.

        Similar lengths are looked for among the sequences of several batches, but not if those of one have waited for
        too long: then they run in their order.
        """
        window = self._live_window(1, now_s, batch)
        if window and now_s - window[-1].request.arrival_s <= self._max_wait_s:
            window = group_by_length(self._live_window(_WINDOW_BATCHES, now_s, batch), now_s, self._max_wait_s)
        return window

    def _live_window(self, num_batches: int, now_s: float, batch: Batch) -> list[QueuedSequence]:
        """Returns the short sequences of so many batches at the head of the queue whose deadline has not passed."""
        while window := self.waiting.window(num_batches * self.token_budget, num_batches * self._max_num_seqs):
            self._expire(window, now_s, batch)
            if not batch.expired:
                return window
            if live := [sequence for sequence in window if sequence.status is Status.WAITING]:
                return live
        return []

    def _add_chunks(
        self, window: list[QueuedSequence], batch: Batch, budget: ForwardBudget, now_s: float, free_tokens: int | None
    ) -> None:
        """Starts long sequences and adds the chunks of this batch."""
        chunk_budget = self._chunk_budget(window, budget.num_tokens)
        if chunk_budget.num_tokens < 1 or chunk_budget.num_seqs < 1:
            return
        self._waits_for_memory = False
        while heads := self.waiting.window(1, 1, is_long=True):
            self._expire(heads, now_s, batch)
            (sequence,) = heads
            if sequence.status is Status.WAITING and not (
                self._should_start(sequence, chunk_budget.num_tokens) and self._start(sequence, batch)
            ):
                break  # the others wait too, or this one might never find enough memory
        pool_pressure = _POOL_PRESSURE * self._pool.usage if self._waits_for_memory else 0.0
        device_pressure = 0.0 if free_tokens is None else 1 - min(free_tokens / self.prefill.config.chunk_size, 1.0)
        self.memory_pressure = max(device_pressure, pool_pressure, 1 - self.token_budget / self._full_budget)
        while chunk_budget.num_tokens > 0 and chunk_budget.num_seqs > 0:
            max_tokens = chunk_budget.num_tokens
            chunk = self.prefill.schedule_chunk(max_tokens, memory_pressure=self.memory_pressure)
            if chunk is None:
                break
            self._charge(self.prefill.start_chunk(chunk.chunk_id))
            batch.chunks.append(chunk)
            batch.num_long += 1
            chunk_budget.add(chunk.num_tokens)
            budget.add(chunk.num_tokens)

    def _chunk_budget(self, window: list[QueuedSequence], token_budget: int) -> ForwardBudget:
        """Returns the share of the next forward that chunks may have."""
        others_wait = bool(window) or self._last_num_whole > 0
        num_tokens = self.chunk_sizes.chunk_tokens(token_budget, self.prefill.config, others_wait=others_wait)
        # Short sequences that wait get up to half of the forward. If one does not fit beside a chunk, they alternate.
        short_tokens = min(sum([sequence.num_tokens for sequence in window]), token_budget // 2)
        num_short = min(len(window), self._max_num_seqs // 2)
        if window and not self._last_num_whole:
            short_tokens, num_short = max(short_tokens, window[0].num_tokens), max(num_short, 1)
        else:
            short_tokens = min(short_tokens, token_budget - self.prefill.config.min_chunk_size)
        return ForwardBudget(min(num_tokens, token_budget - short_tokens), self._max_num_seqs - num_short)

    def _should_start(self, sequence: QueuedSequence, max_tokens: int) -> bool:
        """Whether a long sequence should start now: the next chunks of the running ones leave tokens, or run later."""
        running = self.prefill.requests.values()
        chunk_size = self.prefill.config.chunk_size
        if sum(min(other.num_tokens - other.num_scheduled, chunk_size) for other in running) < max_tokens:
            return True
        order = self.waiting.order(sequence)
        return all(order < self.waiting.order(other) for other in running)

    def _start(self, sequence: QueuedSequence, batch: Batch) -> bool:
        """Gives a long sequence the memory for its whole length; returns False if there is not enough now."""
        allocation = self._allocate(sequence)
        if allocation is None and self._preempt_for(sequence, batch):
            allocation = self._allocate(sequence)
        self._waits_for_memory = allocation is None
        if allocation is None:
            return False
        self.waiting.remove(sequence)
        sequence.allocation = allocation
        self.prefill.add(sequence)
        # SSM states are kept with a preempted sequence, so it continues after the tokens that were pooled.
        num_done = allocation.num_cached_tokens if allocation.block_ids else sequence.num_pooled
        self.prefill.skip_cached(sequence.request_id, num_done)
        return True

    def _preempt_for(self, sequence: QueuedSequence, batch: Batch) -> bool:
        """Takes memory from running long sequences for one that waits; returns whether it did.

        Takes none while one of their chunks runs, whose result is still wanted, but sets `needs_idle_device`. Pooled
        rows stay pooled. Keys and values stay in the prefix cache until the blocks are needed.
        """
        victims = self._victims(sequence)
        self.needs_idle_device = any(victim.earlier_chunks for victim, _ in victims)
        if self.needs_idle_device:
            return False
        for victim, _ in victims:
            self.prefill.preempt(victim.request_id)
            self._wait_again(victim)
        batch.preempted += victims
        return bool(victims)

    def _victims(self, sequence: QueuedSequence) -> list[tuple[QueuedSequence, Allocation]]:
        """Returns the running sequences, the last arrived first, that give up their memory; none if that is not enough.

        They arrived later (a priority level counts as `ageing_s`), which excludes cycles of preemption. Those of the
        same client run later in its order too, and those of other clients arrived later whatever the priorities.
        """
        own, arrival = sequence.request, self._arrival(sequence)
        later = sorted((s for s in self.prefill.requests.values() if self._arrival(s) > arrival), key=self._arrival)
        victims: list[tuple[QueuedSequence, Allocation]] = []
        while not self._pool.has_room(sequence.num_tokens, after=[allocation for _, allocation in victims]):
            if not later:
                return []
            victim = later.pop()
            request = victim.request
            is_own = request.client == own.client
            if (request.due, request.number) < (own.due, own.number) if is_own else request.arrival_s <= own.arrival_s:
                continue
            assert victim.allocation is not None, "a long sequence that runs holds memory"
            victims.append((victim, victim.allocation))
        return victims

    def _arrival(self, sequence: QueuedSequence) -> tuple[float, int, int]:
        request = sequence.request
        return request.arrival_s + request.priority * self.prefill.config.ageing_s, request.number, sequence.index

    def _add_whole(self, window: list[QueuedSequence], batch: Batch, budget: ForwardBudget) -> None:
        """Adds the whole sequences of this batch."""
        num_chunks = len(batch.chunks)
        for sequence in window:
            if (chunk := self._whole_chunk(sequence, budget)) is None:
                break
            self._charge(chunk)
            batch.chunks.append(chunk)
        self._last_num_whole = len(batch.chunks) - num_chunks

    def _whole_chunk(self, sequence: QueuedSequence, budget: ForwardBudget) -> PrefillChunk | None:
        """Starts a short sequence after its cached prefix; returns None if there is no room.

        It takes no memory, and so reads no prefix, if a long sequence waits for memory that only short ones hold.
        """
        num_tokens, num_cached, keys = sequence.num_tokens, 0, sequence.block_keys
        may_hold = self._pool.can_hold(num_tokens) and not (self._waits_for_memory and not self.prefill.requests)
        if sequence.request.needs_last_row and len(keys) >= _MIN_SHARED_BLOCKS and may_hold:
            if budget.has_room(num_tokens - self._pool.find(keys, num_tokens - 1)):
                sequence.allocation = self._allocate(sequence)
            num_cached = 0 if sequence.allocation is None else sequence.allocation.num_cached_tokens
        if not budget.add(num_tokens - num_cached):
            return None
        self.waiting.remove(sequence)
        sequence.status = Status.RUNNING
        sequence.chunk = PrefillChunk(sequence, num_cached, num_tokens)
        return sequence.chunk

    def _charge(self, chunk: PrefillChunk) -> None:
        """Charges the client of a chunk for its tokens, but not again for those of a preempted sequence."""
        self.waiting.charge(chunk.sequence, max(chunk.end - max(chunk.start, chunk.sequence.num_pooled), 0))

    def _allocate(self, sequence: QueuedSequence) -> Allocation | None:
        readable = sequence.num_tokens - 1 if sequence.request.needs_last_row else sequence.num_pooled
        return self._pool.allocate(sequence.request_id, sequence.num_tokens, sequence.block_keys, readable)

    def _expire(self, sequences: Iterable[QueuedSequence], now_s: float, batch: Batch) -> None:
        """Ends the requests of sequences whose deadline has passed."""
        for request in [s.request for s in sequences if (at_s := s.request.deadline_s) is not None and at_s <= now_s]:
            if request.num_unfinished:
                self.cancel(request.request_id)
                batch.expired.append(request)

    def _wait_again(self, sequence: QueuedSequence) -> None:
        """Lets a running sequence wait again, to run in chunks."""
        self._release(sequence, Status.WAITING)
        sequence.is_long = True
        self.waiting.add_again(sequence)

    def _release(self, sequence: QueuedSequence, status: Status, *, uncache: bool = False) -> None:
        """Ends a sequence, or makes a running one wait again; releases what it holds."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.is_long:
            self.prefill.remove_request(sequence.request_id)
        sequence.status, sequence.chunk = status, None
        if sequence.allocation is not None:
            self._pool.free(sequence.allocation, uncache=uncache)
            sequence.allocation = None
        if status is Status.FINISHED:
            if sequence.is_long:
                self._finished.append(sequence)
            request = sequence.request
            request.num_unfinished -= 1
            if not request.num_unfinished:
                del self.requests[request.request_id]
                request.sequences = []  # breaks a reference cycle
