"""The sequences that wait, in the order of their turn."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .sequence import Sequence


@dataclass(slots=True, order=True)
class Entry:
    """A place in the queue.

    Attributes:
        turn_s: Seconds. That of the sequence; lower goes first.
        tie: Order of arrival, unique.
        sequence: What waits.
    """

    turn_s: float
    tie: int
    sequence: Sequence = field(compare=False)


class WaitingQueue:
    """A heap of sequences. Not thread-safe: its owner holds a lock.

    Invariant: `num_seqs` and `num_tokens` count exactly what has not been taken, cancelled or expired.

    Args:
        ties: Numbers of entries; queues whose entries come together take them from one.
    """

    def __init__(self, ties: Iterator[int]) -> None:
        self.num_seqs = 0
        self.num_tokens = 0
        self._heap: list[Entry] = []
        self._ties = ties
        self._waiting_of: dict[int, list[int]] = {}  # request id -> [sequences, tokens] that wait

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, at its turn."""
        heapq.heappush(self._heap, Entry(sequence.turn_s, next(self._ties), sequence))
        self._count(sequence, +1)

    def cancel(self, request_id: int) -> int:
        """Removes what waits of a request and returns the number of sequences removed."""
        sequences, tokens = self._waiting_of.pop(request_id, (0, 0))
        self.num_seqs -= sequences
        self.num_tokens -= tokens
        if len(self._heap) > 2 * self.num_seqs + 64:
            self._heap = [e for e in self._heap if e.sequence.request_id in self._waiting_of]
            heapq.heapify(self._heap)
        return sequences

    def window(self, now_s: float, max_tokens: int, max_seqs: int) -> tuple[list[Entry], list[Sequence]]:
        """Lifts the entries whose turn is next, at least one if any waits, until a limit is reached.

        They still count as waiting: each must be taken (`take`) or put back (`put_back`).

        Returns:
            The entries in order of their turn, and the sequences whose deadline has passed, which have left the queue.
        """
        entries: list[Entry] = []
        expired: list[Sequence] = []
        num_tokens = 0
        while self._heap and num_tokens < max_tokens and len(entries) < max_seqs:
            entry = heapq.heappop(self._heap)
            sequence = entry.sequence
            if sequence.request_id not in self._waiting_of:
                continue
            if sequence.deadline_s is not None and sequence.deadline_s <= now_s:
                self._count(sequence, -1)
                expired.append(sequence)
                continue
            entries.append(entry)
            num_tokens += sequence.num_tokens
        return entries, expired

    def take(self, entry: Entry) -> None:
        """Removes a lifted entry for good."""
        self._count(entry.sequence, -1)

    def put_back(self, entries: Iterable[Entry]) -> None:
        """Returns lifted entries to their places."""
        for entry in entries:
            heapq.heappush(self._heap, entry)

    def _count(self, sequence: Sequence, step: int) -> None:
        """Books one sequence into (+1) or out of (-1) the waiting counts."""
        waiting = self._waiting_of.setdefault(sequence.request_id, [0, 0])
        waiting[0] += step
        waiting[1] += step * sequence.num_tokens
        self.num_seqs += step
        self.num_tokens += step * sequence.num_tokens
        if waiting[0] == 0:
            del self._waiting_of[sequence.request_id]
