"""Decodes and preprocesses images in worker threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from ..daemon_threads import DaemonThreads
from ..host import trim_heap
from ..protocol.config import IMAGE_MEMORY
from ..protocol.errors import (
    EngineUnavailableError,
    MachineError,
    RejectionReason,
    RequestCancelledError,
    drop_tracebacks,
)
from ..protocol.images import ImageInput, ImagePatches, ImageSpec
from .header import ImageError
from .image_file import ImageFile, ImageLimits, read_image_file

TRIM_BYTES: Final = 32 << 20
"""Decoded bytes after which free memory returns to the system. Smaller images reuse the memory of those before."""
INSTALL: Final = "pip install 'penstock[images]'"


@dataclass(slots=True)
class ImageStats:
    """Counters of the images of one model.

    Attributes:
        num_images: Images that were decoded and preprocessed.
        decoding_s: Seconds of the worker threads for these images.
        num_failures: Images that could not be decoded.
    """

    num_images: int = 0
    decoding_s: float = 0.0
    num_failures: int = 0


class ImagePreprocessor:
    """Decodes and preprocesses the images of one model. Safe to use from many tasks of one event loop.

    A request occupies each worker with at most one image at a time, so that the images of other requests run in
    between. After an error or a cancellation, at most the images that have begun are completed.

    Args:
        spec: The preprocessing of the model.
        num_workers: Threads, and images that are decoded at the same time.
        limits: Limits of an image.
        max_decoding_bytes: Memory for images that are being decoded. An image that needs more is decoded alone.

    Raises:
        MachineError: Pillow is not installed.

    Attributes:
        stats: Counters since the start.
    """

    def __init__(
        self,
        spec: ImageSpec,
        *,
        num_workers: int,
        limits: ImageLimits = ImageLimits(),  # noqa: B008 - immutable
        max_decoding_bytes: int = IMAGE_MEMORY,
    ) -> None:
        self.spec = spec
        self.stats = ImageStats()
        self._stats_lock = threading.Lock()
        self._process = _load_process(spec)
        self._limits = limits
        self._memory = _DecodingMemory(max_decoding_bytes)
        self._num_workers = num_workers
        self._threads = DaemonThreads(num_workers, "images")
        self._is_closed = False

    async def preprocess(
        self, images: Sequence[ImageInput], positions: Sequence[int] | None = None
    ) -> list[ImagePatches]:
        """Returns the patches of each image.

        Args:
            images: At least one.
            positions: Position of each among the inputs of the request, for the messages of images without a place;
                None: 0, 1, 2 and so on.

        Raises:
            InvalidRequestError: An image has an unsupported format, is corrupt, or exceeds a limit. The message names
                its place.
            EngineUnavailableError: The preprocessor is closed.
        """
        patches: list[ImagePatches | None] = [None] * len(images)
        has_ended = threading.Event()
        indices = iter(range(len(images)))

        async def preprocess_next() -> None:
            for index in indices:
                position = index if positions is None else positions[index]
                patches[index] = await self._run(images[index], position, has_ended.is_set)

        try:
            if len(images) == 1:
                await preprocess_next()
            else:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self._num_workers, len(images))):
                        group.create_task(preprocess_next())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            has_ended.set()
        return [each for each in patches if each is not None]

    def close(self) -> None:
        """Ends the worker threads. Waiting requests fail with EngineUnavailableError."""
        self._is_closed = True
        self._threads.close()

    async def _run(self, image: ImageInput, index: int, is_cancelled: Callable[[], bool]) -> ImagePatches:
        self._check_open()
        try:
            future = self._threads.submit(partial(self._work, image, index, is_cancelled))
        except RuntimeError as error:  # no thread can be started
            raise EngineUnavailableError(f"The server cannot decode images at the moment: {error}.") from None
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # `close` cancelled it
                self._check_open()
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineUnavailableError("The server is shutting down.", reason=RejectionReason.DRAINING) from None

    def _work(self, image: ImageInput, index: int, is_cancelled: Callable[[], bool]) -> ImagePatches:
        """Runs in a worker thread."""
        try:
            file = read_image_file(image.data, self._limits)
            with self._memory.hold(file.num_bytes):
                if is_cancelled():
                    raise RequestCancelledError("The request has ended.")
                began_s = time.perf_counter()
                patches = self._process(file)
            with self._stats_lock:
                self.stats.num_images += 1
                self.stats.decoding_s += time.perf_counter() - began_s
            return patches
        except ImageError as error:
            with self._stats_lock:
                self.stats.num_failures += 1
            raise image.error(index, str(error)) from None
        except Exception as error:
            drop_tracebacks(error)  # the frames refer to the image
            raise


class _DecodingMemory:
    """Limits the memory of running threads. Threads wait in the order of their arrival.

    When no thread holds memory any more, and they held much of it, the free memory returns to the system: the C library
    would keep hundreds of MiB after large images.

    Args:
        limit: Bytes. A thread that needs more waits until it is the only one.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = self._peak = 0
        self._waiting: deque[object] = deque()
        self._has_changed = threading.Condition()

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Waits for memory, and holds it inside the context."""
        ticket = object()
        with self._has_changed:
            self._waiting.append(ticket)
            self._has_changed.wait_for(lambda: self._waiting[0] is ticket and self._fits(num_bytes))
            self._waiting.popleft()
            self._used += num_bytes
            self._peak = max(self._peak, self._used)
            self._has_changed.notify_all()
        try:
            yield
        finally:
            with self._has_changed:
                self._used -= num_bytes
                must_trim = not self._used and self._peak >= TRIM_BYTES
                if not self._used:
                    self._peak = 0
                self._has_changed.notify_all()
            if must_trim:
                trim_heap()

    def _fits(self, num_bytes: int) -> bool:
        return not self._used or self._used + num_bytes <= self._limit


def _load_process(spec: ImageSpec) -> Callable[[ImageFile], ImagePatches]:
    """Imports Pillow; raises MachineError if that fails."""
    try:
        from .decoding import decode
        from .preprocessing import preprocess
    except ImportError as error:
        raise MachineError(f"The model reads images, which needs Pillow ({error}). Run {INSTALL}.") from error
    return lambda file: preprocess(decode(file), spec)
