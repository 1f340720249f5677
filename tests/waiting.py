"""Waits for conditions, so that no test depends on the speed of the machine."""

import asyncio
import contextlib
import time
from asyncio import sleep
from collections.abc import Callable, Iterator

TIMEOUT_S = 120.0
"""Ends a test if its condition never holds."""
_LOOK_EVERY_S = 0.005


async def until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Waits until `condition()` holds, without blocking the event loop.

    Raises:
        TimeoutError: It did not hold within `timeout_s` seconds.
    """
    async with asyncio.timeout(timeout_s):
        while not condition():
            await sleep(_LOOK_EVERY_S)


def wait_until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Waits until `condition()` holds.

    Raises:
        TimeoutError: It did not hold within `timeout_s` seconds.
    """
    give_up_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"the condition did not hold within {timeout_s:g} s")
        time.sleep(_LOOK_EVERY_S)


async def loop_iterations(number: int = 20) -> None:
    """Lets the event loop run `number` iterations."""
    for _ in range(number):
        await sleep(0)


@contextlib.contextmanager
def later(seconds: float = 3600.0) -> Iterator[None]:
    """Sets the clock of the running event loop ahead, so that timers within `seconds` fire."""
    loop = asyncio.get_running_loop()
    clock = loop.time
    loop.time = lambda: clock() + seconds  # type: ignore[method-assign]
    try:
        yield
    finally:
        loop.time = clock  # type: ignore[method-assign]
