import asyncio
from unittest.mock import Mock

import pytest

from penstock.server.batches.line_limiter import AHEAD_S, MAX_CONCURRENT_LINES, QUIET_S, ClientTraffic, LineLimiter

from ...clock import Clock
from ...waiting import loop_iterations

MAX_BYTES = 1000


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def traffic(clock: Clock) -> ClientTraffic:
    return ClientTraffic(clock)


@pytest.fixture
def limiter(traffic: ClientTraffic, clock: Clock) -> LineLimiter:
    return LineLimiter(traffic, 0.1, MAX_BYTES, clock)


async def enter_all(limiter: LineLimiter, num_bytes: int = 1) -> int:
    """Let lines run until the limiter is full. Returns their number."""
    count = 0
    while limiter.has_capacity(num_bytes):
        await limiter.acquire(num_bytes)
        count += 1
    return count


def run(limiter: LineLimiter, clock: Clock, seconds: float) -> None:
    with limiter.run():
        clock.now_s += seconds


async def test_quick_lines_raise_the_number_of_lines(limiter: LineLimiter, clock: Clock) -> None:
    assert await enter_all(limiter) == 1
    for _ in range(8):
        run(limiter, clock, 0.5 * AHEAD_S)
    assert await enter_all(limiter) == 2
    for _ in range(1000):
        run(limiter, clock, 0.5 * AHEAD_S)
    await enter_all(limiter)
    assert limiter.num_lines == MAX_CONCURRENT_LINES


@pytest.fixture
def wide_limiter(limiter: LineLimiter, clock: Clock) -> LineLimiter:
    """A limiter that admits many lines."""
    for _ in range(100):
        run(limiter, clock, 0.0)
    return limiter


async def test_slow_or_rejected_lines_lower_the_number_of_lines(wide_limiter, clock) -> None:
    wide_limiter.reject()  # from 26 to 13
    run(wide_limiter, clock, 2 * AHEAD_S)  # to 11.7
    assert await enter_all(wide_limiter) == 11
    for _ in range(11):
        wide_limiter.release(1)
    for lower in (wide_limiter.reject, lambda: run(wide_limiter, clock, 2 * AHEAD_S)):
        for _ in range(30):
            lower()
        assert await enter_all(wide_limiter) == 1, "one line may always run"
        wide_limiter.release(1)


async def test_lines_run_after_a_pause_of_live_requests(wide_limiter, traffic, clock) -> None:
    run(wide_limiter, clock, 0.01)
    with traffic.running():
        assert not wide_limiter.has_capacity(1)
        clock.now_s += 0.01
    clock.now_s += QUIET_S - 1e-6
    assert not wide_limiter.has_capacity(1)
    clock.now_s += 2e-6
    assert await enter_all(wide_limiter) > 1


async def test_lines_run_in_their_share_of_a_constant_load(wide_limiter, traffic, clock) -> None:
    with traffic.running():
        assert await enter_all(wide_limiter) == 1
        run(wide_limiter, clock, 2.0)  # a tenth of the time: clients get 18 s
        wide_limiter.release(1)
    for _ in range(179):  # the next request always comes within QUIET_S
        with traffic.running():
            clock.now_s += 0.1
            assert not wide_limiter.has_capacity(1)
    with traffic.running():
        clock.now_s += 0.2
        assert await enter_all(wide_limiter) == 1
        run(wide_limiter, clock, 1000.0)
        wide_limiter.release(1)
        clock.now_s += 59.9
        assert not wide_limiter.has_capacity(1)
        clock.now_s += 0.2
        assert wide_limiter.has_capacity(1)


async def test_bytes_of_running_lines_are_bounded(wide_limiter, clock) -> None:
    assert await enter_all(wide_limiter, 300) == 3
    assert wide_limiter.has_capacity(100)
    wide_limiter.release(300)
    assert await enter_all(wide_limiter, 300) == 1
    with wide_limiter.count_response(50):
        assert not wide_limiter.has_capacity(100), "a response counts until it is on the disk"
    assert wide_limiter.has_capacity(100)


async def test_waiting_line_enters_when_another_leaves(limiter: LineLimiter, clock: Clock, monkeypatch) -> None:
    monkeypatch.setattr("penstock.server.batches.line_limiter.QUIET_S", 3600)
    monkeypatch.setattr(limiter, "has_capacity", checks := Mock(wraps=limiter.has_capacity))
    await limiter.acquire(1)
    waiting = [asyncio.create_task(limiter.acquire(1)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    await loop_iterations()
    assert (waiting[1].done(), checks.call_count) == (False, 3), "it waits without checking"
    limiter.release(1)
    async with asyncio.timeout(60):
        await waiting[1]
    assert waiting[0].cancelled()
    assert limiter.num_lines == 1
    for _ in range(4):
        run(limiter, clock, 0.0)  # two lines may run
    with limiter.count_response(MAX_BYTES):
        waits_for_space = asyncio.create_task(limiter.acquire(1))
        await loop_iterations()
        assert not waits_for_space.done()
    async with asyncio.timeout(60):
        await waits_for_space


async def test_line_outside_the_window_lets_another_enter(limiter: LineLimiter) -> None:
    await limiter.acquire(7)
    async with limiter.released(7):
        assert (limiter.num_lines, limiter.num_bytes) == (0, 0)
        assert await enter_all(limiter) == 1
        limiter.release(1)
    assert (limiter.num_lines, limiter.num_bytes) == (1, 7)
    with pytest.raises(asyncio.CancelledError):
        async with limiter.released(7):
            raise asyncio.CancelledError
    assert (limiter.num_lines, limiter.num_bytes) == (1, 7), "a cancelled line leaves later, too"
