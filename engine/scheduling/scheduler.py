"""Chooses the sequences and chunks of the next forward. Plain Python without torch.

FairQueue orders the waiting sequences. Short sequences run whole. Sequences of similar length near the head of the
queue run together, because attention over equal lengths is one product. Long sequences run in chunks, which take a
share of each forward: short and long sequences get half each while both wait. A long sequence gets the memory for its
whole length when it starts, so that it can always end. It is preempted only for a sequence that arrived earlier.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..protocol.config import ChunkedPrefillConfig
from ..protocol.messages import SchedulerStats, SequencePoolStats
from .chunked_prefill import ChunkedPrefillManager, ChunkSizeController
from .fair_queue import FairQueue, group_by_length
from .sequence import Batch, ChunkState, ForwardBudget, InputSequence, PrefillChunk, Request
from .sequence_pool import Allocation, SequencePool

_FORWARD_S: Final = 1.0
"""Assumed seconds of a full forward before the first measurement."""
_LOOKAHEAD_BATCHES: Final = 4
"""Sequences of similar length are searched among the first sequences of the queue, up to this many batches."""
MAX_BUDGET_REDUCTION: Final = 32
"""Divisor. The lowest token budget is the full budget divided by this, if sequences can run in chunks."""
_STEPS_TO_RECOVER: Final = 32
"""Forwards after which a lowered budget is doubled again."""
_QUEUED_BATCH_DIVISOR: Final = 4
"""A batch is queued behind a running one if it is at least as large as a full batch divided by this."""
_MIN_SHARED_BLOCKS: Final = 2
"""A short sequence uses the prefix cache if it has at least this many full blocks."""
_POOL_PRESSURE: Final = 0.5
"""Memory pressure of a full pool while a sequence waits for memory: chunks are half as long."""


class Scheduler:
    """The table of requests, and the scheduling policy.

    Not thread-safe: its owner holds a lock. The next batch may be scheduled before the previous one is finished
    (`finish`). If the previous one has chunks of long sequences, call `allow_next_chunks` first, and wait while
    `needs_idle_device` is set; such batches are finished in order. Cancel failed chunks, or pass them to `retry`,
    before `finish`.
    Invariants: a batch exceeds `token_budget` only if it is one sequence that must run whole, and never the maximum
    number of sequences. Only `_release` frees the memory of a sequence, and `finish` that of a cancelled one
    that still ran.

    Args:
        max_num_seqs: Maximum number of sequences in a batch.
        max_wait_s: Seconds after which a waiting sequence runs before sequences that fit the batch better.
        token_budget: Maximum number of tokens in a batch; raised to `max_seq_len` if no sequence can run in chunks.
        max_seq_len: Maximum number of tokens in a sequence; `add` raises ValueError for longer ones.
        prefill_config: Sizes of chunks; None takes the defaults.
        sequence_pool: Memory of sequences that run in chunks; None: sequences run whole.
        max_forwards: Forwards that can run at the same time. With several, the queue is divided among them.
        min_batch_tokens: Minimum number of tokens in the share of a forward, because a smaller batch takes about as
            long.

    Attributes:
        requests: Every unfinished request by its id.
        waiting: Sequences that have not started.
        prefill: Manager of the long sequences that have started, and of their chunks.
        chunk_sizes: Sizes of forwards and of chunks.
        token_budget: Current limit of the tokens of a batch.
        memory_pressure: Share of a full chunk that did not fit into memory in the last batch, 0 to 1.
        needs_idle_device: Whether the next batch must wait until no batch runs, because it will preempt a
            sequence with a running chunk.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_wait_s: float,
        token_budget: int,
        max_seq_len: int,
        prefill_config: ChunkedPrefillConfig | None = None,
        sequence_pool: SequencePool | None = None,
        max_forwards: int = 1,
        min_batch_tokens: int = 1,
    ) -> None:
        self._sequence_pool = sequence_pool or SequencePool()
        self._max_num_seqs = max_num_seqs
        self._max_wait_s = max_wait_s
        self._max_seq_len = max_seq_len
        self._max_forwards = max_forwards
        self._min_batch_tokens = min_batch_tokens
        self._full_budget = max(token_budget, max_seq_len) if self._sequence_pool.is_empty else token_budget
        self._num_steps_without_oom = 0
        self._ended_sequences: list[InputSequence] = []  # long sequences that ended since the last batch
        self._last_num_short = 0  # short sequences in the last batch
        self._waits_for_memory = False  # whether the next long sequence waits for memory
        self._cancelled_allocations: dict[PrefillChunk, Allocation] = {}  # memory of cancelled sequences that still run
        self.requests: dict[int, Request] = {}
        self.waiting = FairQueue()
        self.prefill = ChunkedPrefillManager(prefill_config, order=self.waiting.sort_key)
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
        return bool(self.waiting.num_long or self.prefill.sequences)

    @property
    def has_large_batch(self) -> bool:
        """Whether to queue a batch behind a running one: there is a part of a full batch, or a next chunk.

        Otherwise the waiting sequences run together with sequences that arrive until the device is free.
        """
        has_tokens = (
            self.waiting.num_tokens >= self.chunk_sizes.max_forward_tokens(self.token_budget) // _QUEUED_BATCH_DIVISOR
        )
        has_seqs = self.waiting.num_seqs >= self._max_num_seqs // _QUEUED_BATCH_DIVISOR
        return has_tokens or has_seqs or self.prefill.peek() is not None

    def add(self, request: Request) -> None:
        """Adds a request and queues its sequences. Raises ValueError if one can never run."""
        for sequence in request.sequences:
            num_tokens = sequence.num_tokens
            if not 1 <= num_tokens <= self._max_seq_len:
                raise ValueError(f"a sequence has {num_tokens} tokens; it must have 1 to {self._max_seq_len}.")
            if num_tokens > self.token_budget or self.prefill.should_chunk(num_tokens):
                sequence.is_long = self._sequence_pool.can_hold(num_tokens)
        self.requests[request.request_id] = request
        request.num_unfinished = len(request.sequences)
        seconds_per_token = self.chunk_sizes.seconds_per_token or _FORWARD_S / self._full_budget
        self.waiting.add(request, self.prefill.config.ageing_s / seconds_per_token)

    def cancel(self, request_id: int, *, drop_cached_blocks: bool = False) -> Request | None:
        """Ends a request and returns it; None if it is unknown.

        With `drop_cached_blocks` its blocks are removed from the prefix cache, because they may be wrong.
        """
        request = self.requests.get(request_id)
        if request is None:
            return None
        for sequence in [s for s in request.sequences if not s.is_complete]:
            if sequence.chunk is not None and sequence.allocation is not None and not sequence.is_long:
                # Its forward may write the memory until it ends: `finish` frees it.
                self._cancelled_allocations[sequence.chunk] = sequence.allocation
                sequence.allocation = None
            self._end(sequence, drop_cached_blocks=drop_cached_blocks)
        return request

    def schedule(self, now_s: float, free_tokens: int | None = None) -> Batch:
        """Returns the next batch.

        It is empty if no sequence waits, if all have expired, or if all need memory of a running batch.

        Args:
            now_s: Monotonic time in seconds, as in Request.arrival_s.
            free_tokens: Tokens of the largest forward that fits into the free memory; None if unknown.
        """
        self.needs_idle_device = False
        config = self.prefill.config
        batch = Batch(ended_sequences=self._ended_sequences)
        self._ended_sequences = []
        budget = ForwardBudget(self.chunk_sizes.max_forward_tokens(self.token_budget), self._max_num_seqs)
        if free_tokens is not None and config.is_dynamic:
            budget.num_tokens = min(budget.num_tokens, max(free_tokens, config.min_chunk_size))
        if self._max_forwards > 1 and not self.has_long:
            share = max(self.waiting.tokens_per_forward(self._max_forwards), self._min_batch_tokens)
            budget.num_tokens = min(budget.num_tokens, share)
        self._expire(self.prefill.sequences.values(), now_s, batch)
        candidates = self._short_candidates(now_s, batch)
        if self.has_long:
            self._add_chunks(candidates, batch, budget, now_s, free_tokens)
        else:
            self._waits_for_memory = False
        self._add_short(candidates, batch, budget)
        batch.chunks.sort(key=lambda chunk: (chunk.start > 0, chunk.end - chunk.start))
        batch.num_deferred = self.waiting.num_seqs
        return batch

    def allow_next_chunks(self, batch: Batch) -> None:
        """Allows the next chunks of a started batch, on a device that runs forwards in order.

        Blocks are added to the prefix cache in `finish`, because the values of a chunk may be NaN or inf.
        """
        for chunk in batch.chunks if batch.num_long_chunks else []:
            if chunk.sequence.is_long and chunk.sequence.chunk is chunk:  # False if it was cancelled
                self.prefill.allow_next_chunk(chunk)

    def finish(self, batch: Batch) -> list[Request]:
        """Records that a batch ran, except for cancelled and retried chunks. Returns the finished requests."""
        finished = []
        has_run = False
        for chunk in batch.chunks:
            sequence = chunk.sequence
            if chunk in self._cancelled_allocations:
                self._sequence_pool.free(self._cancelled_allocations.pop(chunk))
            if not sequence.is_in_flight(chunk):
                continue
            has_run = True
            if sequence.is_long:
                self.prefill.complete(chunk)
            else:
                chunk.state = ChunkState.COMPLETED
                sequence.num_computed_tokens = chunk.end
            sequence.num_pooled_tokens = max(sequence.num_pooled_tokens, chunk.end)
            if sequence.allocation is not None:
                self._sequence_pool.commit(sequence.allocation, chunk.end)
            if sequence.is_complete:
                self._end(sequence)
                if not sequence.request.num_unfinished:
                    finished.append(sequence.request)
        if has_run:
            self._num_steps_without_oom = (self._num_steps_without_oom + 1) % _STEPS_TO_RECOVER
            if not self._num_steps_without_oom:
                self.token_budget = min(2 * self.token_budget, self._full_budget)
        return finished

    def retry(self, chunk: PrefillChunk, error: Exception) -> bool:
        """Runs a chunk that ran out of memory again in smaller chunks. Returns False if that is not possible."""
        sequence = chunk.sequence
        if (
            sequence.chunk is not chunk
            or chunk.num_tokens == 1
            or not self._sequence_pool.can_hold(sequence.num_tokens)
        ):
            return False
        if sequence.is_long:
            return self.prefill.fail(chunk, error)
        self._requeue(sequence)
        return True

    def lower_budget(self, token_budget: int) -> None:
        """Lowers the budget after the device ran out of memory, never below a sequence that must run whole."""
        min_tokens = max(self._full_budget // MAX_BUDGET_REDUCTION, 1)
        if self._sequence_pool.is_empty:
            min_tokens = self._max_seq_len
        self.token_budget = min(self.token_budget, max(token_budget, min_tokens))
        self._num_steps_without_oom = 0

    def stats(self, num_seqs: int, num_deferred: int, num_images: int = 0) -> SchedulerStats:
        """Returns the metrics of a step and of the waiting sequences.

        Args:
            num_seqs: Sequences that ran.
            num_deferred: Waiting sequences that did not fit into the batch.
            num_images: Images of the sequences that ran.
        """
        waiting = self.waiting
        budget = self.chunk_sizes.max_forward_tokens(self.token_budget)
        return SchedulerStats(num_seqs, budget, waiting.num_seqs, waiting.num_tokens, num_deferred, num_images)

    def sequence_pool_stats(self, batch: Batch) -> SequencePoolStats | None:
        """Returns the metrics of the sequence memory and of the chunks of a batch; None if nothing runs in chunks."""
        pool = self._sequence_pool
        if pool.is_empty:
            return None
        return SequencePoolStats(
            usage=pool.usage,
            memory_pressure=self.memory_pressure,
            chunk_tokens=max((chunk.num_tokens for chunk in batch.chunks if chunk.sequence.is_long), default=0),
            prefix_queried_tokens_total=pool.prefix_query_tokens,
            prefix_hit_tokens_total=pool.prefix_hit_tokens,
            num_evicted_blocks_total=pool.num_evicted_blocks,
            chunks=self.prefill.statistics(),
        )

    def _short_candidates(self, now_s: float, batch: Batch) -> list[InputSequence]:
        """Expires and then returns the next short sequences, best first.

        Groups sequences of similar length within several batches, unless each of the first batch has waited too long.
        """
        candidates = self._live_candidates(1, now_s, batch)
        if any(now_s - sequence.request.arrival_s <= self._max_wait_s for sequence in candidates):
            candidates = self._live_candidates(_LOOKAHEAD_BATCHES, now_s, batch)
            candidates = group_by_length(candidates, now_s, self._max_wait_s)
        return candidates

    def _live_candidates(self, num_batches: int, now_s: float, batch: Batch) -> list[InputSequence]:
        """Returns the short sequences of the next batches that have not expired."""
        max_tokens = num_batches * self.token_budget
        max_seqs = num_batches * self._max_num_seqs
        while candidates := self.waiting.next_sequences(max_tokens, max_seqs):
            self._expire(candidates, now_s, batch)
            if not batch.expired_requests:
                return candidates
            live = [sequence for sequence in candidates if sequence.is_queued]
            if live:
                return live
        return []

    def _add_chunks(
        self,
        candidates: list[InputSequence],
        batch: Batch,
        budget: ForwardBudget,
        now_s: float,
        free_tokens: int | None,
    ) -> None:
        """Starts long sequences and adds the chunks of this batch."""
        chunk_budget = self._chunk_budget(candidates, budget.num_tokens)
        if chunk_budget.num_tokens < 1 or chunk_budget.num_seqs < 1:
            return
        self._waits_for_memory = False
        while heads := self.waiting.next_sequences(1, 1, is_long=True):
            self._expire(heads, now_s, batch)
            (sequence,) = heads
            if not sequence.is_queued:
                continue  # it has expired
            has_started = self._should_start(sequence, chunk_budget.num_tokens) and self._start_long(sequence, batch)
            if not has_started:
                break  # later sequences must not take the memory that this one needs
        pool_pressure = _POOL_PRESSURE * self._sequence_pool.usage if self._waits_for_memory else 0.0
        device_pressure = 0.0 if free_tokens is None else 1 - min(free_tokens / self.prefill.config.chunk_size, 1.0)
        self.memory_pressure = max(device_pressure, pool_pressure, 1 - self.token_budget / self._full_budget)
        while chunk_budget.num_tokens > 0 and chunk_budget.num_seqs > 0:
            max_tokens = chunk_budget.num_tokens
            chunk = self.prefill.schedule_chunk(max_tokens, memory_pressure=self.memory_pressure)
            if chunk is None:
                break
            self.prefill.start(chunk)
            self._charge(chunk)
            batch.chunks.append(chunk)
            batch.num_long_chunks += 1
            chunk_budget.add(chunk.num_tokens)
            budget.add(chunk.num_tokens)

    def _chunk_budget(self, candidates: list[InputSequence], token_budget: int) -> ForwardBudget:
        """Returns the tokens and sequences that chunks may take in the next forward.

        Waiting short sequences take their tokens from chunks, up to half of the forward. A short sequence that does not
        fit beside the smallest chunk alternates with chunks: it runs first if the last batch had no short sequence.
        """
        config = self.prefill.config
        short_tokens = min(sum([sequence.num_tokens for sequence in candidates]), token_budget // 2)
        short_seqs = min(len(candidates), self._max_num_seqs // 2)
        if candidates and not self._last_num_short:
            short_tokens = max(short_tokens, candidates[0].num_tokens)
            short_seqs = max(short_seqs, 1)
        else:
            short_tokens = min(short_tokens, token_budget - config.min_chunk_size)
        others_wait = bool(candidates) or self._last_num_short > 0
        chunk_tokens = self.chunk_sizes.max_chunk_tokens(token_budget, config, others_wait=others_wait)
        return ForwardBudget(min(chunk_tokens, token_budget - short_tokens), self._max_num_seqs - short_seqs)

    def _should_start(self, sequence: InputSequence, max_tokens: int) -> bool:
        """Returns True if running sequences do not use all tokens, or this one sorts before all of them."""
        running = self.prefill.sequences.values()
        chunk_size = self.prefill.config.chunk_size
        if sum(min(other.num_tokens - other.num_scheduled_tokens, chunk_size) for other in running) < max_tokens:
            return True
        key = self.waiting.sort_key(sequence)
        return all(key < self.waiting.sort_key(other) for other in running)

    def _start_long(self, sequence: InputSequence, batch: Batch) -> bool:
        """Allocates the memory for a long sequence and starts it. Returns False if there is too little memory."""
        allocation = self._allocate(sequence)
        if allocation is None and self._preempt_for(sequence, batch):
            allocation = self._allocate(sequence)
        self._waits_for_memory = allocation is None
        if allocation is None:
            return False
        self.waiting.remove(sequence)
        sequence.allocation = allocation
        self.prefill.add(sequence)
        # A preempted sequence keeps its SSM states, so it continues after the pooled tokens.
        num_computed = allocation.num_cached_tokens if allocation.block_ids else sequence.num_pooled_tokens
        self.prefill.skip_cached(sequence.sequence_id, num_computed)
        return True

    def _preempt_for(self, sequence: InputSequence, batch: Batch) -> bool:
        """Preempts running long sequences for a waiting one. Returns whether a sequence was preempted.

        Sets `needs_idle_device` and preempts none if one of them has `earlier_chunks`: chunks in an unfinished batch,
        after `allow_next_chunks`. Pooled rows stay pooled. Keys and values stay in the prefix cache until the blocks
        are needed.
        """
        victims = self._victims(sequence)
        self.needs_idle_device = any(victim.earlier_chunks for victim, _ in victims)
        if self.needs_idle_device:
            return False
        for victim, _ in victims:
            self.prefill.preempt(victim.sequence_id)
            self._requeue(victim)
        batch.preempted_sequences += victims
        return bool(victims)

    def _victims(self, sequence: InputSequence) -> list[tuple[InputSequence, Allocation]]:
        """Returns the running sequences to preempt, latest arrival first. Empty if their memory is not enough.

        All victims arrived later, where a priority level counts as `ageing_s`. This excludes cycles of preemption.
        Further conditions:

        - Same client: of two requests with equal priorities, the victim is not the smaller one (its size class).
        - Other client: the victim also arrived later without regard to priority.
        """
        starting = sequence.request
        arrival = self._arrival(sequence)
        later = sorted((s for s in self.prefill.sequences.values() if self._arrival(s) > arrival), key=self._arrival)
        victims: list[tuple[InputSequence, Allocation]] = []
        num_tokens = sequence.num_tokens
        while not self._sequence_pool.can_allocate(num_tokens, after=[allocation for _, allocation in victims]):
            if not later:
                return []
            victim = later.pop()
            request = victim.request
            if request.client == starting.client:
                is_first = request.preemption_order < starting.preemption_order
            else:
                is_first = request.arrival_s <= starting.arrival_s
            if is_first:
                continue
            assert victim.allocation is not None, "a running long sequence has memory"
            victims.append((victim, victim.allocation))
        return victims

    def _arrival(self, sequence: InputSequence) -> tuple[float, int, int]:
        request = sequence.request
        arrival_s = request.arrival_s + request.priority * self.prefill.config.ageing_s
        return arrival_s, request.arrival_number, sequence.index

    def _add_short(self, candidates: list[InputSequence], batch: Batch, budget: ForwardBudget) -> None:
        num_chunks = len(batch.chunks)
        for sequence in candidates:
            chunk = self._start_short(sequence, budget)
            if chunk is None:
                break
            self._charge(chunk)
            batch.chunks.append(chunk)
        self._last_num_short = len(batch.chunks) - num_chunks

    def _start_short(self, sequence: InputSequence, budget: ForwardBudget) -> PrefillChunk | None:
        """Starts a short sequence after its cached prefix and returns its chunk; None if it does not fit.

        Reads no prefix while a long sequence waits for memory held by short sequences.
        """
        num_tokens = sequence.num_tokens
        num_cached = 0
        keys = sequence.block_keys
        is_reserved = self._waits_for_memory and not self.prefill.sequences
        may_allocate = self._sequence_pool.can_hold(num_tokens) and not is_reserved
        if sequence.request.needs_last_row and len(keys) >= _MIN_SHARED_BLOCKS and may_allocate:
            if budget.fits(num_tokens - self._sequence_pool.find(keys, num_tokens - 1)):
                sequence.allocation = self._allocate(sequence)
            num_cached = 0 if sequence.allocation is None else sequence.allocation.num_cached_tokens
        if not budget.add(num_tokens - num_cached):
            return None
        self.waiting.remove(sequence)
        sequence.chunk = PrefillChunk(sequence, num_cached, num_tokens, ChunkState.RUNNING)
        return sequence.chunk

    def _charge(self, chunk: PrefillChunk) -> None:
        """Charges the client for the tokens of a chunk, but only once for tokens that run again after a preemption."""
        self.waiting.charge(chunk.sequence, max(chunk.end - max(chunk.start, chunk.sequence.num_pooled_tokens), 0))

    def _allocate(self, sequence: InputSequence) -> Allocation | None:
        readable = sequence.num_tokens - 1 if sequence.request.needs_last_row else sequence.num_pooled_tokens
        return self._sequence_pool.allocate(sequence.sequence_id, sequence.num_tokens, sequence.block_keys, readable)

    def _expire(self, sequences: Iterable[InputSequence], now_s: float, batch: Batch) -> None:
        requests = [sequence.request for sequence in sequences]
        for request in [r for r in requests if r.deadline_s is not None and r.deadline_s <= now_s]:
            if request.num_unfinished:
                self.cancel(request.request_id)
                batch.expired_requests.append(request)

    def _requeue(self, sequence: InputSequence) -> None:
        """Moves a running sequence back to the queue, to run in chunks."""
        self._release(sequence)
        sequence.is_long = True
        self.waiting.requeue(sequence)

    def _end(self, sequence: InputSequence, *, drop_cached_blocks: bool = False) -> None:
        """Ends a sequence, and its request if this is the last one."""
        self._release(sequence, drop_cached_blocks=drop_cached_blocks)
        if sequence.is_long:
            self._ended_sequences.append(sequence)
        request = sequence.request
        request.num_unfinished -= 1
        if not request.num_unfinished:
            del self.requests[request.request_id]
            request.sequences = []  # breaks a reference cycle

    def _release(self, sequence: InputSequence, *, drop_cached_blocks: bool = False) -> None:
        """Removes a sequence from the queue, or from the running ones, and frees its memory."""
        if sequence.is_queued:
            self.waiting.remove(sequence)
        elif sequence.is_long:
            self.prefill.remove(sequence.sequence_id)
        sequence.chunk = None
        if sequence.allocation is not None:
            self._sequence_pool.free(sequence.allocation, drop_cached_blocks=drop_cached_blocks)
            sequence.allocation = None
