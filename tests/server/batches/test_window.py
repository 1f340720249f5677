"""When lines run: many at once where nobody asks, one now and then where clients do."""

import asyncio

import pytest

from penstock.server.batches.window import AHEAD_S, LONGEST_PAUSE_S, MOST_LINES, QUIET_S, LiveTraffic, Window


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def traffic(clock: Clock) -> LiveTraffic:
    return LiveTraffic(clock)


@pytest.fixture
def window(traffic: LiveTraffic, clock: Clock) -> Window:
    return Window(traffic, 0.1, clock)


async def can_enter(window: Window) -> bool:
    try:
        async with asyncio.timeout(0.05):
            await window.enter()
    except TimeoutError:
        return False
    return True


def run(window: Window, clock: Clock, seconds: float) -> None:
    with window.run():
        clock.now_s += seconds


async def test_lines_grow_in_number_while_they_are_quick(window: Window, clock: Clock) -> None:
    assert await can_enter(window)
    assert not await can_enter(window)
    for _ in range(8):
        run(window, clock, 0.5 * AHEAD_S)
    assert [await can_enter(window) for _ in range(3)] == [True, True, False]
    for _ in range(1000):
        run(window, clock, 0.5 * AHEAD_S)
    while window.num_lines < MOST_LINES:
        assert await can_enter(window)
    assert not await can_enter(window)


async def test_lines_become_fewer_when_they_are_slow_or_refused(window: Window, clock: Clock) -> None:
    for _ in range(12):
        run(window, clock, 0.0)
    run(window, clock, 2 * AHEAD_S)
    window.refuse()
    assert await can_enter(window)
    assert not await can_enter(window)
    window.leave()
    for _ in range(20):
        window.refuse()
    assert await can_enter(window), "one always may"


async def test_while_clients_ask_lines_take_their_share_one_by_one(window, traffic, clock) -> None:
    for _ in range(100):
        run(window, clock, 0.0)
    with traffic.request():
        assert await can_enter(window)
        assert not await can_enter(window)
        run(window, clock, 2.0)  # at a share of a tenth, 18 s are the clients'
        window.leave()
        assert not await can_enter(window)
        clock.now_s += 17.9
        assert not await can_enter(window)
        clock.now_s += 0.2
        assert await can_enter(window)
        run(window, clock, 1000.0)
        window.leave()
        clock.now_s += LONGEST_PAUSE_S - 0.1
        assert not await can_enter(window)
        clock.now_s += 0.2
        assert await can_enter(window)
    assert not await can_enter(window)
    clock.now_s += QUIET_S - 0.1
    assert traffic.is_busy
    clock.now_s += 0.2
    assert not traffic.is_busy
    assert await can_enter(window)


async def test_who_waits_hears_that_a_line_has_left_and_may_be_cancelled(window: Window) -> None:
    await window.enter()
    waiting = [asyncio.create_task(window.enter()) for _ in range(2)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    await asyncio.sleep(0)
    window.leave()
    async with asyncio.timeout(1):
        await waiting[1]
    assert waiting[0].cancelled()
    assert window.num_lines == 1


async def test_a_line_outside_has_no_place_and_takes_another_one_in_the_end(window: Window) -> None:
    await window.enter()
    async with window.outside():
        assert window.num_lines == 0
        assert await can_enter(window)
        window.leave()
    assert window.num_lines == 1

    async def stay() -> None:
        async with window.outside():
            await asyncio.sleep(10)

    waiting = asyncio.create_task(stay())
    await asyncio.sleep(0)
    assert window.num_lines == 0
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert window.num_lines == 1, "whoever has entered leaves"
