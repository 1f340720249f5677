"""DecodeQueue: the order of images, their memory, and admission by measured seconds of decoding."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from penstock.engine.images import decode_queue
from penstock.engine.images.decode_queue import SMALL_PIXELS, DecodeQueue
from penstock.engine.protocol.errors import EngineOverloadedError, EngineUnavailableError
from penstock.engine.protocol.params import CLIENT

from ...clock import Clock
from ...tables import cases
from ...waiting import loop_iterations


class _Threads:
    """Records the jobs that begin; the test ends them."""

    def __init__(self, num_threads: int, name: str) -> None:
        self.begun = list[str]()
        self.running = dict[str, Future[None]]()

    def submit(self, job: Callable[[], str]) -> Future[None]:
        self.begun.append(job())
        return self.running.setdefault(self.begun[-1], Future())


@cases(__file__, "num_threads", "events", "expected")
async def test_images_begin_in_order(
    monkeypatch: pytest.MonkeyPatch, num_threads: int, events: str, expected: list[str]
) -> None:
    """Events: "a3:40" is an image of client a with 3 SMALL_PIXELS and 40 bytes; "-a3" ends it, "!a3" cancels it."""
    monkeypatch.setattr(decode_queue, "DaemonThreadPool", _Threads)
    monkeypatch.setattr(decode_queue, "trim_heap", lambda: "trim")
    monkeypatch.setattr(decode_queue, "TRIM_BYTES", 90)
    queue = DecodeQueue(num_threads, 100)
    threads = queue._threads
    assert isinstance(threads, _Threads)
    tasks, begun = dict[str, asyncio.Task[str]](), list[str]()

    async def run(name: str, num_bytes: int) -> str:
        CLIENT.set(name[0])
        return await queue.run(int(name[1:]) * SMALL_PIXELS, num_bytes, lambda: name)

    for event in events.split():
        if event[0] == "-":
            threads.running.pop(event[1:]).set_result(None)
        elif event[0] == "!":
            tasks[event[1:]].cancel()
        else:
            name, num_bytes = event.split(":")
            tasks[name] = asyncio.create_task(run(name, int(num_bytes)))
        for _ in range(6):
            await asyncio.sleep(0)
        begun.append(" ".join(threads.begun))
        threads.begun.clear()
    assert begun == expected
    for task in tasks.values():
        task.cancel()


async def test_queue_is_limited_to_seconds_at_the_measured_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rejections = Clock(), list[int]()
    monkeypatch.setattr(decode_queue, "time", SimpleNamespace(perf_counter=clock))
    queue = DecodeQueue(2, 100, max_queue_s=0.5, on_rejection=lambda: rejections.append(1))
    for seconds, num_pixels, held in ((0.5, 80_000_000, "5"), (2.0, 220_000_000, "4.55")):
        await queue.run(num_pixels, 0, lambda seconds=seconds: setattr(clock, "now_s", clock.now_s + seconds))
        message = f"for large requests is full: other requests hold {held} seconds of work; the limit is 0.25 "
        with queue.admitted(10**9), pytest.raises(EngineOverloadedError, match=message):
            queue.admitted(10**9).__enter__()
    rate, share = 220_000_000, 110_000_000 // 64
    for _ in range(2):  # all is released at the end
        with ExitStack() as admitted:
            for num_pixels in (110_000_000 - 1, share + 1):  # each counts as a share for smaller requests
                admitted.enter_context(queue.admitted(num_pixels))
            message = rf"Requests of more than {share} pixels are large; yours has {share + 1}\. .* Please try again"
            with pytest.raises(EngineOverloadedError, match=message) as caught:
                queue.admitted(share + 1).__enter__()
            assert caught.value.retry_after_s == (110_000_000 + share + 1 - 55_000_000) / rate
            for _ in range(62):
                admitted.enter_context(queue.admitted(share))
            message = r"queue of images is full: other requests hold 0\.5 seconds of work; the limit is 0\.5 \(--max"
            with pytest.raises(EngineOverloadedError, match=message) as caught:
                queue.admitted(1).__enter__()
            assert (caught.value.retry_after_s, caught.value.reason) == (1 / rate, "queued_pixels")
    assert len(rejections) == 6
    queue.close()
    with pytest.raises(EngineUnavailableError, match="shutting down"):
        queue.admitted(1).__enter__()


async def test_image_cancelled_before_its_turn_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_queue, "DaemonThreadPool", _Threads)
    queue = DecodeQueue(1, 100)
    running, cancelled, last = (asyncio.ensure_future(queue.run(1, 0, lambda n=n: n)) for n in "abc")
    await loop_iterations()
    queue._threads.running["a"].set_result(None)
    cancelled.cancel()  # the event loop handles the end of "a" before
    await running
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await loop_iterations()
    assert queue._threads.begun == ["a", "c"]
    last.cancel()
