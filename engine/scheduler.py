"""Decides which waiting sequences run in the next forward.

Plain Python without torch. The order is start-time fair: a sequence's turn comes at its arrival time plus the time that
the tokens ahead of it in its own request would take, so that one large request and many small ones share the device. A
level of priority is worth a fixed time of waiting. Nobody starves, because turns are finite and later arrivals have
later turns. Among sequences whose turn is near, those of similar length go together (attention over equal lengths is
one product), unless one has waited for too long.
Source of the idea: Goyal, Vin, Cheng, "Start-time Fair Queueing", 1997.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from .config import SchedulerConfig
from .request import Sequence

_WINDOW = 4
"""Steps. How far ahead sequences of similar length are looked for."""
_PRIORITY_STEP_S = 1.0
"""Seconds. The head start that one level of priority gives."""


@dataclass(slots=True)
class ScheduledBatch:
    """What runs next.

    Attributes:
        sequences: In ascending order of length.
        num_tokens: Tokens. Their sum.
        expired: Sequences whose deadline has passed; they left the queue without running.
    """

    sequences: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0
    expired: list[Sequence] = field(default_factory=list)


@dataclass(slots=True, order=True)
class _Entry:
    turn_s: float
    tie: int
    sequence: Sequence = field(compare=False)


class Scheduler:
    """The waiting queue and the policy over it. Not thread-safe: its owner holds a lock.

    Invariants: a batch never exceeds `token_budget` or `max_num_seqs`; `num_waiting` and `num_waiting_tokens` count
    exactly what may still be scheduled.

    Args:
        config: Limits of the number of sequences and of their wait.
        token_budget: Tokens in one batch. Raised to `max_seq_len` where it is less, since a sequence is never cut here.
        max_seq_len: Tokens of the longest sequence that will come.
    """

    def __init__(self, config: SchedulerConfig, *, token_budget: int, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len
        self.token_budget = max(token_budget, max_seq_len)
        self.max_num_seqs = config.max_num_seqs
        self.max_wait_s = config.max_wait_s
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self._heap: list[_Entry] = []
        self._ties = itertools.count()
        self._waiting_of: dict[int, list[int]] = {}  # request id -> [sequences, tokens] that wait

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
            delay_s = self.max_wait_s * tokens_ahead / self.token_budget
            turn_s = sequence.arrival_s + delay_s + sequence.priority * _PRIORITY_STEP_S
            heapq.heappush(self._heap, _Entry(turn_s, next(self._ties), sequence))
            self._count(sequence, +1)
            tokens_ahead += sequence.num_tokens

    def cancel(self, request_id: int) -> int:
        """Removes what still waits of a request and returns the number of sequences removed."""
        sequences, tokens = self._waiting_of.pop(request_id, (0, 0))
        self.num_waiting -= sequences
        self.num_waiting_tokens -= tokens
        if len(self._heap) > 2 * self.num_waiting + 64:
            self._heap = [e for e in self._heap if e.sequence.request_id in self._waiting_of]
            heapq.heapify(self._heap)
        return sequences

    def schedule(self, now_s: float) -> ScheduledBatch:
        """Takes the next batch out of the queue; it is empty only if nothing waits or all that waited has expired.

        Args:
            now_s: Seconds. Monotonic time, as in Sequence.arrival_s.
        """
        batch = ScheduledBatch()
        window = self._take_window(now_s, batch)
        chosen = self._choose(window, now_s)
        for entry in window:
            if entry.tie in chosen:
                batch.sequences.append(entry.sequence)
                batch.num_tokens += entry.sequence.num_tokens
                self._count(entry.sequence, -1)
            else:
                heapq.heappush(self._heap, entry)
        batch.sequences.sort(key=lambda s: s.num_tokens)
        return batch

    def shrink(self, token_budget: int) -> None:
        """Lowers the budget after the device ran out of memory, though never below one whole sequence."""
        self.token_budget = min(self.token_budget, max(token_budget, self.max_seq_len))

    def _take_window(self, now_s: float, batch: ScheduledBatch) -> list[_Entry]:
        """Pops live entries in order of their turn, up to a few batches; expired ones go to `batch`."""
        window: list[_Entry] = []
        num_tokens = 0
        while self._heap and num_tokens < _WINDOW * self.token_budget and len(window) < _WINDOW * self.max_num_seqs:
            entry = heapq.heappop(self._heap)
            sequence = entry.sequence
            if sequence.request_id not in self._waiting_of:
                continue
            if sequence.deadline_s is not None and sequence.deadline_s <= now_s:
                self._count(sequence, -1)
                batch.expired.append(sequence)
                continue
            window.append(entry)
            num_tokens += sequence.num_tokens
        return window

    def _choose(self, window: list[_Entry], now_s: float) -> set[int]:
        """Returns the ties of the entries that run: the overdue in order, the first, and its neighbours in length."""
        chosen: set[int] = set()
        if not window:
            return chosen
        left = self.token_budget

        def take(entry: _Entry) -> bool:
            nonlocal left
            if entry.sequence.num_tokens > left or len(chosen) >= self.max_num_seqs:
                return False
            chosen.add(entry.tie)
            left -= entry.sequence.num_tokens
            return True

        first = window[0]
        take(first)
        for entry in window[1:]:
            if now_s - entry.turn_s > self.max_wait_s and not take(entry):
                return chosen
        target = first.sequence.num_tokens
        rest = [e for e in window if e.tie not in chosen]
        rest.sort(key=lambda e: (abs(e.sequence.num_tokens - target), e.tie))
        for entry in rest:
            if not take(entry):
                break
        return chosen

    def _count(self, sequence: Sequence, step: int) -> None:
        """Books one sequence into (+1) or out of (-1) the waiting counts."""
        waiting = self._waiting_of.setdefault(sequence.request_id, [0, 0])
        waiting[0] += step
        waiting[1] += step * sequence.num_tokens
        self.num_waiting += step
        self.num_waiting_tokens += step * sequence.num_tokens
        if waiting[0] == 0:
            del self._waiting_of[sequence.request_id]
