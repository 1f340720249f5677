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
    """Waits until `condition()` holds. A slow condition is checked less often, which leaves time to the server.

    Raises:
        TimeoutError: It did not hold within `timeout_s` seconds.
    """
    began_s = look_s = time.monotonic()
    while not condition():
        now_s = time.monotonic()
        if now_s > began_s + timeout_s:
            raise TimeoutError(f"the condition did not hold within {timeout_s:g} s")
        time.sleep(min(max(_LOOK_EVERY_S, now_s - look_s), 0.1))
        look_s = time.monotonic()


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
