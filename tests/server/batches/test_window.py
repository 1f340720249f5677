"""When lines of batches run, with a test clock."""

import asyncio

import pytest

from penstock.server.batches.window import AHEAD_S, LONGEST_PAUSE_S, MOST_LINES, QUIET_S, LiveTraffic, Window

from ...clock import Clock

MAX_BYTES = 1000


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def traffic(clock: Clock) -> LiveTraffic:
    return LiveTraffic(clock)


@pytest.fixture
def window(traffic: LiveTraffic, clock: Clock) -> Window:
    return Window(traffic, 0.1, MAX_BYTES, clock)


async def enter_all(window: Window, num_bytes: int = 1) -> int:
    """Let lines enter while there is room; return their number."""
    count = 0
    while window.has_room(num_bytes):
        await window.enter(num_bytes)
        count += 1
    return count


def run(window: Window, clock: Clock, seconds: float) -> None:
    with window.run():
        clock.now_s += seconds


async def test_quick_lines_raise_the_number_at_once(window: Window, clock: Clock) -> None:
    assert await enter_all(window) == 1
    for _ in range(8):
        run(window, clock, 0.5 * AHEAD_S)
    assert await enter_all(window) == 2
    for _ in range(1000):
        run(window, clock, 0.5 * AHEAD_S)
    await enter_all(window)
    assert window.num_lines == MOST_LINES


async def test_slow_or_refused_lines_lower_the_number(window: Window, clock: Clock) -> None:
    for _ in range(12):
        run(window, clock, 0.0)
    run(window, clock, 2 * AHEAD_S)
    window.refuse()
    assert await enter_all(window) == 1
    window.leave(1)
    for _ in range(20):
        window.refuse()
    assert await enter_all(window) == 1, "one line may always run"


async def test_lines_use_the_time_between_live_requests(window, traffic, clock) -> None:
    """A client asks once a second and is answered in 10 ms: lines run in all but 30 ms of each second."""
    for _ in range(100):
        run(window, clock, 0.0)
    run(window, clock, 0.01)
    begun = 0
    for _ in range(100):
        traffic.begin()
        assert not window.has_room(1), "a live request is under way"
        clock.now_s += 0.01
        traffic.end()
        assert not window.has_room(1), "the next one may follow at once"
        clock.now_s += QUIET_S + 1e-6
        second_ends_s = clock.now_s + 0.99 - QUIET_S
        while clock.now_s < second_ends_s:
            assert window.has_room(1)
            await window.enter(1)
            run(window, clock, 0.01)
            window.leave(1)
            begun += 1
    assert begun >= 100 * 90, "less than 90 % of the lines that run without the client"


async def test_constant_live_load_leaves_lines_their_share(window, traffic, clock) -> None:
    for _ in range(100):
        run(window, clock, 0.0)
    traffic.begin()
    assert await enter_all(window) == 1
    run(window, clock, 2.0)  # the share is a tenth: 18 s belong to clients
    window.leave(1)
    traffic.end()
    for _ in range(179):  # the next request always comes within QUIET_S
        traffic.begin()
        clock.now_s += 0.1
        assert not window.has_room(1)
        traffic.end()
    traffic.begin()
    clock.now_s += 0.2
    assert await enter_all(window) == 1
    run(window, clock, 1000.0)
    window.leave(1)
    clock.now_s += LONGEST_PAUSE_S - 0.1
    assert not window.has_room(1)
    clock.now_s += 0.2
    assert window.has_room(1)
    traffic.end()


async def test_bytes_of_lines_at_once_are_bounded(window, clock) -> None:
    for _ in range(100):
        run(window, clock, 0.0)
    assert await enter_all(window, 300) == 3
    assert window.has_room(100)
    window.leave(300)
    assert await enter_all(window, 300) == 1
    with window.hold_response(50):
        assert not window.has_room(100), "an answer that is not on the disk counts"
    assert window.has_room(100)


async def test_line_above_the_bound_runs_alone(window, clock) -> None:
    for _ in range(100):
        run(window, clock, 0.0)
    await window.enter(1)
    assert not window.has_room(MAX_BYTES + 1)
    window.leave(1)
    await window.enter(MAX_BYTES + 1)
    assert not window.has_room(1)
    window.leave(MAX_BYTES + 1)
    assert (window.num_lines, window.num_bytes) == (0, 0)


async def test_waiting_line_enters_when_one_leaves(window: Window) -> None:
    await window.enter(1)
    waiting = [asyncio.create_task(window.enter(1)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    assert not waiting[1].done()
    window.leave(1)
    async with asyncio.timeout(60):
        await waiting[1]
    assert waiting[0].cancelled()
    assert window.num_lines == 1


async def test_line_outside_gives_its_place_to_others(window: Window) -> None:
    await window.enter(7)
    async with window.outside(7):
        assert (window.num_lines, window.num_bytes) == (0, 0)
        assert await enter_all(window) == 1
        window.leave(1)
    assert (window.num_lines, window.num_bytes) == (1, 7)

    async def stay() -> None:
        async with window.outside(7):
            await asyncio.Event().wait()

    waiting = asyncio.create_task(stay())
    await asyncio.sleep(0)
    assert window.num_lines == 0
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (window.num_lines, window.num_bytes) == (1, 7), "a line that has entered leaves, even when it is cancelled"
