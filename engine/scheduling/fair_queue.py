"""The sequences that wait, in the order of their turn, with the clients that they belong to taking turns.

Between clients the order is start-time fair (Goyal, Vin and Cheng, "Start-time Fair Queueing", SIGCOMM 1996), with
tokens for service: whoever has had the fewest goes first, and one that comes after a pause stands with those that wait,
neither punished for what it had before nor paid for what it did not take. Within a client the turn decides.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from .sequence import Sequence
from .waiting_queue import Entry, WaitingQueue


class ClientShares:
    """What the clients have had of the device. Shared by the queues of one scheduler; its owner holds a lock.

    Invariant: among clients that wait without a pause, tokens differ by no more than the largest window and batch.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}  # of clients that wait, and of those that may be ahead of them
        self._entries: dict[str, list[int]] = {}  # of clients that wait -> [queues in which they do, number of entry]
        self._numbers = itertools.count()
        self._last_tokens = 0  # of the last client that had waited, for those that come when nobody does

    def enter(self, client: str) -> None:
        """Called when a client begins to wait in a queue."""
        entry = self._entries.get(client)
        if entry is not None:
            entry[0] += 1
            return
        others = self._entries
        least = min((self._tokens[other] for other in others), default=self._last_tokens)
        self._tokens = {c: tokens for c, tokens in self._tokens.items() if tokens > least or c in others}
        self._tokens[client] = max(self._tokens.get(client, least), least)
        self._entries[client] = [1, next(self._numbers)]

    def leave(self, client: str) -> None:
        """Called when nothing of a client waits in a queue any more."""
        entry = self._entries[client]
        entry[0] -= 1
        if not entry[0]:
            del self._entries[client]
            self._last_tokens = max(self._last_tokens, self._tokens[client])

    def charge(self, client: str, num_tokens: int) -> None:
        """Books tokens that a client that waits gets."""
        self._tokens[client] += num_tokens

    def place(self, client: str) -> tuple[int, int]:
        """Returns where a client that waits stands: its tokens, and among equals who came last."""
        return self._tokens[client], -self._entries[client][1]


class FairQueue:
    """A WaitingQueue for each client that waits, behind the methods of one. Not thread-safe: its owner holds a lock.

    With one client it is a WaitingQueue.

    Args:
        shares: Shared by the queues among which clients divide the same device.
    """

    def __init__(self, shares: ClientShares) -> None:
        self._shares = shares
        self._ties = itertools.count()
        self._queues: dict[str, WaitingQueue] = {}

    @property
    def num_seqs(self) -> int:
        """Sequences that wait."""
        return sum(queue.num_seqs for queue in self._queues.values())

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequences that wait."""
        return sum(queue.num_tokens for queue in self._queues.values())

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence of its client, at its turn."""
        queue = self._queues.get(sequence.client)
        if queue is None:
            queue = self._queues[sequence.client] = WaitingQueue(self._ties)
            self._shares.enter(sequence.client)
        queue.add(sequence)

    def cancel(self, request_id: int) -> int:
        """Removes what waits of a request and returns the number of sequences removed."""
        removed = sum(queue.cancel(request_id) for queue in self._queues.values())
        if removed:
            self._drop_empty()
        return removed

    def window(self, now_s: float, max_tokens: int, max_seqs: int) -> tuple[list[Entry], list[Sequence]]:
        """Lifts the entries whose turn is next, those of clients in turn; see WaitingQueue.window."""
        entries: list[Entry] = []
        expired: list[Sequence] = []
        if len(self._queues) == 1:
            (queue,) = self._queues.values()
            entries, expired = queue.window(now_s, max_tokens, max_seqs)
        else:
            places = [(*self._shares.place(client), client) for client in self._queues]
            heapq.heapify(places)
            num_tokens = 0
            while places and num_tokens < max_tokens and len(entries) < max_seqs:
                tokens, number, client = places[0]
                lifted, late = self._queues[client].window(now_s, 1, 1)
                expired += late
                if not lifted:
                    heapq.heappop(places)
                    continue
                entries += lifted
                num_tokens += lifted[0].sequence.num_tokens
                heapq.heapreplace(places, (tokens + lifted[0].sequence.num_tokens, number, client))
        if expired:
            self._drop_empty()
        return entries, expired

    def take(self, entry: Entry) -> None:
        """Removes a lifted entry for good; its client has had its tokens."""
        sequence = entry.sequence
        self._queues[sequence.client].take(entry)
        self._shares.charge(sequence.client, sequence.num_tokens - sequence.num_done)
        if not self._queues[sequence.client].num_seqs:
            self._drop(sequence.client)

    def put_back(self, entries: Iterable[Entry]) -> None:
        """Returns lifted entries to their places; those of a client of which nothing waits have been cancelled."""
        for entry in entries:
            queue = self._queues.get(entry.sequence.client)
            if queue is not None:
                queue.put_back((entry,))

    def _drop_empty(self) -> None:
        for client in [client for client, queue in self._queues.items() if not queue.num_seqs]:
            self._drop(client)

    def _drop(self, client: str) -> None:
        del self._queues[client]
        self._shares.leave(client)
