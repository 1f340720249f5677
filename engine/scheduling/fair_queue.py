"""The waiting sequences, and the order in which they run. Plain Python without torch.

Between clients: start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair Queueing", SIGCOMM 1996) with tokens
as service. The client with the earliest virtual start time runs next, and its start time moves on by the tokens that
ran. A client that starts to wait gets at least the start time of the sequence that ran last, so that a pause is neither
rewarded nor punished. Priorities have no effect between clients.

Within a client: the request with the smallest `due` runs first, which is fixed when it arrives:

    due = start time of the client + SLOWDOWN x tokens of the request + priority x tokens of one second

So equal requests run in the order of arrival, short requests run before long ones, and a priority level is worth the
tokens that the device runs in a second. All inputs of a request have one `due`: a small request passes a large one,
and its inputs run together.

Bound: a request of n tokens is passed only by requests (of its priority) that arrive while its client gets
SLOWDOWN x n tokens of service. The requests that wait at that moment are the last that can run before it, so no request
starves.
The price: large requests of one client run one after the other, and under an overload of small requests a large one
takes up to SLOWDOWN times as long as it would alone.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from .sequence import QueuedSequence, QueueEntry, Request

SLOWDOWN: Final = 8
"""Service of a client, as a multiple of the tokens of a request, during which new requests may pass it."""
_BATCHES_PER_LANE: Final = 2
"""The queue is divided into so many batches for each lane."""
_MIN_BATCH_TOKENS: Final = 48
_MAX_FRONT: Final = 4096
"""Entries of a sorted list at most: an insertion moves those behind it."""

_Item = tuple[float, int, int, int, QueueEntry]
"""`due`, number of the request, index of the first sequence, a unique number, entry."""


@dataclass(slots=True, eq=False)
class _Line:
    """Requests of one client that wait: the next ones in a sorted list, the others in a heap.

    Entries without waiting sequences are removed lazily. Invariant: no entry of the heap precedes one of the list.
    """

    front: list[_Item] = field(default_factory=list)
    rest: list[_Item] = field(default_factory=list)
    num_entries: int = 0  # that have waiting sequences

    def push(self, item: _Item) -> None:
        self.num_entries += 1
        if not self.front or item > self.front[-1]:
            heapq.heappush(self.rest, item)
            return
        bisect.insort(self.front, item)
        if len(self.front) > _MAX_FRONT:
            heapq.heappush(self.rest, self.front.pop())

    def leave(self, sequence: QueuedSequence) -> None:
        """Removes a waiting sequence."""
        entry, sequence.entry = sequence.entry, None
        assert entry is not None, "the sequence waits"
        entry.num_waiting -= 1
        if entry.num_waiting:
            return
        entry.sequences = []
        self.num_entries -= 1
        if len(self.rest) > 2 * self.num_entries + 64:
            self.rest = [item for item in self.rest if item[-1].num_waiting]
            heapq.heapify(self.rest)

    def in_order(self) -> Iterator[QueuedSequence]:
        """Yields the waiting sequences in order. The line must not change meanwhile."""
        self.front = front = [item for item in self.front if item[-1].num_waiting]
        index = 0
        while index < len(front) or self.rest:
            if index == len(front):
                front.append(heapq.heappop(self.rest))
            entry = front[index][-1]
            index += 1
            sequences = entry.sequences
            if entry.num_waiting == len(sequences):
                yield from sequences
                continue
            while entry.first < len(sequences) and sequences[entry.first].entry is not entry:
                entry.first += 1
            for place in range(entry.first, len(sequences)):
                if sequences[place].entry is entry:
                    yield sequences[place]


@dataclass(slots=True, eq=False)
class _Client:
    """A client that waits, or waited a short time ago.

    Attributes:
        start: Tokens. Virtual start time of its next sequence.
        number: Counts clients in the order in which they came.
        short: Its short sequences.
        long: Its long ones.
    """

    start: float
    number: int
    short: _Line = field(default_factory=_Line)
    long: _Line = field(default_factory=_Line)

    @property
    def is_waiting(self) -> bool:
        return bool(self.short.num_entries or self.long.num_entries)


class FairQueue:
    """Waiting sequences by client. Not thread-safe: its owner holds a lock.

    Adding and removing a sequence cost O(log n). A window of k sequences costs O(k), and a step for each client.

    Attributes:
        num_seqs: Sequences that wait.
        num_long: The long ones among them.
        num_tokens: Tokens of all that wait.
    """

    def __init__(self) -> None:
        self.num_seqs = 0
        self.num_long = 0
        self.num_tokens = 0
        self._clients: dict[str, _Client] = {}
        self._max_clients = 64  # when there are more, those that no longer wait are removed
        self._virtual_time = 0.0  # start time of the sequence that ran last
        self._latest_start = 0.0  # of all clients
        self._numbers = itertools.count()

    def add(self, request: Request, tokens_per_level: float = 0.0) -> None:
        """Queues the sequences of a new request, and sets its `due` and `number`.

        Args:
            request: Its sequences have `is_long` set.
            tokens_per_level: Tokens of service that a priority level is worth.
        """
        if not self.num_seqs:  # a busy period ends with the latest start time
            self._virtual_time = self._latest_start
        client = self._client(request.client)
        if not client.is_waiting:
            client.start = max(client.start, self._virtual_time)
        num_tokens = sum([sequence.num_tokens for sequence in request.sequences])
        request.due = client.start + SLOWDOWN * num_tokens + request.priority * tokens_per_level
        request.number = next(self._numbers)
        long = [sequence for sequence in request.sequences if sequence.is_long]
        short = [sequence for sequence in request.sequences if not sequence.is_long] if long else request.sequences
        if short:
            self._push(client.short, short)
        if long:
            self._push(client.long, long)
            self.num_long += len(long)
        self.num_seqs += len(request.sequences)
        self.num_tokens += num_tokens

    def add_again(self, sequence: QueuedSequence) -> None:
        """Queues a sequence that was preempted, or runs again in chunks; its request keeps its place."""
        client = self._client(sequence.request.client)
        self._push(client.long if sequence.is_long else client.short, [sequence])
        self._count(sequence, +1)

    def remove(self, sequence: QueuedSequence) -> None:
        """Removes a waiting sequence: it runs now, or its request was cancelled."""
        client = self._clients[sequence.request.client]
        (client.long if sequence.is_long else client.short).leave(sequence)
        self._count(sequence, -1)

    def charge(self, sequence: QueuedSequence, num_tokens: int) -> None:
        """Moves the start time of a client on by tokens of a sequence that run now."""
        client = self._client(sequence.request.client)
        if client.start > self._virtual_time:
            self._virtual_time = client.start
        client.start += num_tokens
        if client.start > self._latest_start:
            self._latest_start = client.start

    def order(self, sequence: QueuedSequence) -> tuple[float, float, int, int]:
        """Returns the key of a sequence, waiting or not: the smallest runs first."""
        request = sequence.request
        return self._client(request.client).start, request.due, request.number, sequence.index

    def window(self, max_tokens: int, max_seqs: int, *, is_long: bool = False) -> list[QueuedSequence]:
        """Returns the short, or long, sequences that run next, in order, up to a limit; at least one if any waits."""
        clients = []
        for client in self._clients.values():
            line = client.long if is_long else client.short
            if line.num_entries:
                clients.append((client.start, client.number, line.in_order()))
        sequences: list[QueuedSequence] = []
        for sequence in clients[0][-1] if len(clients) == 1 else _by_start(clients):
            sequences.append(sequence)
            max_tokens -= sequence.num_tokens
            if max_tokens <= 0 or len(sequences) >= max_seqs:
                break
        return sequences

    def tokens_per_batch(self, num_lanes: int) -> int:
        """Returns the tokens of a batch for one of several lanes, so that each lane gets a part of the queue.

        Small batches return results while others still run; very small ones cost more than they save.
        """
        return max(self.num_tokens // (_BATCHES_PER_LANE * num_lanes), _MIN_BATCH_TOKENS)

    def _push(self, line: _Line, sequences: list[QueuedSequence]) -> None:
        first, entry = sequences[0], QueueEntry(sequences, len(sequences))
        for sequence in sequences:
            sequence.entry = entry
        line.push((first.request.due, first.request.number, first.index, next(self._numbers), entry))

    def _client(self, name: str) -> _Client:
        if (client := self._clients.get(name)) is None:
            if len(self._clients) >= self._max_clients:
                kept = {n: c for n, c in self._clients.items() if c.is_waiting or c.start > self._virtual_time}
                self._clients, self._max_clients = kept, 2 * len(kept) + 64
            self._clients[name] = client = _Client(self._virtual_time, next(self._numbers))
        return client

    def _count(self, sequence: QueuedSequence, step: int) -> None:
        self.num_seqs += step
        self.num_long += step * sequence.is_long
        self.num_tokens += step * sequence.num_tokens


def _by_start(clients: list[tuple[float, int, Iterator[QueuedSequence]]]) -> Iterator[QueuedSequence]:
    """Yields the sequences of several clients: next that of the client with the earliest start time."""
    heapq.heapify(clients)
    while clients:
        start, number, in_order = clients[0]
        if (sequence := next(in_order, None)) is None:
            heapq.heappop(clients)
            continue
        heapq.heapreplace(clients, (start + sequence.num_tokens, number, in_order))
        yield sequence


def group_by_length(window: list[QueuedSequence], now_s: float, max_wait_s: float) -> Iterator[QueuedSequence]:
    """Yields short sequences in the order in which they run: the first, then those of similar length.

    A sequence that has been near the head of the queue for `max_wait_s`, and all before it, go before the others.

    Args:
        window: In the order of the queue.
        now_s: Seconds, monotonic.
        max_wait_s: Seconds.
    """
    end = 1
    for index, sequence in enumerate(window):
        if sequence.seen_s is None:
            sequence.seen_s = now_s
        elif now_s - sequence.seen_s > max_wait_s:
            end = index + 1
    yield from window[:end]
    num_tokens = window[0].num_tokens if window else 0
    yield from sorted(window[end:], key=lambda sequence: abs(sequence.num_tokens - num_tokens))
