"""The scheduler's policy in the plainest way: lists that are sorted, and nothing kept that can be counted.

It has a sequence pool and a pace of its own, which are tested elsewhere, and none of the scheduler's queues.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from penstock.engine.protocol.config import ChunkedPrefillConfig, SchedulerConfig
from penstock.engine.scheduling import Allocation, Request, SequencePool
from penstock.engine.scheduling.pace import ChunkPace

WINDOW = 4
GOOD_STEPS = 32
LEAST_SHARE = 32
BEGUN_SHARE = 0.5

Span = tuple[Hashable, int, int]
"""Sequence, first token, token after the last."""


@dataclass(eq=False)
class Item:
    """A sequence: it waits, runs (a short one for one batch), and has ended once it is in no list."""

    name: tuple[int, int]
    num_tokens: int
    client: str
    turn_s: float
    lead_s: float
    order: int
    deadline_s: float | None
    needs_last_row: bool
    keys: tuple[bytes, ...]
    is_long: bool = False
    is_first: bool = False  # of the short or the long ones of its request
    in_line: bool = False  # none of these waits before it
    stands_alone: bool = False  # it ran, and waits again: the others do not wait for it
    due_s: float = 0.0
    done: int = 0
    cached: int = 0
    pooled: int = 0
    failures: int = 0
    span: tuple[int, int] | None = None
    allocation: Allocation | None = None

    @property
    def left(self) -> int:
        return self.num_tokens - self.done

    @property
    def rank_s(self) -> float:
        """Where its client counts as well: without its priority, if clients are told apart."""
        return self.turn_s - self.lead_s if self.client else self.turn_s


@dataclass
class Made:
    """A batch."""

    spans: list[Span] = field(default_factory=list)
    expired: list[int] = field(default_factory=list)
    preempted: list[tuple[int, int]] = field(default_factory=list)
    num_left: int = 0


class Clients:
    """What clients have had. One that comes stands with those that wait, or where it was if that is behind them."""

    def __init__(self) -> None:
        self.had: dict[str, int] = {}
        self.numbers: dict[str, int] = {}
        self.gone: dict[str, int] = {}
        self.last = 0
        self.num_came = 0

    def come(self, name: str) -> None:
        if name not in self.had:
            least = min(self.had.values(), default=self.last)
            self.gone = {other: tokens for other, tokens in self.gone.items() if tokens > least}
            self.had[name] = self.gone.pop(name, least)
            self.numbers[name] = self.num_came
            self.num_came += 1

    def go(self, name: str) -> None:
        self.gone[name] = self.had.pop(name)
        self.last = max(self.last, self.gone[name])


class Reference:
    """Takes what a Scheduler takes; says what a batch must be."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        token_budget: int,
        max_seq_len: int,
        prefill: ChunkedPrefillConfig,
        sequence_pool: SequencePool,
    ) -> None:
        self.config, self.prefill, self.sequence_pool = config, prefill, sequence_pool
        self.max_seq_len = max_seq_len
        self.full = self.budget = token_budget if sequence_pool.can_hold(1) else max(token_budget, max_seq_len)
        self.pace = ChunkPace(prefill.chunk_size)
        self.pressure = 0.0
        self.room = 0  # of this batch, in tokens
        self.token_s = 0.0  # that a token takes
        self.front_s = 0.0  # when the first long one is due of which nothing has begun
        self.waiting: list[Item] = []
        self.running: list[Item] = []  # long ones, in the order in which they started
        self.short: list[Item] = []  # that run now
        self.batch: list[Item] = []
        self.clients = Clients()
        self.num_added = 0
        self.num_good = 0
        self.had_whole = False
        self.waits_for_memory = False

    # What happens to requests

    def add(self, request: Request) -> None:
        lead_s = request.priority * self.prefill.ageing_s
        kinds: set[bool] = set()
        for sequence in request.sequences:
            num_tokens, keys = sequence.num_tokens, tuple(sequence.block_keys)
            name = (request.request_id, sequence.index)
            item = Item(
                name,
                num_tokens,
                request.client,
                request.arrival_s + lead_s,
                lead_s,
                self.num_added,
                request.deadline_s,
                request.needs_last_row,
                keys,
            )
            threshold = self.prefill.chunk_size if self.prefill.threshold is None else self.prefill.threshold
            item.is_long = num_tokens > min(threshold, self.budget) and self.sequence_pool.can_hold(num_tokens)
            item.is_first = item.in_line = item.is_long not in kinds
            kinds.add(item.is_long)
            self.num_added += 1
            self._wait(item)

    def of(self, number: int) -> list[Item]:
        """What of a request has not ended."""
        return [i for i in (*self.waiting, *self.running, *self.short) if i.name[0] == number]

    def numbers(self) -> set[int]:
        """Requests that have not ended."""
        return {i.name[0] for i in (*self.waiting, *self.running, *self.short)}

    def cancel(self, number: int, *, forget: bool = False) -> None:
        for item in self.of(number):
            self._end(item, forget=forget)

    def retry(self, name: Hashable) -> bool:
        (item,) = (i for i in (*self.running, *self.short) if i.name == name)
        assert item.span is not None
        if item.span[1] - item.span[0] == 1:
            return False
        if item.is_long:
            item.span = None
            item.failures += 1
            return item.failures <= self.prefill.max_retries
        if not self.sequence_pool.can_hold(item.num_tokens):
            return False
        self._wait_again(item)
        return True

    def shrink(self, num_tokens: int) -> None:
        least = max(self.full // LEAST_SHARE, 1) if self.sequence_pool.can_hold(1) else self.max_seq_len
        self.budget = min(self.budget, max(num_tokens, least))
        self.num_good = 0

    def finish(self) -> list[int]:
        ended = []
        for item in self.batch:
            if item.span is None:
                continue
            num_tokens = item.span[1] - item.span[0]
            item.done, item.span, item.failures = item.span[1], None, 0
            num_own = sum(i.client == item.client for i in self.running) if item.client else 1
            item.due_s = max(item.due_s + num_tokens * self.token_s * num_own, self.front_s)
            item.pooled = max(item.pooled, item.done)
            if item.allocation is not None:
                self.sequence_pool.commit(item.allocation, item.done)
            if not item.left:
                self._end(item)
                ended += [] if self.of(item.name[0]) else [item.name[0]]
        if self.budget < self.full:
            self.num_good += 1
            if self.num_good == GOOD_STEPS:
                self.budget, self.num_good = min(2 * self.budget, self.full), 0
        return ended

    # What a batch is

    def schedule(self, now_s: float, free_tokens: int | None) -> Made:
        made = Made()
        self.token_s = self.pace.token_s or self.config.max_wait_s / self.full
        self.room = self.pace.budget(self.budget) if self.prefill.is_dynamic else self.budget
        if free_tokens is not None and self.prefill.is_dynamic:
            self.room = min(self.room, max(free_tokens, self.prefill.min_chunk_size))
        self._expire(self.running, now_s, made)
        window = self._short_window(now_s, made)
        has_long = bool(self.running) or any(item.is_long for item in self.waiting)
        self.batch = self._chunks(window, now_s, free_tokens, made) if has_long else []
        num_chunks = len(self.batch)
        for item in self._in_order(window, now_s):
            room = self.room - sum(end - start for _, start, end in map(_shown, self.batch))
            if not self._add_short(item, room if self.batch else max(room, item.num_tokens)):
                break
        self.had_whole = len(self.batch) > num_chunks
        self.batch.sort(key=lambda item: (_shown(item)[1] > 0, _shown(item)[2] - _shown(item)[1]))
        made.spans = list(map(_shown, self.batch))
        made.num_left = len(self.waiting)
        return made

    def _add_short(self, item: Item, room: int) -> bool:
        may_share = item.needs_last_row and len(item.keys) >= 2 and self.sequence_pool.can_hold(item.num_tokens)
        found = self.sequence_pool.find(item.keys, item.num_tokens - 1) if may_share else 0
        if len(self.batch) == self.config.max_num_seqs or item.num_tokens - found > room:
            return False
        if may_share and self._allocate(item) and item.allocation is not None:
            item.done = item.allocation.num_cached_tokens
        if item.left > room:
            return False  # it was found, but there is no memory to hold it
        self._take(item)
        self.short.append(item)
        self.batch.append(item)
        item.span = (item.done, item.num_tokens)
        return True

    def window(self, max_tokens: int, max_seqs: int, now_s: float, *, is_long: bool) -> list[Item]:
        """The next to come: always of the client that has had the fewest tokens with what is in the window already."""
        found: list[Item] = []
        next_ones: list[Item] = []  # that are in line once those before them have been found
        had = dict(self.clients.had)
        left = [i for i in self.waiting if i.is_long is is_long]
        begun = [i for i in left if i.in_line and not i.is_first]
        token_s = self.token_s * max(len(begun), 1) / BEGUN_SHARE
        while left and sum(i.num_tokens for i in found) < max_tokens and len(found) < max_seqs:
            client = min({i.client for i in left}, key=lambda name: (had[name], -self.clients.numbers[name]))
            line = [i for i in left if i.client == client and (i.in_line or i in next_ones)]
            item = min(line, key=lambda i: (i.turn_s, i.order))
            left.remove(item)
            found.append(item)
            had[client] += item.num_tokens
            behind = [i for i in left if i.name[0] == item.name[0] and not i.in_line and i not in next_ones]
            if behind and (item in next_ones or not item.stands_alone):
                front_s = min([now_s, *(i.turn_s for i in line if i.is_first and i is not item)])
                behind[0].turn_s = max(item.turn_s + item.num_tokens * token_s, front_s + min(item.lead_s, 0))
                next_ones.append(behind[0])
        return found

    def _short_window(self, now_s: float, made: Made) -> list[Item]:
        while True:
            found = self.window(WINDOW * self.budget, WINDOW // 2 * self.config.max_num_seqs, now_s, is_long=False)
            self._expire(found, now_s, made)
            live = [item for item in found if item in self.waiting]
            if live or not found:
                return live

    def _in_order(self, window: list[Item], now_s: float) -> list[Item]:
        overdue = [place for place, i in enumerate(window) if i.turn_s < now_s - self.config.max_wait_s]
        end = max([0, *overdue]) + 1
        rest = sorted(window[end:], key=lambda i: (abs(i.num_tokens - window[0].num_tokens), i.order))
        return window[:end] + rest

    def _chunks(self, window: list[Item], now_s: float, free_tokens: int | None, made: Made) -> list[Item]:
        others_wait = bool(window) or self.had_whole
        if self.prefill.is_dynamic:
            room = self.pace.allowance(others_wait=others_wait)
        else:
            room = self.room // 2 if others_wait else self.room
        room = min(max(room, self.prefill.min_chunk_size), self.room)
        places = self.config.max_num_seqs
        if window and not self.had_whole:
            room, places = min(room, self.room - window[0].num_tokens), places - 1
        if room < 1 or places < 1:
            return []
        self._start_long(room, now_s, made)
        firsts = [i for i in self.waiting if i.is_long and i.is_first]
        firsts.sort(key=lambda i: (i.turn_s, i.order))
        nexts = {i.client: i.rank_s for i in reversed(firsts)}
        self.front_s = min([now_s, *nexts.values()])
        free = 1.0 if free_tokens is None else min(free_tokens / self.prefill.chunk_size, 1.0)
        pool = self.sequence_pool.usage / 2 if self.waits_for_memory else 0.0
        self.pressure = max(1 - free, 1 - self.budget / self.full, pool)
        cut: list[Item] = []
        while room and places and (ready := [i for i in self.running if i.span is None]):
            item = min(ready, key=lambda i: i.due_s)
            size = min(self._size(), item.left)
            if room < min(self.prefill.min_chunk_size, size):
                break
            size = min(size, room)
            item.span = (item.done, item.done + size)
            cut.append(item)
            room, places = room - size, places - 1
        return cut

    def _size(self) -> int:
        size = self.prefill.chunk_size
        if not self.prefill.is_dynamic or not self.pressure:
            return size
        step = min(self.prefill.min_chunk_size, size)
        return max(step, int(size * (1 - self.pressure)) // step * step)

    def _start_long(self, room: int, now_s: float, made: Made) -> None:
        self.waits_for_memory = False
        while found := self.window(1, 1, now_s, is_long=True):
            self._expire(found, now_s, made)
            (item,) = found
            if item not in self.waiting:
                continue
            item.due_s = item.rank_s
            planned = sum(min(i.left, self.prefill.chunk_size) for i in self.running)
            if planned >= room and not all(item.due_s < i.due_s for i in self.running):
                return
            if not self._allocate(item):
                later = [i for i in self.running if _is_later(i, item)]
                later.sort(key=lambda i: (i.turn_s, i.order))
                for count in range(1, len(later) + 1):
                    victims = later[-count:][::-1]
                    held = [i.allocation for i in victims if i.allocation is not None]
                    if self.sequence_pool.has_room(item.num_tokens, after=held):
                        break
                else:
                    self.waits_for_memory = True
                    return
                for victim in victims:
                    self._wait_again(victim)
                    made.preempted.append(victim.name)
                assert self._allocate(item)
            self._take(item)
            assert item.allocation is not None
            item.done = item.cached = item.allocation.num_cached_tokens if item.allocation.block_ids else item.pooled
            self.running.append(item)

    def _allocate(self, item: Item) -> bool:
        readable = item.num_tokens - 1 if item.needs_last_row else item.pooled
        item.allocation = self.sequence_pool.allocate(item.name, item.num_tokens, item.keys, readable)
        return item.allocation is not None

    # Waiting and its end

    def _wait(self, item: Item) -> None:
        self.clients.come(item.client)
        self.waiting.append(item)

    def _take(self, item: Item) -> None:
        self.clients.had[item.client] += item.num_tokens - item.pooled
        self._leave_waiting(item)

    def _leave_waiting(self, item: Item) -> None:
        self.waiting.remove(item)
        behind = [i for i in self.waiting if i.name[0] == item.name[0] and i.is_long is item.is_long]
        if item.in_line and not item.stands_alone and not any(i.in_line and not i.stands_alone for i in behind):
            for other in behind:
                if not other.stands_alone:
                    other.in_line = True
                    break
        if not any(i.client == item.client for i in self.waiting):
            self.clients.go(item.client)

    def _wait_again(self, item: Item) -> None:
        self._release(item)
        item.is_long = item.in_line = item.stands_alone = True
        item.done = item.cached = 0
        self._wait(item)
        self.clients.had[item.client] -= item.num_tokens - item.pooled

    def _end(self, item: Item, *, forget: bool = False) -> None:
        if item in self.waiting:
            self._leave_waiting(item)
        self._release(item, forget=forget)

    def _release(self, item: Item, *, forget: bool = False) -> None:
        for items in (self.running, self.short):
            if item in items:
                items.remove(item)
        item.span = None
        if item.allocation is not None:
            self.sequence_pool.free(item.allocation, forget=forget)
            item.allocation = None

    def _expire(self, items: list[Item], now_s: float, made: Made) -> None:
        for item in list(items):
            is_live = item in self.waiting or item in self.running
            if is_live and item.deadline_s is not None and item.deadline_s <= now_s:
                self.cancel(item.name[0])
                made.expired.append(item.name[0])


def _is_later(item: Item, other: Item) -> bool:
    if item.client != other.client and item.turn_s - item.lead_s <= other.turn_s - other.lead_s:
        return False
    return item.turn_s > other.turn_s  # of all clients: an order has no circles


def _shown(item: Item) -> Span:
    assert item.span is not None
    return (item.name, *item.span)
