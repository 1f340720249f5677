"""The sequences that wait, in the order of their turn, with the clients that they belong to taking turns.

Between clients the order is start-time fair (Goyal, Vin and Cheng, "Start-time Fair Queueing", SIGCOMM 1996), with
tokens for service: whoever has had the fewest goes first, and one that comes after a pause stands with those that wait,
neither punished for what it had before nor paid for what it did not take. Within a client the turn decides.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from .sequence import QueuedSequence, Status

_Heap = list[tuple[float, int, QueuedSequence]]
"""Turn, order of arrival, sequence."""


@dataclass(slots=True, eq=False)
class _Client:
    """A client that waits: its tokens so far, its number among those that came to wait, and its sequences."""

    tokens: int
    number: int
    heaps: tuple[_Heap, _Heap] = field(default_factory=lambda: ([], []))  # short and long; some in them have ended
    num_seqs: int = 0  # that wait


class WaitingQueue:
    """Two heaps of sequences, short and long, for each client that waits. Not thread-safe: its owner holds a lock.

    Invariants: the counts are of what was neither taken nor removed. Among clients that wait without a pause, tokens
    differ by no more than the largest window and batch.
    """

    def __init__(self) -> None:
        self.num_seqs = 0  # that wait
        self.num_long = 0  # of these
        self.num_tokens = 0  # of those that wait
        self._clients: dict[str, _Client] = {}
        self._ahead: dict[str, int] = {}  # tokens of clients that left and may have had more than those that wait
        self._last_tokens = 0  # of the last client that had waited, for those that come when nobody does
        self._numbers = itertools.count()

    def add(self, sequence: QueuedSequence) -> None:
        """Queues a sequence of its client, at its turn."""
        name = sequence.request.client
        if name not in self._clients:
            least = min((client.tokens for client in self._clients.values()), default=self._last_tokens)
            self._ahead = {other: tokens for other, tokens in self._ahead.items() if tokens > least}
            self._clients[name] = _Client(self._ahead.pop(name, least), next(self._numbers))
        self._push(sequence)
        self._count(sequence, +1)

    def take(self, sequence: QueuedSequence) -> None:
        """Removes a lifted sequence for good; its client is charged for what it has yet to get."""
        self._clients[sequence.request.client].tokens += sequence.num_tokens - sequence.num_pooled
        self._count(sequence, -1)

    def return_charge(self, sequence: QueuedSequence) -> None:
        """Gives a client back what it was charged for a sequence that was taken, waits again and has not had it."""
        self._clients[sequence.request.client].tokens -= sequence.num_tokens - sequence.num_pooled

    def remove(self, sequence: QueuedSequence) -> None:
        """Leaves out a sequence that waited and has ended; its entry stays until it comes up."""
        heap = self._heap_of(sequence)
        self._count(sequence, -1)
        if len(heap) > 2 * self.num_seqs + 64:
            heap[:] = [entry for entry in heap if entry[2].status is Status.WAITING]
            heapq.heapify(heap)

    def window(self, max_tokens: int, max_seqs: int, *, is_long: bool = False) -> list[QueuedSequence]:
        """Lifts the sequences whose turn is next, clients in turn, until a limit is reached; at least one if any waits.

        They still count as waiting: each must be taken (`take`) or put back (`put_back`), unless it ends.
        """
        sequences: list[QueuedSequence] = []
        num_tokens = 0
        places = [(client.tokens, -client.number, client.heaps[is_long]) for client in self._clients.values()]
        heapq.heapify(places)
        while places and num_tokens < max_tokens and len(sequences) < max_seqs:
            tokens, number, heap = places[0]
            while heap and heap[0][2].status is not Status.WAITING:
                heapq.heappop(heap)
            if not heap:
                heapq.heappop(places)
                continue
            sequence = heapq.heappop(heap)[2]
            sequences.append(sequence)
            num_tokens += sequence.num_tokens
            heapq.heapreplace(places, (tokens + sequence.num_tokens, number, heap))
        return sequences

    def put_back(self, sequences: Iterable[QueuedSequence]) -> None:
        """Returns lifted sequences to their places, those that still wait."""
        for sequence in sequences:
            if sequence.status is Status.WAITING:
                self._push(sequence)

    def _push(self, sequence: QueuedSequence) -> None:
        heapq.heappush(self._heap_of(sequence), (sequence.turn_s, sequence.order, sequence))

    def _heap_of(self, sequence: QueuedSequence) -> _Heap:
        return self._clients[sequence.request.client].heaps[sequence.is_long]

    def _count(self, sequence: QueuedSequence, step: int) -> None:
        self.num_seqs += step
        self.num_long += step * sequence.is_long
        self.num_tokens += step * sequence.num_tokens
        name = sequence.request.client
        client = self._clients[name]
        client.num_seqs += step
        if not client.num_seqs:
            del self._clients[name]
            self._ahead[name] = client.tokens
            self._last_tokens = max(self._last_tokens, client.tokens)


def in_running_order(window: list[QueuedSequence], overdue_s: float) -> list[QueuedSequence]:
    """Returns short sequences in the order in which they run: up to the last overdue, then by likeness to the first.

    Those before an overdue one go before it: of another client, it may be overdue and yet have its share.

    Args:
        window: In the order of their turn.
        overdue_s: Seconds. Those with an earlier turn are overdue.
    """
    end = 1 + max((place for place, sequence in enumerate(window) if sequence.turn_s < overdue_s), default=0)
    rest = sorted(window[end:], key=lambda s: (abs(s.num_tokens - window[0].num_tokens), s.order))
    return [*window[:end], *rest]
