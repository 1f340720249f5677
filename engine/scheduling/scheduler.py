"""Decides what runs in the next forward, and keeps the one book of what waits and runs. Plain Python without torch.

The order is start-time fair (see waiting.py): a sequence's turn comes at its arrival, or when those before it in its
request have run and had their time, so that large requests and small ones share the device. A level of priority is
worth a fixed time of waiting. Nobody starves: turns never move, and later arrivals have later ones. Where clients are
told apart, this holds within each of them, and those that wait get the same number of tokens.

Short sequences of similar length whose turn is near go together (attention over equal lengths is one product), unless
one has waited for too long. Long ones run in chunks, which take a share of each forward; whole sequences take the rest.
A long one gets all of its memory when it starts, so that it can end, and loses it only to one whose turn is earlier.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Final

from ..protocol.config import ChunkedPrefillConfig, SchedulerConfig
from .chunked_prefill import ChunkedPrefillManager
from .pace import ChunkPace
from .preemption import victims_of
from .sequence import Batch, Chunk, PrefillBudget, PrefillChunk, QueuedSequence, Request, Status
from .sequence_pool import Allocation, SequencePool
from .waiting import WaitingQueue, in_running_order

_WINDOW: Final = 4
"""Batches. Likes in length are looked for among the tokens of so many, and the sequences of half as many."""
LEAST_SHARE: Final = 32
"""The budget is never lowered to less than its original size over this, where sequences can run in chunks."""
_GOOD_STEPS: Final = 32
"""Forwards after which a budget that was lowered is doubled again."""
_PART_OF_BATCH: Final = 4
"""A batch that is begun behind another has at least its size over this: less takes a device about as long."""
_MIN_SHARED_BLOCKS: Final = 2
"""Full blocks below which a short sequence leaves the prefix cache alone: there is too little to share."""
_POOL_PRESSURE: Final = 0.5
"""Memory pressure of a full pool while a sequence waits for room in it: chunks are half as long."""


class Scheduler:
    """The book of requests, the queue that points into it, and the policy over them.

    Not thread-safe: its owner holds a lock. Batches may overlap: the next is scheduled before one is finished
    (`finish`). One with chunks of long sequences may only be overlapped once `go_on` has been told of it, unless
    `awaits_quiet`, and such batches are finished in order. What failed is cancelled or given to `retry` before that.
    Invariant: a batch never exceeds `token_budget` (but for one sequence that has to run whole) or the number of
    sequences. What a sequence holds is released in `_leave` alone.

    Args:
        config: Limits of the number of sequences and of their wait.
        token_budget: Tokens of a batch; raised to `max_seq_len` where nothing can run in chunks.
        max_seq_len: Tokens of the longest sequence that will come.
        prefill: How long sequences are cut.
        sequence_pool: Memory of sequences that run in chunks; None: sequences run whole.
        num_lanes: Parts of the device that run batches by themselves.
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
        # Where nobody has asked the device how many it takes, it is a CPU.
        self._max_num_seqs, self._max_wait_s = config.seqs("cpu"), config.max_wait_s
        self._max_seq_len, self._num_lanes = max_seq_len, num_lanes
        self._full_budget = token_budget if not self._pool.is_empty else max(token_budget, max_seq_len)
        self._num_good_steps = 0
        self._ended: list[QueuedSequence] = []  # in chunks, since the last batch
        self._last_num_whole = 0  # whole sequences in the last batch
        self._waits_for_memory = False  # the next long sequence does
        self.awaits_quiet = False  # until nothing runs: then it takes memory from one of which a chunk runs now
        self._orders = count()
        self._token_s = self._front_s = 0.0  # of this batch: time of a token, and when who has not begun is due
        self.requests: dict[int, Request] = {}  # the book: every request that has not ended, by its number
        self.waiting = WaitingQueue()  # the sequences that have not started
        self.prefill: ChunkedPrefillManager[QueuedSequence] = ChunkedPrefillManager(prefill)  # long ones that have
        self.token_budget = self._full_budget  # of a batch now
        self.memory_pressure = 0.0  # share of a full chunk for which memory was short when chunks were last cut, 0 to 1
        self.pace = ChunkPace(self.prefill.config.chunk_size, is_dynamic=self.prefill.config.is_dynamic)

    @property
    def has_work(self) -> bool:
        """Whether a batch can be formed: something waits, or can go on in chunks."""
        return bool(self.waiting.num_seqs) or self.prefill.peek() is not None

    @property
    def has_long(self) -> bool:
        """Whether the next batch may have chunks of long sequences."""
        return bool(self.waiting.num_long or self.prefill.requests)

    @property
    def has_much(self) -> bool:
        """Whether it is enough for a batch that only waits behind another: a part of a full one, or a next chunk.

        What is less goes together with whatever comes until the device is free, as one forward.
        """
        has_tokens = self.waiting.num_tokens >= self.pace.budget(self.token_budget) // _PART_OF_BATCH
        has_seqs = self.waiting.num_seqs >= self._max_num_seqs // _PART_OF_BATCH
        return has_tokens or has_seqs or self.prefill.peek() is not None

    def add(self, request: Request) -> None:
        """Takes a request into the book and queues its sequences. Raises ValueError where one can never run."""
        for num_tokens in [sequence.num_tokens for sequence in request.sequences]:
            if not 1 <= num_tokens <= self._max_seq_len:
                raise ValueError(f"a sequence has {num_tokens} tokens; it must have 1 to {self._max_seq_len}.")
        self.requests[request.request_id] = request
        request.num_left = len(request.sequences)
        request.lead_s = request.priority * self.prefill.config.ageing_s
        last: dict[bool, QueuedSequence] = {}  # of the short ones, and of the long ones
        turn_s = request.arrival_s + request.lead_s  # of the first of each; the others get theirs in line
        for sequence in request.sequences:
            num_tokens = sequence.num_tokens
            sequence.turn_s = turn_s
            sequence.order = next(self._orders)
            is_cut = self.prefill.should_chunk(num_tokens) or num_tokens > self.token_budget
            sequence.is_long = is_cut and self._pool.can_hold(num_tokens)  # what can never be held runs whole
            self.waiting.add(sequence, last.get(sequence.is_long))
            last[sequence.is_long] = sequence

    def cancel(self, request_id: int, *, forget: bool = False) -> Request | None:
        """Ends a request, whatever of it waits or runs, and returns it; None where it is not in the book.

        With `forget`, what it computed may be wrong: nobody may find it in the prefix cache.
        """
        request = self.requests.get(request_id)
        for sequence in [] if request is None else [s for s in request.sequences if s.status is not Status.ENDED]:
            self._leave(sequence, Status.ENDED, forget=forget)
        return request

    def schedule(self, now_s: float, free_tokens: int | None = None) -> Batch:
        """Takes the next batch; it is empty only if nothing waits, or all that waited has expired.

        Args:
            now_s: Seconds. Monotonic time, as in Request.arrival_s.
            free_tokens: Tokens of a forward that the device has memory for now; None where that is not known.
        """
        self.awaits_quiet = False
        self._token_s = self.pace.token_s or self._max_wait_s / self._full_budget
        batch, budget = Batch(ended=self._ended), PrefillBudget(self.pace.budget(self.token_budget), self._max_num_seqs)
        self._ended = []
        if free_tokens is not None and self.prefill.config.is_dynamic:
            budget.num_tokens = min(budget.num_tokens, max(free_tokens, self.prefill.config.min_chunk_size))
        if self._num_lanes > 1 and not self.has_long:  # answers leave while the others still run
            budget.num_tokens = min(budget.num_tokens, self.waiting.share(self._num_lanes))
        self._expire(self.prefill.requests.values(), now_s, batch)
        window = self._lift_short(now_s, batch)
        if self.has_long:
            self._add_chunks(window, batch, budget, now_s, free_tokens)
        self._add_whole(window, batch, budget, now_s)
        batch.chunks.sort(key=lambda chunk: (chunk.start > 0, chunk.end - chunk.start))
        batch.num_left = self.waiting.num_seqs
        return batch

    def go_on(self, batch: Batch) -> None:
        """Records that a batch was begun on a device that keeps the order: the next chunks may be scheduled now.

        They are due as if these were done. Nothing is committed before `finish`: what a chunk gives may not be finite.
        """
        for chunk in batch.chunks if batch.num_long else []:
            if chunk.sequence.is_long and chunk.sequence.chunk is chunk:  # else cancelled meanwhile
                self._go_on(chunk)

    def finish(self, batch: Batch) -> list[Request]:
        """Records that a batch ran, but for what was cancelled or is tried again; returns the requests that ended."""
        ended = []
        for chunk in batch.chunks:
            sequence = chunk.sequence
            if not sequence.is_under_way(chunk):
                continue  # cancelled, or to be tried again
            if sequence.is_long:
                if sequence.chunk is chunk:
                    self._go_on(chunk)
                self.prefill.complete_chunk(chunk.chunk_id)
            else:
                sequence.num_done = chunk.end
            sequence.num_pooled = max(sequence.num_pooled, chunk.end)
            if sequence.allocation is not None:
                self._pool.commit(sequence.allocation, chunk.end)
            if sequence.is_complete:
                self._leave(sequence, Status.ENDED)
                ended += [] if sequence.request.num_left else [sequence.request]
        self._num_good_steps = (self._num_good_steps + 1) % _GOOD_STEPS
        if not self._num_good_steps:
            self.token_budget = min(2 * self.token_budget, self._full_budget)
        return ended

    def retry(self, chunk: Chunk, error: Exception) -> bool:
        """Lets tokens for which memory was short run again in smaller chunks; False where that cannot help."""
        sequence = chunk.sequence
        if sequence.chunk is not chunk or chunk.num_tokens == 1 or not self._pool.can_hold(sequence.num_tokens):
            return False
        if sequence.is_long:
            return self.prefill.fail_chunk(chunk.chunk_id, error)
        self._wait_again(sequence)
        return True

    def shrink(self, token_budget: int) -> None:
        """Lowers the budget after the device ran out of memory, never below a sequence that has to run whole."""
        least = max(self._full_budget // LEAST_SHARE, 1) if not self._pool.is_empty else self._max_seq_len
        self.token_budget = min(self.token_budget, max(token_budget, least))
        self._num_good_steps = 0

    def _lift_short(self, now_s: float, batch: Batch) -> list[QueuedSequence]:
        """Returns the short sequences whose turn is near and whose deadline has not passed."""
        max_tokens, max_seqs = _WINDOW * self.token_budget, max(_WINDOW // 2 * self._max_num_seqs, 1)
        while window := self.waiting.window(max_tokens, max_seqs, now_s, self._token_s):
            self._expire(window, now_s, batch)
            if not batch.expired:
                return window
            if live := [sequence for sequence in window if sequence.status is Status.WAITING]:
                return live
        return []

    def _add_chunks(
        self, window: list[QueuedSequence], batch: Batch, budget: PrefillBudget, now_s: float, free_tokens: int | None
    ) -> None:
        """Starts long sequences whose turn it is and adds the chunks of this batch."""
        room = self._chunk_budget(window, budget.num_tokens)
        if room.num_tokens < 1 or room.num_seqs < 1:
            return
        self._waits_for_memory = False
        while lifted := self.waiting.window(1, 1, now_s, self._token_s, is_long=True):
            self._expire(lifted, now_s, batch)
            (sequence,) = lifted
            sequence.due_s = sequence.turn_for("")
            if sequence.status is Status.WAITING and not (
                self.prefill.is_due(sequence, room.num_tokens) and self._start(sequence, batch)
            ):
                break  # those behind it wait too, or it might never find enough memory
        self._front_s = min(self.waiting.first_long_s(), now_s)
        pool_pressure = _POOL_PRESSURE * self._pool.usage if self._waits_for_memory else 0.0
        device_pressure = 0.0 if free_tokens is None else 1 - min(free_tokens / self.prefill.config.chunk_size, 1.0)
        self.memory_pressure = max(device_pressure, pool_pressure, 1 - self.token_budget / self._full_budget)
        while room.num_tokens > 0 and room.num_seqs > 0:
            if (chunk := self.prefill.schedule_chunk(room.num_tokens, memory_pressure=self.memory_pressure)) is None:
                break
            batch.chunks.append(self.prefill.start_chunk(chunk.chunk_id))
            batch.num_long += 1
            room.add(chunk.num_tokens)
            budget.add(chunk.num_tokens)

    def _go_on(self, chunk: Chunk) -> None:
        """Lets the next chunk of a long sequence be cut; it is due later by the time that this one takes."""
        sequence = chunk.sequence
        self.prefill.go_on(chunk.chunk_id)
        client = sequence.request.client  # where clients are told apart, the prompts of each share its part
        num_own = sum(s.request.client == client for s in self.prefill.requests.values()) if client else 1
        sequence.due_s = max(sequence.due_s + chunk.num_tokens * self._token_s * num_own, self._front_s)

    def _chunk_budget(self, window: list[QueuedSequence], token_budget: int) -> PrefillBudget:
        """Returns the share of the next forward that chunks may have."""
        others_wait = bool(window) or self._last_num_whole > 0
        num_tokens = self.pace.room(token_budget, self.prefill.config, others_wait=others_wait)
        if not window or self._last_num_whole:
            return PrefillBudget(num_tokens, self._max_num_seqs)
        # Where chunks and the next whole sequence do not fit in one batch, they take turns.
        return PrefillBudget(min(num_tokens, token_budget - window[0].num_tokens), self._max_num_seqs - 1)

    def _start(self, sequence: QueuedSequence, batch: Batch) -> bool:
        """Gives a long sequence the memory for all of its length; False if there is not enough at the moment."""
        allocation = self._allocate(sequence)
        if allocation is None and self._preempt_for(sequence, batch):
            allocation = self._allocate(sequence)
        self._waits_for_memory = allocation is None
        if allocation is None:
            return False
        self.waiting.take(sequence)
        sequence.allocation = allocation
        self.prefill.add(sequence)
        # The states of SSM layers come along with the sequence, so that nothing is computed twice.
        num_done = allocation.num_cached_tokens if allocation.block_ids else sequence.num_pooled
        self.prefill.skip_cached(sequence.request_id, num_done)
        return True

    def _preempt_for(self, sequence: QueuedSequence, batch: Batch) -> bool:
        """Takes memory from long sequences whose turn is later; none while a chunk of theirs runs, then `awaits_quiet`.

        What such a chunk gives must count first. What was pooled counts; keys and values stay in the prefix cache till
        the blocks are needed, else run again.
        """
        victims = victims_of(sequence, self.prefill.requests.values(), self._pool)
        self.awaits_quiet = any(victim.begun for victim, _ in victims)
        if self.awaits_quiet:
            return False
        for victim, _ in victims:
            self.prefill.preempt(victim.request_id)
            self._wait_again(victim)
        batch.preempted += victims
        return bool(victims)

    def _add_whole(self, window: list[QueuedSequence], batch: Batch, budget: PrefillBudget, now_s: float) -> None:
        """Adds the whole sequences that run."""
        num_chunks = len(batch.chunks)
        for sequence in in_running_order(window, now_s - self._max_wait_s):
            if (chunk := self._whole_chunk(sequence, budget)) is None:
                break
            batch.chunks.append(chunk)
        self._last_num_whole = len(batch.chunks) - num_chunks

    def _whole_chunk(self, sequence: QueuedSequence, budget: PrefillBudget) -> Chunk | None:
        """Starts a short sequence, after what the prefix cache holds of it; None where there is no room."""
        num_tokens, num_cached, keys = sequence.num_tokens, 0, sequence.block_keys
        if sequence.request.needs_last_row and len(keys) >= _MIN_SHARED_BLOCKS and self._pool.can_hold(num_tokens):
            if budget.has_room(num_tokens - self._pool.find(keys, num_tokens - 1)):
                sequence.allocation = self._allocate(sequence)
            num_cached = 0 if sequence.allocation is None else sequence.allocation.num_cached_tokens
        if not budget.add(num_tokens - num_cached):
            return None
        self.waiting.take(sequence)
        sequence.status = Status.RUNNING
        sequence.chunk = PrefillChunk(sequence, num_cached, num_tokens)
        return sequence.chunk

    def _allocate(self, sequence: QueuedSequence) -> Allocation | None:
        readable = sequence.num_tokens - 1 if sequence.request.needs_last_row else sequence.num_pooled
        return self._pool.allocate(sequence.request_id, sequence.num_tokens, sequence.block_keys, readable)

    def _expire(self, sequences: Iterable[QueuedSequence], now_s: float, batch: Batch) -> None:
        """Ends the requests of sequences whose deadline has passed."""
        for request in [s.request for s in sequences if (at_s := s.request.deadline_s) is not None and at_s <= now_s]:
            if request.num_left:
                self.cancel(request.request_id)
                batch.expired.append(request)

    def _wait_again(self, sequence: QueuedSequence) -> None:
        """Lets a sequence that runs wait again, to run in chunks."""
        self._leave(sequence, Status.WAITING)
        sequence.is_long = True
        self.waiting.add(sequence)
        self.waiting.return_charge(sequence)

    def _leave(self, sequence: QueuedSequence, status: Status, *, forget: bool = False) -> None:
        """Ends a sequence, or sets one that runs back to wait; releases what it holds."""
        was_waiting, sequence.status = sequence.status is Status.WAITING, status  # the queue leaves out who has ended
        if was_waiting:
            self.waiting.remove(sequence)
        elif sequence.is_long:
            leave = self.prefill.cancel_request if status is Status.ENDED else self.prefill.remove_request
            leave(sequence.request_id)
        sequence.status, sequence.chunk = status, None
        if sequence.allocation is not None:
            self._pool.free(sequence.allocation, forget=forget)
            sequence.allocation = None
        if status is Status.ENDED:
            if sequence.is_long:
                self._ended.append(sequence)
            sequence.request.num_left -= 1
            if not sequence.request.num_left:
                del self.requests[sequence.request.request_id]
                sequence.request.sequences = []  # they know it, too: only the collector would find such a circle
