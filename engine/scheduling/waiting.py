"""The sequences that wait, in the order of their turn, with the clients that they belong to taking turns.

Between clients the order is start-time fair (Goyal, Vin and Cheng, "Start-time Fair Queueing", SIGCOMM 1996), with
tokens for service: whoever has had the fewest goes first, and one that comes after a pause stands with those that wait,
neither punished for what it had before nor paid for what it did not take. Within a client the turn decides.

Of each request one short sequence is in line, and one long one. The next gets its turn when that is taken: later by
the time that it takes in the share which requests that have begun claim, and no earlier than the first one that has
not. So nobody holds turns of a time when others were not there, on a device of any speed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

from .line import Line
from .sequence import Entry, QueuedSequence

_BATCHES_A_LANE: Final = 2
_LEAST_TOKENS: Final = 48

_ORDER: Final = attrgetter("order")
_NEVER: Final[Any] = (math.inf, 0, None)
"""The entry behind the last one of a line."""

BEGUN_SHARE: Final = 0.5
"""Of the device, which requests that have begun claim together while others wait to begin."""


@dataclass(slots=True, eq=False)
class _Client:
    """A client that waits: its tokens so far, its number among those that came to wait, and its sequences in line."""

    tokens: int
    number: int
    lines: tuple[Line, ...] = field(default_factory=lambda: (Line(), Line(), Line(), Line()))  # see `_line`
    num_seqs: int = 0  # that wait

    def in_turn(self, now_s: float, token_s: float, *, is_long: bool) -> Iterator[QueuedSequence]:
        """Yields its short or its long sequences in their order; those behind get the turn that is then theirs."""
        begun_line, firsts_line = self.lines[2 * is_long : 2 * is_long + 2]
        walk, walk_firsts = begun_line.walk(), firsts_line.walk()
        begun, first = next(walk, _NEVER), next(walk_firsts, _NEVER)
        first_s = min(first[0], now_s)
        lifted: list[Entry] = []  # of those behind others, a heap
        while True:
            is_lifted = bool(lifted) and lifted[0] < begun and lifted[0] < first
            if is_lifted:
                sequence = lifted[0][2]
            elif begun < first:
                sequence, begun = begun[2], next(walk, _NEVER)
            elif first is not _NEVER:
                sequence, first = first[2], next(walk_firsts, _NEVER)
                first_s = min(first[0], now_s)
            else:
                return
            if (behind := sequence.behind) is not None:
                lead_s = sequence.request.lead_s
                least_s = first_s + lead_s if lead_s < 0 else first_s  # a head start is kept
                turn_s = sequence.turn_s + sequence.num_tokens * token_s
                behind.turn_s = turn_s if turn_s > least_s else least_s
                entry = (behind.turn_s, behind.order, behind)
                if is_lifted:
                    heapq.heapreplace(lifted, entry)
                else:
                    heapq.heappush(lifted, entry)
            elif is_lifted:
                heapq.heappop(lifted)
            yield sequence


class WaitingQueue:
    """The lines of sequences, short and long, of each client that waits. Not thread-safe: its owner holds a lock.

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

    def add(self, sequence: QueuedSequence, before: QueuedSequence | None = None) -> None:
        """Queues a sequence of its client: in line at its turn, or behind another one of its request."""
        name = sequence.request.client
        if name not in self._clients:
            least = min((client.tokens for client in self._clients.values()), default=self._last_tokens)
            self._ahead = {other: tokens for other, tokens in self._ahead.items() if tokens > least}
            self._clients[name] = _Client(self._ahead.pop(name, least), next(self._numbers))
        if before is None:
            self._line(sequence).push(sequence)
        else:
            before.behind, sequence.before, sequence.is_first = sequence, before, False
        self._count(sequence, +1)

    def take(self, sequence: QueuedSequence) -> None:
        """Removes a sequence of a window for good; its client is charged for what it has yet to get."""
        before, behind = sequence.before, sequence.behind
        if before is not None:
            before.behind = behind
        else:
            self._line(sequence).leave(sequence)
        if behind is not None:
            behind.before = before
            if before is None:
                self._line(behind).push(behind)
        sequence.before = sequence.behind = None
        self._clients[sequence.request.client].tokens += sequence.num_tokens - sequence.num_pooled
        self._count(sequence, -1)

    def return_charge(self, sequence: QueuedSequence) -> None:
        """Gives a client back what it was charged for a sequence that was taken, waits again and has not had it."""
        self._clients[sequence.request.client].tokens -= sequence.num_tokens - sequence.num_pooled

    def remove(self, sequence: QueuedSequence) -> None:
        """Leaves out a sequence that waited and has ended with its request."""
        if sequence.entry is not None:
            self._line(sequence).leave(sequence)
        sequence.before = sequence.behind = None
        self._count(sequence, -1)

    def window(
        self, max_tokens: int, max_seqs: int, now_s: float, token_s: float, *, is_long: bool = False
    ) -> list[QueuedSequence]:
        """Returns the sequences whose turn is next, clients in turn, up to a limit; at least one if any waits.

        Those behind others get the turn that is theirs if these are taken. `token_s`: Seconds that a token takes.
        """
        sequences: list[QueuedSequence] = []
        num_tokens = 0
        clients = self._clients.values()
        token_s *= max(sum(c.lines[2 * is_long].num_seqs for c in clients), 1) / BEGUN_SHARE  # begun ones share it
        places = [(c.tokens, -c.number, c.in_turn(now_s, token_s, is_long=is_long)) for c in clients]
        for sequence in places[0][2] if len(places) == 1 else _by_tokens(places):
            sequences.append(sequence)
            num_tokens += sequence.num_tokens
            if num_tokens >= max_tokens or len(sequences) >= max_seqs:
                break
        return sequences

    def share(self, num_lanes: int) -> int:
        """Returns the tokens of a batch where lanes run batches by themselves: each lane gets some of what waits.

        So answers leave while others still run; but for a few tokens, what surrounds a forward would cost too much.
        """
        return max(self.num_tokens // (_BATCHES_A_LANE * num_lanes), _LEAST_TOKENS)

    def first_long_s(self) -> float:
        """Returns the earliest turn, among all, of a long sequence whose request has not begun one; inf without any."""
        heads = [next(client.lines[3].walk(), None) for client in self._clients.values()] if self.num_long else []
        return min((head[2].turn_for("") for head in heads if head is not None), default=math.inf)

    def _line(self, sequence: QueuedSequence) -> Line:
        """Returns the line of a sequence: of the short or the long ones, those whose request began, or the firsts."""
        return self._clients[sequence.request.client].lines[2 * sequence.is_long + sequence.is_first]

    def _count(self, sequence: QueuedSequence, step: int) -> None:
        self.num_seqs += step
        self.num_long += step * sequence.is_long
        self.num_tokens += step * sequence.num_tokens
        client = self._clients[sequence.request.client]
        client.num_seqs += step
        if not client.num_seqs:
            self._ahead[sequence.request.client] = self._clients.pop(sequence.request.client).tokens
            self._last_tokens = max(self._last_tokens, client.tokens)


def _by_tokens(places: list[tuple[int, int, Iterator[QueuedSequence]]]) -> Iterator[QueuedSequence]:
    """Yields the sequences of several clients: next that of whoever has the fewest tokens, or else came last."""
    heapq.heapify(places)
    while places:
        tokens, number, in_turn = places[0]
        if (sequence := next(in_turn, None)) is None:
            heapq.heappop(places)
            continue
        heapq.heapreplace(places, (tokens + sequence.num_tokens, number, in_turn))
        yield sequence


def in_running_order(window: list[QueuedSequence], overdue_s: float) -> Iterator[QueuedSequence]:
    """Yields short sequences in the order in which they run: up to the last overdue, then by likeness to the first.

    `window` is in the order of turns; overdue are those of before `overdue_s` (Seconds, monotonic). What stands before
    an overdue one goes before it: of another client, it may be overdue and yet have its share.
    """
    end = 1 + max((place for place, sequence in enumerate(window) if sequence.turn_s < overdue_s), default=0)
    yield from window[:end]
    likes: dict[int, list[QueuedSequence]] = {}  # by how much longer or shorter they are
    for sequence in window[end:]:
        likes.setdefault(abs(sequence.num_tokens - window[0].num_tokens), []).append(sequence)
    for difference in sorted(likes):
        yield from sorted(likes[difference], key=_ORDER)
