"""Refusals go out together, at a bounded rate, the oldest first, and none waits for ever."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time

import pytest

from penstock.server.middleware import refusal_pace
from penstock.server.middleware.refusal_pace import LONGEST_S, PER_TICK, RefusalPace, longest_wait_s

TICK_S = 0.02


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_pace, "TICK_S", TICK_S)


def ticks(times_s: list[float]) -> list[int]:
    """Return how many went out in each tick, given when each did."""
    groups = [1]
    for earlier, later in itertools.pairwise(times_s):
        if later - earlier < TICK_S / 2:
            groups[-1] += 1
        else:
            groups.append(1)
    return groups


async def released(pace: RefusalPace, number: int) -> list[tuple[float, int]]:
    """Add so many at once; return when each went out, and which."""
    out: list[tuple[float, int]] = []

    def release(index: int) -> bool:
        out.append((time.monotonic(), index))
        return True

    for index in range(number):
        pace.add(functools.partial(release, index))
    assert not out
    while len(out) < number:
        await asyncio.sleep(TICK_S / 4)
    return out


@pytest.mark.parametrize(
    ("number", "groups"), [(1, [1]), (PER_TICK, [PER_TICK]), (2 * PER_TICK + 3, [PER_TICK, PER_TICK, 3])]
)
async def test_so_many_a_tick_in_their_order(number: int, groups: list[int]) -> None:
    pace = RefusalPace(max_waiting=1000)
    for _ in range(2):  # after a pause it begins anew
        out = await released(pace, number)
        assert [index for _, index in out] == list(range(number))
        assert ticks([time_s for time_s, _ in out]) == groups


async def test_no_refusal_waits_longer_than_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_pace, "LONGEST_S", 3 * TICK_S)
    out = await released(RefusalPace(max_waiting=10_000), 1000)
    groups = ticks([time_s for time_s, _ in out])
    assert groups[:2] == [PER_TICK] * 2
    assert len(groups) <= 4


async def test_more_than_may_wait_go_out_at_once() -> None:
    out = await released(RefusalPace(max_waiting=15), 100)
    assert ticks([time_s for time_s, _ in out]) == [85, PER_TICK, 5]


async def test_one_that_fails_stops_none_behind_it() -> None:
    pace = RefusalPace(max_waiting=1000)
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))

    def fail() -> bool:
        raise ValueError("sent to nobody")

    pace.add(fail)
    assert len(await released(pace, 3)) == 3
    assert [str(failure) for failure in failures] == ["sent to nobody"]


async def test_a_turn_whose_request_was_cancelled_is_passed_over() -> None:
    pace = RefusalPace(max_waiting=1000)

    async def take() -> None:
        await pace.turn()

    tasks = [asyncio.create_task(take()) for _ in range(2)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await tasks[1]
    assert tasks[0].cancelled()


async def test_turns_are_counted_unless_their_request_was_cancelled() -> None:
    pace = RefusalPace(max_waiting=1000)
    times_s: list[float] = []

    async def take() -> None:
        await pace.turn()
        times_s.append(time.monotonic())

    tasks = [asyncio.create_task(take()) for _ in range(2 * PER_TICK + 1)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert ticks(times_s) == [PER_TICK, PER_TICK]


@pytest.mark.parametrize("num_left", [1, PER_TICK - 1, 10 * PER_TICK + 1])
async def test_what_did_not_go_out_takes_nobodys_place(num_left: int) -> None:
    pace = RefusalPace(max_waiting=1000)
    for _ in range(num_left):
        pace.add(lambda: False)
    out = await released(pace, PER_TICK)
    assert ticks([time_s for time_s, _ in out]) == [PER_TICK]


async def test_who_can_wait_for_less_goes_first() -> None:
    pace = RefusalPace(max_waiting=1000)
    order: list[float] = []

    def release(within_s: float) -> bool:
        order.append(within_s)
        return True

    for within_s in (2.0, 2.0, 0.5, 1.0, 9.0):
        pace.add(functools.partial(release, within_s), within_s=within_s)
    await released(pace, 1)
    assert order == [0.5, 1.0, 2.0, 2.0, 9.0]


@pytest.mark.parametrize(("header", "longest_s"), [(None, LONGEST_S), (b"1.5", 0.75), (b"0.002", 0.001), (b"60", 30.0)])
def test_half_of_the_time_that_its_client_waits_is_left(header: bytes | None, longest_s: float) -> None:
    headers = [] if header is None else [(b"x-request-timeout", header)]
    assert longest_wait_s({"headers": headers}) == longest_s
