"""Decides what runs in the next forward. Plain Python without torch.

Whole sequences go in the order of their turn (waiting_queue.py); among those whose turn is near, those of similar
length go together (attention over equal lengths is one product), unless one has waited for too long. Long sequences
of models that can be sliced run in chunks beside them (slicer.py): chunks take a share of each forward, whole sequences
the rest, so that neither waits for the other to end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .config import SchedulerConfig
from .request import Sequence, SequenceSlice
from .slicer import Slicer
from .waiting_queue import Entry, WaitingQueue

_WINDOW = 4
"""Steps. How far ahead sequences of similar length are looked for."""


@dataclass(slots=True)
class ScheduledBatch:
    """What runs next.

    Attributes:
        slices: Those that begin a sequence, in ascending order of length; then those that go on with one.
        num_tokens: Tokens. Their sum.
        expired: Sequences whose deadline has passed; they will not run any further.
        preempted: Sequences that gave up their memory for one of higher priority, with what they held; they wait again.
    """

    slices: list[SequenceSlice] = field(default_factory=list)
    num_tokens: int = 0
    expired: list[Sequence] = field(default_factory=list)
    preempted: list[SequenceSlice] = field(default_factory=list)


class Scheduler:
    """The waiting queue, the running long sequences, and the policy over them. Not thread-safe: its owner holds a lock.

    A batch that `schedule` returns must be booked with `finish` before the next one; what failed of it is cancelled or
    given to `retry` before that.
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
        self._queue = WaitingQueue(pace_s=config.max_wait_s, pace_tokens=self.token_budget)
        self._num_whole = 0  # whole sequences in the last batch

    @property
    def num_waiting(self) -> int:
        """Sequences that have not started."""
        return self._queue.num_seqs

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the sequences that have not started."""
        return self._queue.num_tokens

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would return something."""
        return bool(self._queue.num_seqs or (self.slicer is not None and self.slicer.num_running))

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queues the sequences of one request, all with the same `request_id`.

        Raises:
            ValueError: A sequence is longer than `max_seq_len`, or than what can ever run, or has no tokens. Nothing is
                queued.
        """
        sequences = list(sequences)
        for sequence in sequences:
            if not 1 <= sequence.num_tokens <= self.max_seq_len:
                raise ValueError(f"a sequence has {sequence.num_tokens} tokens; it must have 1 to {self.max_seq_len}.")
        self._queue.add(sequences)

    def cancel(self, request_id: int) -> int:
        """Ends what waits or runs of a request and returns the number of sequences that had not started."""
        if self.slicer is not None:
            self.slicer.cancel(request_id)
        return self._queue.cancel(request_id)

    def schedule(self, now_s: float) -> ScheduledBatch:
        """Takes the next batch; it is empty only if nothing waits, or all that waited has expired.

        Args:
            now_s: Seconds. Monotonic time, as in Sequence.arrival_s.
        """
        batch = ScheduledBatch()
        window, batch.expired = self._queue.window(now_s, _WINDOW * self.token_budget, _WINDOW * self.max_num_seqs)
        if self.slicer is not None:
            batch.expired += self.slicer.expired(now_s)
            window = self._schedule_chunks(self.slicer, window, batch)
        self._schedule_whole(window, batch, now_s)
        batch.slices.sort(key=lambda s: (s.start > 0, s.num_tokens))
        batch.num_tokens = sum(s.num_tokens for s in batch.slices)
        return batch

    def finish(self, batch: ScheduledBatch, step_s: float) -> None:
        """Books a batch that ran, in `step_s` Seconds. What failed of it must have been cancelled or retried before."""
        if self.slicer is None:
            return
        for slice_ in batch.slices:
            self.slicer.finish(slice_)
        chunk_tokens = sum(s.num_tokens for s in batch.slices if s.chunk_id is not None)
        self.slicer.record(chunk_tokens, batch.num_tokens - chunk_tokens, step_s)

    def retry(self, slice_: SequenceSlice, error: Exception) -> bool:
        """Lets a slice for which memory was short run again in smaller chunks; False where that cannot help."""
        return self.slicer is not None and self.slicer.retry(slice_, error)

    def shrink(self, token_budget: int) -> None:
        """Lowers the budget after the device ran out of memory, never below a sequence that cannot be sliced."""
        if self.slicer is None:
            token_budget = max(token_budget, self.max_seq_len)
        else:
            self.slicer.shrink(token_budget)
        self.token_budget = max(min(self.token_budget, token_budget), 1)

    def _schedule_chunks(self, slicer: Slicer, window: list[Entry], batch: ScheduledBatch) -> list[Entry]:
        """Starts long sequences whose turn it is and adds the chunks of this batch; returns the other entries."""
        is_long = [slicer.is_long(entry.sequence) for entry in window]
        long = [entry for entry, answer in zip(window, is_long, strict=True) if answer]
        short = [entry for entry, answer in zip(window, is_long, strict=True) if not answer]
        allowance = min(slicer.allowance(others_wait=bool(short) or self._num_whole > 0), self.token_budget)
        if short and not self._num_whole:
            # Where the next whole sequence leaves no room for chunks, the two take turns.
            allowance = min(allowance, max(self.token_budget - short[0].sequence.num_tokens, 0))
        while long and slicer.wants(long[0].sequence, allowance):
            if not slicer.start(long[0].sequence):
                preempted = slicer.preempt_for(long[0].sequence)
                if not preempted:
                    break  # those behind it wait too, or it might never find enough memory
                batch.preempted += preempted
                for slice_ in preempted:
                    self._queue.add([slice_.sequence])
                continue
            self._queue.take(long.pop(0))
        self._queue.put_back(long)
        batch.slices += slicer.next_chunks(min(allowance, self.max_num_seqs))
        return short

    def _schedule_whole(self, window: list[Entry], batch: ScheduledBatch, now_s: float) -> None:
        """Adds the whole sequences that run and puts the others back."""
        chunk_tokens = sum(s.num_tokens for s in batch.slices)
        num_chunks = len(batch.slices)
        left = self.token_budget - chunk_tokens
        taken: set[int] = set()
        for entry in self._in_order(window, now_s):
            if len(batch.slices) >= self.max_num_seqs:
                break
            slice_ = self._slice_whole(entry.sequence)
            if slice_.num_tokens > left and batch.slices:
                if self.slicer is not None:
                    self.slicer.put_back(slice_)
                break
            batch.slices.append(slice_)
            left -= slice_.num_tokens
            taken.add(entry.tie)
            self._queue.take(entry)
        self._queue.put_back(entry for entry in window if entry.tie not in taken)
        self._num_whole = len(batch.slices) - num_chunks

    def _slice_whole(self, sequence: Sequence) -> SequenceSlice:
        return SequenceSlice(sequence, 0, sequence.num_tokens) if self.slicer is None else self.slicer.whole(sequence)

    def _in_order(self, window: list[Entry], now_s: float) -> list[Entry]:
        """Returns whole sequences in the order in which they run: the first, the overdue, the first's neighbours."""
        if not window:
            return []
        first = window[0]
        overdue = [e for e in window[1:] if now_s - e.turn_s > self.max_wait_s]
        rest = [e for e in window[1:] if now_s - e.turn_s <= self.max_wait_s]
        rest.sort(key=lambda e: (abs(e.sequence.num_tokens - first.sequence.num_tokens), e.tie))
        return [first, *overdue, *rest]
