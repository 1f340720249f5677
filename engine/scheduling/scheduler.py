"""Decides what runs in the next forward. Plain Python without torch.

The order is start-time fair: a sequence's turn comes at its arrival time plus the time that the tokens ahead of it in
its own request would take, so that one large request and many small ones share the device. A level of priority is worth
a fixed time of waiting. Nobody starves, because turns are finite and later arrivals have later turns. Where clients are
told apart, all this holds within each of them, and those that wait get the same number of tokens (fair_queue.py).
Source of the idea: Goyal, Vin, Cheng, "Start-time Fair Queueing", 1997.

Among whole sequences whose turn is near, those of similar length go together (attention over equal lengths is one
product), unless one has waited for too long. Long sequences of models that can be sliced have a queue of their own and
run in chunks beside the others (slicer.py): chunks take a share of each forward, whole sequences the rest, so that
neither waits for the other to end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from ..protocol.config import SchedulerConfig
from .fair_queue import ClientShares, FairQueue
from .sequence import Sequence, SequenceSlice
from .slicer import Slicer
from .waiting_queue import Entry

_WINDOW: Final = 4
"""Steps. How far ahead sequences of similar length are looked for, in tokens; half as far in sequences."""
_PRIORITY_STEP_S: Final = 1.0
"""Seconds. The head start that one level of priority gives."""
_LEAST_SHARE: Final = 32
"""The budget is never lowered to less than its original size over this, where sequences can be sliced."""
_GOOD_STEPS: Final = 32
"""Forwards after which a budget that was lowered is doubled again."""


@dataclass(slots=True)
class ScheduledBatch:
    """What runs next.

    Attributes:
        slices: Those that begin a sequence, in ascending order of length; then those that go on with one.
        expired: Sequences whose deadline has passed; their requests have been cancelled.
        preempted: What sequences held that gave it up for one whose turn is earlier; they wait again.
        num_left: Sequences that found no place in it, and wait.
    """

    slices: list[SequenceSlice] = field(default_factory=list)
    expired: list[Sequence] = field(default_factory=list)
    preempted: list[SequenceSlice] = field(default_factory=list)
    num_left: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens. Their sum."""
        return sum(s.num_tokens for s in self.slices)


