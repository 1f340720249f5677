"""Decodes and preprocesses images in threads."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from ..daemon_threads import DaemonThreadPool
from ..protocol.config import IMAGE_MEMORY
from ..protocol.errors import (
    InvalidRequestError,
    MachineError,
    drop_tracebacks,
)
from ..protocol.images import ImageInput, ImagePatches, ImageSpec
from .decode_queue import DecodeQueue
from .header import ImageError
from .image_file import ImageFile, ImageLimits, read_image_file

INSTALL: Final = "pip install 'penstock[images]'"
_MIN_PIXELS: Final = 1 << 16
"""Pixels that take as long as the rest of the work for an image: about a millisecond."""


@dataclass(slots=True)
class ImageStats:
    """Counters of the images of one model.

    Attributes:
        num_images: Images that were decoded and preprocessed.
        decoding_s: Seconds of the threads for these images.
        num_failures: Images that could not be decoded.
    """

    num_images: int = 0
    decoding_s: float = 0.0
    num_failures: int = 0


class _Size(NamedTuple):
    num_pixels: int
    num_bytes: int


class ImagePreprocessor:
    """Decodes and preprocesses the images of one model. Safe to use from many tasks of one event loop.

    A request occupies each thread with at most one image at a time, so that the images of other requests run in
    between; decode_queue.py has the order. After an error or a cancellation, at most the images that have begun are
    completed.

    Args:
        spec: The preprocessing of the model.
        num_threads: Threads, and images that are decoded at the same time.
        limits: Limits of an image.
        max_decoding_bytes: Memory for images that are being decoded. An image that needs more is decoded alone.
        max_queue_s: Seconds of decoding at which requests are rejected.
        on_rejection: Called for every rejected request.

    Raises:
        MachineError: Pillow is not installed.

    Attributes:
        stats: Counters since the start.
    """

    def __init__(
        self,
        spec: ImageSpec,
        *,
        num_threads: int,
        limits: ImageLimits = ImageLimits(),  # noqa: B008 - immutable
        max_decoding_bytes: int = IMAGE_MEMORY,
        max_queue_s: float = math.inf,
        on_rejection: Callable[[], None] = lambda: None,
    ) -> None:
        self.spec = spec
        self.stats = ImageStats()
        self._stats_lock = threading.Lock()
        self._process = _load_process(spec)
        self._limits = limits
        self._num_threads = num_threads
        self._headers = DaemonThreadPool(1, "image-headers")
        self._queue = DecodeQueue(num_threads, max_decoding_bytes, max_queue_s, on_rejection)

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
            EngineOverloadedError: Too many pixels wait.
            EngineUnavailableError: The preprocessor is closed, or no thread can be started.
        """
        positions = range(len(images)) if positions is None else positions
        patches: list[ImagePatches | None] = [None] * len(images)
        indices = iter(range(len(images)))

        async def preprocess_next() -> None:
            for index in indices:
                job = partial(self._decode, images[index], positions[index])
                patches[index] = await self._queue.run(sizes[index].num_pixels, sizes[index].num_bytes, job)

        with self._queue.admitted(0):  # before the work for the headers
            sizes = await self._read_sizes(images, positions)
        with self._queue.admitted(sum(size.num_pixels for size in sizes)):
            try:
                if len(images) == 1:
                    await preprocess_next()
                else:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(min(self._num_threads, len(images))):
                            group.create_task(preprocess_next())
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return [each for each in patches if each is not None]

    def close(self) -> None:
        """Ends the threads. Waiting requests fail with EngineUnavailableError."""
        self._headers.close()
        self._queue.close()

    async def _read_sizes(self, images: Sequence[ImageInput], positions: Sequence[int]) -> list[_Size]:
        """Reads the headers one by one, so that those of other requests are read in between.

        `_decode` reads them again, because the queue should hold no copies of the pixels.
        """
        jobs = [partial(self._read_size, *each) for each in zip(images, positions, strict=True)]
        return [await asyncio.wrap_future(self._headers.submit(job)) for job in jobs]

    def _read_size(self, image: ImageInput, position: int) -> _Size:
        file = self._read(image, position)
        return _Size(max(file.num_decoded_pixels, _MIN_PIXELS), file.num_bytes)

    def _read(self, image: ImageInput, position: int) -> ImageFile:
        try:
            return read_image_file(image.data, self._limits)
        except ImageError as error:
            raise self._failure(image, position, error) from None

    def _decode(self, image: ImageInput, position: int) -> ImagePatches:
        """Runs in a thread."""
        began_s = time.perf_counter()
        try:
            patches = self._process(self._read(image, position))
        except ImageError as error:
            raise self._failure(image, position, error) from None
        except Exception as error:
            drop_tracebacks(error)  # the frames refer to the image
            raise
        with self._stats_lock:
            self.stats.num_images += 1
            self.stats.decoding_s += time.perf_counter() - began_s
        return patches

    def _failure(self, image: ImageInput, position: int, error: ImageError) -> InvalidRequestError:
        with self._stats_lock:
            self.stats.num_failures += 1
        return image.error(position, str(error))


def _load_process(spec: ImageSpec) -> Callable[[ImageFile], ImagePatches]:
    """Imports Pillow; raises MachineError if that fails."""
    try:
        from .decoding import decode
        from .preprocessing import preprocess
    except ImportError as error:
        raise MachineError(f"The model reads images, which needs Pillow ({error}). Run {INSTALL}.") from error
    return lambda file: preprocess(decode(file), spec)
