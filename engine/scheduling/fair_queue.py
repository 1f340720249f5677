"""The queue of waiting sequences and its order. Plain Python without torch.

The order is start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair Queueing", SIGCOMM 1996) with tokens as
service, at two levels: between clients, and between the size classes of a client. The requests of a size class differ
by less than a factor of four in tokens.

The client with the earliest virtual start time runs next, and within it the class with the earliest virtual start time.
Both start times advance by the tokens that ran. When a client or class starts to wait, its start time is raised to that
of the client or class that ran last, so that a pause is neither rewarded nor punished.

Within a class, requests run in order of arrival. A priority level counts as the tokens that the device runs in a
second: it moves a request in its class, and the class while the request is its first one, forward by that many tokens.
Priorities have no effect between clients.

Bound: while n classes of a client wait, each gets a part of 1/n of the client's service. So no request starves, and a
short request runs in the next forward, however many large requests wait, while short requests take less than that part.
Cost: large requests of one client run one after the other, and take up to n times as long as alone.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from .sequence import InputSequence, Request

_SMALLEST_CLASS_BITS: Final = 6
"""Requests of fewer than 2 ** 6 tokens are one class, because their forwards take about the same time."""
_NUM_ROUNDS: Final = 2
"""The queue is divided into this many batches for each forward that can run at the same time."""


class _ClassQueue:
    """The waiting short or long sequences of one size class, ordered by `virtual_arrival`, then by arrival.

    `remove` sets `is_queued` of a sequence to False, and keeps it in the lists. The next iteration deletes it there.

    Attributes:
        num_waiting: Number of waiting sequences.
        virtual_arrivals: `virtual_arrival` of each of `sequences`.
        sequences: The waiting sequences, and removed sequences until `delete_removed`.
    """

    __slots__ = ("_num_iterated", "num_waiting", "sequences", "virtual_arrivals")

    def __init__(self) -> None:
        self.num_waiting = 0
        self.virtual_arrivals: list[float] = []
        self.sequences: list[InputSequence] = []
        self._num_iterated = 0  # length of the part at the head that may contain removed sequences

    def add(self, sequences: list[InputSequence]) -> None:
        """Adds the sequences of a new request, after sequences with the same `virtual_arrival`."""
        self._insert(bisect_right(self.virtual_arrivals, sequences[0].request.virtual_arrival), sequences)

    def requeue(self, sequence: InputSequence) -> None:
        """Adds a preempted sequence at its former position."""
        self.delete_removed()
        self._insert(bisect_left(self.sequences, _sort_key(sequence), key=_sort_key), [sequence])

    def remove(self, sequence: InputSequence) -> None:
        sequence.is_queued = False
        self.num_waiting -= 1
        if len(self.sequences) > 2 * self.num_waiting + 64:
            self._num_iterated = len(self.sequences)
            self.delete_removed()

    def delete_removed(self) -> None:
        # The part before `_num_iterated` is enough, because only iterated sequences can run and be added again.
        waiting = [sequence for sequence in self.sequences[: self._num_iterated] if sequence.is_queued]
        self.virtual_arrivals[: self._num_iterated] = [sequence.request.virtual_arrival for sequence in waiting]
        self.sequences[: self._num_iterated] = waiting
        self._num_iterated = len(waiting)

    def __iter__(self) -> Iterator[InputSequence]:
        """Yields the waiting sequences in order. Do not add sequences during the iteration."""
        self.delete_removed()
        self._num_iterated = 0
        for sequence in self.sequences:
            self._num_iterated += 1
            if sequence.is_queued:
                yield sequence

    def _insert(self, position: int, sequences: list[InputSequence]) -> None:
        self.virtual_arrivals[position:position] = [sequences[0].request.virtual_arrival] * len(sequences)
        self.sequences[position:position] = sequences
        self.num_waiting += len(sequences)
        if position < self._num_iterated:
            self._num_iterated += len(sequences)
        for sequence in sequences:
            sequence.is_queued = True


def _sort_key(sequence: InputSequence) -> tuple[float, int, int]:
    """Returns the sort key of a sequence within its class: the smallest runs first."""
    return sequence.request.virtual_arrival, sequence.request.arrival_number, sequence.index


@dataclass(slots=True, eq=False)
class _SizeClass:
    """The sequences of the requests of one client with similar numbers of tokens.

    Attributes:
        virtual_start: Virtual start time of its next sequence in tokens.
        short: Its short sequences.
        long: Its long sequences.
    """

    virtual_start: float
    short: _ClassQueue = field(default_factory=_ClassQueue)
    long: _ClassQueue = field(default_factory=_ClassQueue)

    @property
    def is_waiting(self) -> bool:
        return bool(self.short.num_waiting or self.long.num_waiting)


@dataclass(slots=True, eq=False)
class _Client:
    """A client with waiting sequences, or an idle client that is not deleted yet.

    Attributes:
        virtual_start: Virtual start time of its next sequence in tokens.
        number: Number of the client, in order of arrival.
        virtual_time: Start time of the class that ran last.
        classes: Its classes by number: larger requests have larger numbers.
        num_waiting: Number of its waiting sequences.
    """

    virtual_start: float
    number: int
    virtual_time: float
    classes: dict[int, _SizeClass] = field(default_factory=dict)
    num_waiting: int = 0

    def size_class(self, number: int) -> _SizeClass:
        size_class = self.classes.get(number)
        if size_class is None:
            size_class = self.classes[number] = _SizeClass(self.virtual_time)
        return size_class


class FairQueue:
    """Waiting sequences by client. Not thread-safe: its owner holds a lock.

    Adding a request is a binary search and an insertion into a list. Removing a sequence sets a flag. Reading the next
    k sequences costs O(k), and a step for each client.

    Attributes:
        num_seqs: Number of waiting sequences.
        num_long: Number of waiting long sequences.
        num_tokens: Tokens of all waiting sequences.
    """

    def __init__(self) -> None:
        self.num_seqs = 0
        self.num_long = 0
        self.num_tokens = 0
        self._clients: dict[str, _Client] = {}
        self._max_clients = 64  # above this number idle clients are removed
        self._virtual_time = 0.0  # start time of the client that ran last
        self._latest_start = 0.0  # largest start time of all clients
        self._numbers = itertools.count()

    def add(self, request: Request, tokens_per_level: float = 0.0) -> None:
        """Queues the sequences of a new request, and sets its place in the order.

        Args:
            request: The request. `is_long` of its sequences is set.
            tokens_per_level: Tokens of service that equal one priority level.
        """
        if not self.num_seqs:  # the queue was empty: start the next busy period at the latest start time
            self._virtual_time = self._latest_start
        client = self._client(request.client)
        if not client.num_waiting:
            client.virtual_start = max(client.virtual_start, self._virtual_time)
            client.virtual_time = max([client.virtual_time, *[c.virtual_start for c in client.classes.values()]])
        num_tokens = sum([sequence.num_tokens for sequence in request.sequences])
        request.size_class = _size_class(num_tokens)
        size_class = client.size_class(request.size_class)
        if not size_class.is_waiting:
            size_class.virtual_start = max(size_class.virtual_start, client.virtual_time)
        request.priority_tokens = -request.priority * tokens_per_level
        request.virtual_arrival = client.virtual_start - request.priority_tokens
        request.arrival_number = next(self._numbers)
        short = request.sequences
        long = [sequence for sequence in short if sequence.is_long]
        if long:
            size_class.long.add(long)
            self.num_long += len(long)
            short = [sequence for sequence in short if not sequence.is_long]
        if short:
            size_class.short.add(short)
        client.num_waiting += len(request.sequences)
        self.num_seqs += len(request.sequences)
        self.num_tokens += num_tokens

    def requeue(self, sequence: InputSequence) -> None:
        """Queues a long sequence that was preempted, or runs again in chunks, at its former position."""
        client = self._client(sequence.request.client)
        size_class = client.size_class(sequence.request.size_class)
        size_class.short.delete_removed()  # it may still be in that list, and `is_queued` becomes True
        size_class.long.requeue(sequence)
        client.num_waiting += 1
        self.num_seqs += 1
        self.num_long += 1
        self.num_tokens += sequence.num_tokens

    def remove(self, sequence: InputSequence) -> None:
        """Removes a waiting sequence: it runs now, or its request was cancelled."""
        client = self._clients[sequence.request.client]
        size_class = client.classes[sequence.request.size_class]
        (size_class.long if sequence.is_long else size_class.short).remove(sequence)
        client.num_waiting -= 1
        self.num_seqs -= 1
        self.num_long -= sequence.is_long
        self.num_tokens -= sequence.num_tokens

    def charge(self, sequence: InputSequence, num_tokens: int) -> None:
        """Advances the start times of a client and a class by the tokens of a sequence that run now."""
        client = self._client(sequence.request.client)
        if client.virtual_start > self._virtual_time:
            self._virtual_time = client.virtual_start
        client.virtual_start += num_tokens
        if client.virtual_start > self._latest_start:
            self._latest_start = client.virtual_start
        size_class = client.size_class(sequence.request.size_class)
        if size_class.virtual_start > client.virtual_time:
            client.virtual_time = size_class.virtual_start
        size_class.virtual_start += num_tokens

    def sort_key(self, sequence: InputSequence) -> tuple[float, float, int, float, int, int]:
        """Returns the sort key of a sequence, waiting or not: the smallest runs first. Changes no client."""
        request = sequence.request
        client = self._clients.get(request.client)
        start = class_start = self._virtual_time
        if client is not None:
            size_class = client.classes.get(request.size_class)
            start = client.virtual_start
            class_start = client.virtual_time if size_class is None else size_class.virtual_start
        return (start, class_start - request.priority_tokens, request.size_class, *_sort_key(sequence))

    def next_sequences(self, max_tokens: int, max_seqs: int, *, is_long: bool = False) -> list[InputSequence]:
        """Returns the next short, or long, sequences in order, up to a limit. At least one if any waits."""
        clients = [
            (client.virtual_start, client.number, _by_class(classes))
            for client in self._clients.values()
            if client.num_waiting and (classes := _waiting_classes(client, is_long=is_long))
        ]
        sequences: list[InputSequence] = []
        for sequence in clients[0][-1] if len(clients) == 1 else _by_client(clients):
            sequences.append(sequence)
            max_tokens -= sequence.num_tokens
            if max_tokens <= 0 or len(sequences) >= max_seqs:
                break
        return sequences

    def tokens_per_forward(self, max_forwards: int) -> int:
        """Returns the tokens of a batch, so that each of `max_forwards` forwards gets a part of the queue.

        Small batches return results earlier.
        """
        return self.num_tokens // (_NUM_ROUNDS * max_forwards)

    def _client(self, name: str) -> _Client:
        client = self._clients.get(name)
        if client is None:
            if len(self._clients) >= self._max_clients:
                clients = self._clients.items()
                self._clients = {n: c for n, c in clients if c.num_waiting or c.virtual_start > self._virtual_time}
                self._max_clients = 2 * len(self._clients) + 64
            client = _Client(self._virtual_time, next(self._numbers), self._virtual_time)
            self._clients[name] = client
        return client


def _size_class(num_tokens: int) -> int:
    """Returns the number of the class of a request. The tokens of a class differ by less than a factor of four."""
    return ((num_tokens >> _SMALLEST_CLASS_BITS).bit_length() + 1) // 2


def _waiting_classes(client: _Client, *, is_long: bool) -> list[tuple[int, float, Iterator[InputSequence]]]:
    """Returns the number, start time and sequences of each class with waiting short, or long, sequences."""
    queues = [(number, c.virtual_start, c.long if is_long else c.short) for number, c in client.classes.items()]
    return [(number, start, iter(queue)) for number, start, queue in queues if queue.num_waiting]


def _by_class(classes: list[tuple[int, float, Iterator[InputSequence]]]) -> Iterator[InputSequence]:
    """Yields the sequences of a client. The class with the earliest start time is next."""
    if len(classes) == 1:
        yield from classes[0][-1]
        return
    heads: list[tuple[float, int, float, InputSequence, Iterator[InputSequence]]] = []
    for number, start, sequences in classes:
        head = next(sequences)
        heads.append((start - head.request.priority_tokens, number, start, head, sequences))
    heapq.heapify(heads)
    while heads:
        _, number, start, head, sequences = heads[0]
        yield head
        start += head.num_tokens
        following = next(sequences, None)
        if following is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (start - following.request.priority_tokens, number, start, following, sequences))


def _by_client(clients: list[tuple[float, int, Iterator[InputSequence]]]) -> Iterator[InputSequence]:
    """Yields sequences of several clients. The client with the earliest start time is next."""
    heapq.heapify(clients)
    while clients:
        start, number, sequences = clients[0]
        sequence = next(sequences, None)
        if sequence is None:
            heapq.heappop(clients)
            continue
        heapq.heapreplace(clients, (start + sequence.num_tokens, number, sequences))
        yield sequence


def group_by_length(candidates: list[InputSequence], now_s: float, max_wait_s: float) -> list[InputSequence]:
    """Orders short sequences for a batch: the first one, then sequences by similarity of their length to it.

    The last sequence that has waited for more than `max_wait_s`, and all before it, keep their order at the front.

    Args:
        candidates: Sequences in the order of the queue.
        now_s: Seconds, monotonic.
        max_wait_s: Seconds.
    """
    end = 1
    for index, sequence in enumerate(candidates):
        if now_s - sequence.request.arrival_s > max_wait_s:
            end = index + 1
    num_tokens = candidates[0].num_tokens if candidates else 0
    return candidates[:end] + sorted(candidates[end:], key=lambda sequence: abs(sequence.num_tokens - num_tokens))