class Scheduler:
    """The waiting queues, the running long sequences, and the policy over them.

    Not thread-safe: its owner holds a lock. A batch that `schedule` returns must be booked with `finish` before the
    next one; what failed of it is cancelled or given to `retry` before that.
    Invariants: a batch never exceeds `token_budget` (but for one sequence that cannot be sliced) or `max_num_seqs`, and
    is empty only if nothing can run.

    Args:
        config: Limits of the number of sequences and of their wait.
        token_budget: Tokens in one batch. Without a slicer raised to `max_seq_len` where it is less.
        max_seq_len: Tokens of the longest sequence that will come.
        slicer: For models whose sequences can be sliced.
    """

    def __init__(
        self, config: SchedulerConfig, *, token_budget: int, max_seq_len: int, slicer: Slicer | None = None
    ) -> None:
        self.max_seq_len = max_seq_len
        self.token_budget = token_budget if slicer is not None else max(token_budget, max_seq_len)
        self.max_num_seqs = config.max_num_seqs
        self.max_wait_s = config.max_wait_s
        self.slicer = slicer
        self._full_budget = self.token_budget
        self._good_steps = 0
        shares = ClientShares()
        self._whole = FairQueue(shares)
        self._long = FairQueue(shares)
        self._last_num_whole = 0  # whole sequences in the last batch

    @property
    def num_waiting(self) -> int:
        """Sequences that have not started."""
        return self._whole.num_seqs + self._long.num_seqs

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the sequences that have not started."""
        return self._whole.num_tokens + self._long.num_tokens

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would return something."""
        return bool(self.num_waiting or (self.slicer is not None and self.slicer.num_running))

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queues the sequences of one request, all with the same `request_id`.

        Raises:
            ValueError: A sequence is longer than `max_seq_len` or has no tokens. Nothing is queued.
        """
        sequences = list(sequences)
        for sequence in sequences:
            if not 1 <= sequence.num_tokens <= self.max_seq_len:
                raise ValueError(f"a sequence has {sequence.num_tokens} tokens; it must have 1 to {self.max_seq_len}.")
        tokens_ahead = 0
        for sequence in sequences:
            delay_s = self.max_wait_s * tokens_ahead / self._full_budget
            sequence.turn_s = sequence.arrival_s + delay_s + sequence.priority * _PRIORITY_STEP_S
            is_long = self.slicer is not None and self.slicer.is_long(sequence, self.token_budget)
            (self._long if is_long else self._whole).add(sequence)
            tokens_ahead += sequence.num_tokens

    def cancel(self, request_id: int, *, forget: bool = False) -> int:
        """Ends what waits or runs of a request and returns the number of sequences that had not started.

        Args:
            request_id: The request.
            forget: What it computed may be wrong: nobody may find it in the prefix cache.
        """
        if self.slicer is not None:
            self.slicer.cancel(request_id, forget=forget)
        return self._whole.cancel(request_id) + self._long.cancel(request_id)

    def schedule(self, now_s: float) -> ScheduledBatch:
        """Takes the next batch; it is empty only if nothing waits, or all that waited has expired.

        Args:
            now_s: Seconds. Monotonic time, as in Sequence.arrival_s.
        """
        batch = ScheduledBatch()
        window, batch.expired = self._whole.window(
            now_s, _WINDOW * self.token_budget, max(_WINDOW // 2 * self.max_num_seqs, 1)
        )
        if self.slicer is not None:
            batch.expired += self.slicer.expired(now_s)
        for sequence in batch.expired:
            self.cancel(sequence.request_id)
        if self.slicer is not None:
            self._schedule_chunks(self.slicer, window, batch, now_s)
        self._schedule_whole(window, batch, now_s)
        batch.slices.sort(key=lambda s: (s.start > 0, s.num_tokens))
        batch.num_left = self.num_waiting
        return batch

    def finish(self, batch: ScheduledBatch) -> None:
        """Books a batch that ran."""
        if self.slicer is not None:
            for slice_ in batch.slices:
                self.slicer.finish(slice_)
        if self.token_budget < self._full_budget:
            self._good_steps += 1
            if self._good_steps >= _GOOD_STEPS:
                self.token_budget = min(2 * self.token_budget, self._full_budget)
                self._good_steps = 0

    def record(self, chunk_tokens: int, whole_tokens: int, step_s: float) -> None:
        """Books the time of a forward that has ended; see ChunkPace."""
        if self.slicer is not None:
            self.slicer.pace.record(chunk_tokens, whole_tokens, step_s)

    def retry(self, slice_: SequenceSlice, error: Exception) -> bool:
        """Lets a slice for which memory was short run again in smaller ones; False where that cannot help."""
        if self.slicer is None or slice_.num_tokens == 1:
            return False
        if slice_.chunk_id is not None:
            return self.slicer.retry(slice_, error)
        if not self.slicer.can_hold(slice_.sequence):
            return False
        self.slicer.put_back(slice_)
        self._long.add(slice_.sequence)
        return True

    def shrink(self, token_budget: int) -> None:
        """Lowers the budget after the device ran out of memory, never below a sequence that cannot be sliced."""
        least = max(self._full_budget // _LEAST_SHARE, 1) if self.slicer is not None else self.max_seq_len
        self.token_budget = min(self.token_budget, max(token_budget, least))
        self._good_steps = 0

    def _schedule_chunks(self, slicer: Slicer, window: list[Entry], batch: ScheduledBatch, now_s: float) -> None:
        """Starts long sequences whose turn it is and adds the chunks of this batch."""
        max_chunks = self.max_num_seqs
        max_tokens = slicer.allowance(self.token_budget, others_wait=bool(window) or self._last_num_whole > 0)
        if window and not self._last_num_whole:
            # Where chunks and the next whole sequence do not fit in one batch, they take turns.
            max_chunks -= 1
            max_tokens = min(max_tokens, self.token_budget - window[0].sequence.num_tokens)
        if max_chunks < 1 or max_tokens < 1:
            return
        while True:
            entries, expired = self._long.window(now_s, 1, 1)
            for sequence in expired:
                self.cancel(sequence.request_id)
            batch.expired += expired
            if not entries:
                break
            (entry,) = entries
            if not slicer.wants(entry.sequence, max_tokens):
                self._long.put_back(entries)
                break
            has_started = slicer.start(entry.sequence)
            if not has_started:
                preempted = slicer.preempt_for(entry.sequence)
                has_started = bool(preempted) and slicer.start(entry.sequence)
                batch.preempted += preempted
                for slice_ in preempted:
                    self._long.add(slice_.sequence)
            if not has_started:
                self._long.put_back(entries)
                break  # those behind it wait too, or it might never find enough memory
            self._long.take(entry)
        batch.slices += slicer.next_chunks(
            max_tokens, max_chunks, memory_pressure=1 - self.token_budget / self._full_budget
        )

    def _schedule_whole(self, window: list[Entry], batch: ScheduledBatch, now_s: float) -> None:
        """Adds the whole sequences that run and puts the others back."""
        left = self.token_budget - batch.num_tokens
        num_chunks = len(batch.slices)
        expired = {sequence.request_id for sequence in batch.expired}
        taken: set[int] = set()
        for entry in self._in_order(window, now_s):
            if entry.sequence.request_id in expired:
                continue  # cancelled by now: put back, it is dropped when it is next lifted
            if len(batch.slices) >= self.max_num_seqs:
                break
            slice_ = self._slice_whole(entry.sequence, left if batch.slices else None)
            if slice_ is None:
                break
            batch.slices.append(slice_)
            left -= slice_.num_tokens
            taken.add(entry.tie)
            self._whole.take(entry)
        self._whole.put_back(entry for entry in window if entry.tie not in taken)
        self._last_num_whole = len(batch.slices) - num_chunks

    def _slice_whole(self, sequence: Sequence, max_tokens: int | None) -> SequenceSlice | None:
        """Returns the one slice of a sequence; None where it is longer than `max_tokens`."""
        if self.slicer is not None:
            return self.slicer.whole(sequence, max_tokens)
        if max_tokens is not None and sequence.num_tokens > max_tokens:
            return None
        return SequenceSlice(sequence, 0, sequence.num_tokens)

    def _in_order(self, window: list[Entry], now_s: float) -> list[Entry]:
        """Returns whole sequences in the order in which they run: up to the last overdue, then the first's neighbours.

        Those before an overdue one go before it: of another client, it may be overdue and yet have its share.
        """
        if not window:
            return []
        first = window[0]
        end = max((place for place, e in enumerate(window) if now_s - e.turn_s > self.max_wait_s), default=0) + 1
        rest = sorted(window[end:], key=lambda e: (abs(e.sequence.num_tokens - first.sequence.num_tokens), e.tie))
        return [*window[:end], *rest]
