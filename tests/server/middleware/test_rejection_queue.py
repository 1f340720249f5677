"""RejectionQueue sends rejections at a bounded rate, in the order of their latest times."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from penstock.server.middleware import rejection_queue
from penstock.server.middleware.rejection_queue import (
    MAX_DELAY_S,
    REJECTIONS_PER_TICK,
    TICK_S,
    RejectionQueue,
    max_delay_s,
)


class Clock:
    """An event loop with a time set by the test."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.time = lambda: self.now_s
        self.due: list[Callable[[], None]] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        assert delay_s == TICK_S
        self.due.append(call)

    def create_future(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    def tick(self, seconds: float = TICK_S) -> bool:
        """Advances the time. Returns whether a call was due."""
        self.now_s += seconds
        due, self.due = self.due, []
        for call in due:
            call()
        return bool(due)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rejection_queue, "asyncio", SimpleNamespace(get_running_loop=lambda: clock))
    return clock


def released(queue: RejectionQueue, clock: Clock, limits_s: list[float]) -> list[list[int]]:
    """Adds a rejection for each limit. Returns the indices that each tick released."""
    waiting = {index: queue.wait(within_s=within_s) for index, within_s in enumerate(limits_s)}
    ticks = []
    while clock.tick():
        ticks.append([index for index, may_send in waiting.items() if may_send.done()])
        for index in ticks[-1]:
            del waiting[index]
    return ticks


def sizes(ticks: list[list[int]]) -> list[int]:
    return [len(tick) for tick in ticks]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1, [1]),
        (REJECTIONS_PER_TICK, [REJECTIONS_PER_TICK]),
        (2 * REJECTIONS_PER_TICK + 3, [REJECTIONS_PER_TICK, REJECTIONS_PER_TICK, 3]),
    ],
)
async def test_each_tick_releases_a_bounded_number_in_order(clock: Clock, number: int, expected: list[int]) -> None:
    queue = RejectionQueue(max_waiting=1000)
    for _ in range(2):  # and again after a pause
        ticks = released(queue, clock, [MAX_DELAY_S] * number)
        assert [index for tick in ticks for index in tick] == list(range(number))
        assert sizes(ticks) == expected


async def test_rejections_above_the_maximum_are_sent_at_once(clock: Clock) -> None:
    ticks = released(RejectionQueue(max_waiting=15), clock, [MAX_DELAY_S] * 100)
    assert sizes(ticks) == [85, REJECTIONS_PER_TICK, 5]


async def test_cancelled_requests_are_not_counted(clock: Clock) -> None:
    queue = RejectionQueue(max_waiting=1000)
    waits = [asyncio.ensure_future(queue.wait()) for _ in range(2 * REJECTIONS_PER_TICK + 1)]
    waits[0].cancel()
    for num_done in (REJECTIONS_PER_TICK, 2 * REJECTIONS_PER_TICK):
        assert clock.tick()
        assert sum(wait.done() and not wait.cancelled() for wait in waits) == num_done
    assert not clock.due


async def test_rejection_with_the_earliest_limit_goes_first(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_queue, "REJECTIONS_PER_TICK", 1)
    ticks = released(RejectionQueue(max_waiting=1000), clock, [2.0, 2.0, 0.5, 1.0, 9.0])
    assert ticks == [[2], [3], [0], [1], [4]]


@pytest.mark.parametrize(
    ("header", "longest_s"), [(None, MAX_DELAY_S), (b"1.5", 0.75), (b"0.002", 0.001), (b"60", 30.0)]
)
def test_rejection_leaves_half_of_the_deadline(header: bytes | None, longest_s: float) -> None:
    headers = [] if header is None else [(b"x-request-timeout", header)]
    assert max_delay_s({"headers": headers}) == longest_s
