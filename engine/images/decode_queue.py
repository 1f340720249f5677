"""The queue of images before the threads that decode them: admission, order and memory.

Admission: the pixels of waiting and running requests have a limit, `max_queue_s` times the measured pixels per second.
Clients share it as they share the queue of tokens (engine/client/queue_admission.py).

Order: clients take turns by start-time fair queueing with pixels as service, as in engine/scheduling/fair_queue.py.
Within a client, the image with the earliest virtual deadline runs first: the start time of the client when the image
arrived, plus SLOWDOWN times its pixels. So smaller images overtake an image until the client has received SLOWDOWN
times its pixels. FairQueue has size classes instead, because it fills batches with requests of all sizes. An image runs
alone, so one sorted list for each client is enough.

Memory: an image that does not fit into the memory of running images lets others pass, up to its own pixels.

One more thread decodes small images while large ones run, so that they never wait for a large image.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from bisect import insort
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from ..daemon_threads import DaemonThreadPool
from ..host import trim_heap
from ..protocol.errors import EngineOverloadedError, EngineUnavailableError, RejectionReason, shutting_down
from ..protocol.params import CLIENT
from ..protocol.shared_resource import WorkLimit

T = TypeVar("T")

SLOWDOWN: Final = 8
"""Limit of the delay of an image by smaller ones of the same client, in times its own pixels."""
TRIM_BYTES: Final = 32 << 20
"""Decoded bytes after which free memory returns to the system. Smaller images reuse the memory of those before."""
SMALL_PIXELS: Final = 1 << 20
"""Pixels of a small image. It takes up to 12 ms and 20 MiB."""
_LARGE_SHARE: Final = 1 / 64
"""Requests above this share of the limit are large, see WorkLimit."""
_ASSUMED_RATE: Final = 40_000_000.0
"""Pixels per second of a thread before the first measurement. Lossless WebP takes 12 ns for a pixel, JPEG 2 ns."""
_MEASURED_S: Final = 1.0
"""Seconds of decoding of which the rate is the mean."""


@dataclass(slots=True, eq=False)
class _Image:
    """An image that waits or runs.

    Attributes:
        virtual_deadline: Sort key within the client, in pixels: the smallest runs first.
        job: Decodes the image.
        result: Result of `job`.
        num_overtaking: Pixels that started although this image came first, because it did not fit into the memory.
        uses_extra_thread: Whether it runs in the additional thread, outside the memory.
    """

    client: str
    num_pixels: int
    num_bytes: int
    virtual_deadline: float
    job: Callable[[], Any]
    result: asyncio.Future[Any]
    num_overtaking: int = 0
    uses_extra_thread: bool = False


class DecodeQueue:
    """Runs jobs that decode images, in threads. Belongs to one event loop.

    Args:
        num_threads: Images that are decoded at once, and one small image in addition.
        max_bytes: Memory of running images. An image that needs more runs while no other holds memory.
        max_queue_s: Seconds of decoding that may wait or run; inf: no limit.
        on_rejection: Called for every rejected request.
    """

    def __init__(
        self,
        num_threads: int,
        max_bytes: int,
        max_queue_s: float = math.inf,
        on_rejection: Callable[[], None] = lambda: None,
    ) -> None:
        self._num_threads = num_threads
        self._max_bytes = max_bytes
        self._on_rejection = on_rejection
        self._threads = DaemonThreadPool(num_threads + 1, "images")
        self._is_closed = False
        self._waiting: dict[str, list[_Image]] = {}  # by client, ordered by `virtual_deadline`
        self._starts: dict[str, float] = {}  # virtual start time of each client in pixels
        self._virtual_time = 0.0
        self._running = set[_Image]()
        self._used = self._peak = 0  # bytes
        self._measured_pixels, self._measured_s = _ASSUMED_RATE * _MEASURED_S, _MEASURED_S
        reason = RejectionReason.QUEUED_PIXELS
        self._work = WorkLimit(max_queue_s, _LARGE_SHARE, "the queue of images", "pixels", full=reason, share=reason)
        self._work.set_rate(self._rate)

    @contextlib.contextmanager
    def admitted(self, num_pixels: int) -> Iterator[None]:
        """Counts the pixels of a request in the queue.

        Raises:
            EngineOverloadedError: The queue is full. `retry_after_s` is set.
            EngineUnavailableError: The queue is closed.
        """
        self._check_open()
        client = CLIENT.get()
        rejection = self._work.rejection(client, num_pixels)
        if rejection is not None:
            self._on_rejection()
            raise EngineOverloadedError(
                f"{rejection.message} Please try again later.",
                retry_after_s=rejection.excess / self._rate,
                reason=rejection.reason,
            )
        self._work.add(client, num_pixels, 1)
        try:
            yield
        finally:
            self._work.add(client, num_pixels, -1)

    async def run(self, num_pixels: int, num_bytes: int, job: Callable[[], T]) -> T:
        """Runs a job in a thread. A cancelled job that has begun runs to its end.

        Args:
            num_pixels: Pixels of the image.
            num_bytes: Memory of the job.
            job: Decodes the image; its errors are raised.

        Raises:
            EngineUnavailableError: The queue is closed, or no thread can be started.
        """
        self._check_open()
        client = CLIENT.get()
        if client not in self._waiting:
            self._waiting[client] = []
            self._starts[client] = max(self._starts.get(client, 0.0), self._virtual_time)
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        image = _Image(client, num_pixels, num_bytes, self._starts[client] + SLOWDOWN * num_pixels, job, result)
        insort(self._waiting[client], image, key=lambda other: other.virtual_deadline)
        try:
            self._start_images()
            return await result
        finally:
            if image in self._waiting.get(client, ()):
                self._remove(image)
                self._start_images()  # it may have blocked others
            del image, result  # the traceback of an error refers to this frame

    def close(self) -> None:
        """Ends the threads after their running jobs. Waiting jobs fail with EngineUnavailableError."""
        self._is_closed = True
        self._threads.close()
        for image in [image for images in self._waiting.values() for image in images]:
            if not image.result.done():
                image.result.set_exception(shutting_down())

    def _check_open(self) -> None:
        """Raises EngineUnavailableError after `close`."""
        if self._is_closed:
            raise shutting_down()

    def _start_images(self) -> None:
        while not self._is_closed and (image := self._next_image()) is not None:
            self._remove(image)
            if image.result.done():  # cancelled, or failed by `close`
                continue
            self._virtual_time = max(self._virtual_time, self._starts[image.client])
            self._starts[image.client] += image.num_pixels
            try:
                future = self._threads.submit(image.job)
            except EngineUnavailableError as error:
                image.result.set_exception(error)
                continue
            self._running.add(image)
            if not image.uses_extra_thread:
                self._used += image.num_bytes
                self._peak = max(self._peak, self._used)
            future.add_done_callback(partial(_call, image.result.get_loop(), self._end, image, time.perf_counter()))

    def _next_image(self) -> _Image | None:
        """Returns the first image that can start."""
        extra = [image for image in self._running if image.uses_extra_thread]
        can_use_extra = not extra and any(image.num_pixels > SMALL_PIXELS for image in self._running)
        can_start = len(self._running) - len(extra) < self._num_threads
        if not can_start and not can_use_extra:
            return None
        blocked = list[_Image]()
        for client in sorted(self._waiting, key=self._starts.__getitem__):
            for image in self._waiting[client]:
                if can_start and (not self._used or self._used + image.num_bytes <= self._max_bytes):
                    for other in blocked:
                        other.num_overtaking += image.num_pixels
                    return image
                if can_use_extra and image.num_pixels <= SMALL_PIXELS:
                    image.uses_extra_thread = True
                    return image
                if can_start:
                    blocked.append(image)
                    can_start = image.num_overtaking < image.num_pixels
        return None

    def _end(self, image: _Image, began_s: float, future: Future[Any]) -> None:
        self._running.discard(image)
        seconds = time.perf_counter() - began_s
        left = max(1 - seconds / _MEASURED_S, 0.0)
        self._measured_pixels = self._measured_pixels * left + image.num_pixels
        self._measured_s = self._measured_s * left + seconds
        self._work.set_rate(self._rate)
        if not image.uses_extra_thread:
            self._used -= image.num_bytes
        if not self._used:
            if self._peak >= TRIM_BYTES:
                with contextlib.suppress(EngineUnavailableError):  # the next large image repeats it
                    self._threads.submit(trim_heap)
            self._peak = 0
        if not image.result.done():
            if (error := future.exception()) is not None:
                image.result.set_exception(error)
            else:
                image.result.set_result(future.result())
        self._start_images()
        if not self._running and not self._waiting:
            self._starts.clear()
            self._virtual_time = 0.0

    def _remove(self, image: _Image) -> None:
        images = self._waiting[image.client]
        images.remove(image)
        if not images:
            del self._waiting[image.client]

    @property
    def _rate(self) -> float:
        """Pixels per second of all threads."""
        return self._num_threads * self._measured_pixels / self._measured_s


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop has ended
        loop.call_soon_threadsafe(function, *args)
