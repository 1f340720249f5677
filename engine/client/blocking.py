"""Calls that block, for code without an event loop: a loop in a thread, and long lists in slices with progress."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from tqdm import tqdm

from ..protocol.errors import EngineError, EngineUnavailableError

_SLICE: Final = 256
"""Inputs of one request to the engine: enough for full batches, few enough for a progress bar that moves."""
_IN_FLIGHT: Final = 2

Output = TypeVar("Output")
Result = TypeVar("Result")
Call = Callable[[list[Any]], Awaitable[list[Output]]]


class LoopThread:
    """An event loop in a thread of its own, for callers that have none."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-llm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs `work` on the loop and waits for it; an interrupt of the wait cancels it.

        Raises:
            EngineUnavailableError: The thread has ended.
        """
        if self._loop.is_closed():
            work.close()
            raise EngineUnavailableError("The engine was closed.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def in_slices(call: Call[Output], inputs: Sequence[Any], *, shows_progress: bool) -> list[Output]:
    """Runs slices of the inputs, the next one while one runs, and returns their outputs in order.

    Args:
        call: Returns an output for each input of a slice.
        inputs: Inputs to run, any number.
        shows_progress: Show a bar where there is more than one slice.

    Raises:
        EngineError: Of the first slice that fails; the others are cancelled.
    """
    is_hidden = not shows_progress or len(inputs) <= _SLICE
    outputs: list[Output] = []
    in_flight: deque[asyncio.Task[list[Output]]] = deque()
    starts = iter(range(0, len(inputs), _SLICE))
    try:
        with tqdm(total=len(inputs), unit=" inputs", dynamic_ncols=True, disable=is_hidden) as progress:
            while len(outputs) < len(inputs):
                while len(in_flight) < _IN_FLIGHT and (start := next(starts, None)) is not None:
                    in_flight.append(asyncio.ensure_future(_slice(call, inputs, start)))
                done = await in_flight.popleft()
                outputs += done
                progress.update(len(done))
    finally:
        for task in in_flight:
            task.cancel()
        await asyncio.gather(*in_flight, return_exceptions=True)
    return outputs


async def _slice(call: Call[Output], inputs: Sequence[Any], start: int) -> list[Output]:
    try:
        return await call(list(inputs[start : start + _SLICE]))
    except EngineError as error:
        if start:
            error.add_note(f"Inputs are counted from {start} on, where this part of the list begins.")
        raise
