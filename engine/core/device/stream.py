"""The work queue of a device: its events, the time of forwards, and copies of results to the host."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Thread

import torch
from torch import Tensor

from ...executors.torch.packed_batch import empty_for, views
from ..runner import DeviceLostError, ForwardTime

logger = logging.getLogger("penstock.engine")


class DeviceEvent:
    """A point in the work queue of a device. This one is of the host: it is reached when it is created."""

    def __init__(self, at_s: float | None = None) -> None:
        self._at_s = time.perf_counter() if at_s is None else at_s

    @property
    def is_reached(self) -> bool:
        """Whether all work queued before it is done."""
        return True

    def wait(self) -> None:
        """Blocks until the event is reached."""

    def elapsed_ms(self, first: DeviceEvent) -> float:
        """Returns the milliseconds from another event of the stream to this one. Both must be reached."""
        return (self._at_s - first._at_s) * 1000


class DeviceStream:
    """The work queue of one device. Work runs in order (first in, first out). On the host a call does its work.

    Attributes:
        is_asynchronous: Whether calls return before the work is done.
    """

    is_asynchronous = False

    def record_event(self) -> DeviceEvent:
        """Returns an event after all queued work."""
        return DeviceEvent()

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors on the host, copied unless they are there. Complete when a later event is reached."""
        return list(tensors)

    def save(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns copies on the host for `restore`. Work that is queued later may write to the tensors."""
        return [tensor.clone() for tensor in tensors]

    def restore(self, saved: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Queues copies of saved tensors to tensors of the device, after earlier copies to the host."""
        for target, copy in zip(targets, saved, strict=True):
            target.copy_(copy, non_blocking=self.is_asynchronous)


class CudaEvent(DeviceEvent):
    """An event after all work that is queued in a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # blocking: `wait` sleeps in the driver. Busy waiting would take a core from the tokenizers.
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)
        self._event.record(stream)

    @property
    def is_reached(self) -> bool:
        """Whether the device has reached the event."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Waits for the event. Releases the GIL."""
        self._event.synchronize()

    def elapsed_ms(self, first: DeviceEvent) -> float:
        """Milliseconds since an earlier event, measured on the device."""
        assert isinstance(first, CudaEvent), "both events must belong to one stream"
        return float(first._event.elapsed_time(self._event))


class CudaStream(DeviceStream):
    """The work queue of a CUDA device: the current stream at each call."""

    is_asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record_event(self) -> CudaEvent:
        """Records an event on the current stream."""
        return CudaEvent(torch.cuda.current_stream(self._device))

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies to one block of pinned memory. torch does not reuse it before the copies end."""
        copies = views(empty_for(tensors, pin_memory=True), tensors)
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        return copies

    def save(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies like `to_host`."""
        return self.to_host(tensors)


def stream_of(device: torch.device) -> DeviceStream:
    """Returns a stream that runs asynchronously for a CUDA device, and one that runs at once for a CPU."""
    return CudaStream(device) if device.type == "cuda" else DeviceStream()


def make_current(device: torch.device | None) -> None:
    """Makes a CUDA device the current device of the calling thread. Does nothing for a CPU or None.

    Every thread that calls CUDA must do this. Calls that name no device, such as freeing memory after a shortage, use
    the current device of the thread. With a wrong current device, torch waits for the wrong streams before it unmaps
    memory, and creates a context of about 500 MB on that device.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device.index or 0)


class ForwardTimer:
    """Measures forwards with events of their device. Several forwards may run at once. Never waits."""

    def __init__(self, stream: DeviceStream) -> None:
        self._stream = stream
        self._began = stream.record_event()
        self._in_flight: deque[tuple[DeviceEvent, DeviceEvent, int, int]] = deque()

    def begin(self) -> None:
        """Records the start of the next forward."""
        self._began = self._stream.record_event()

    def end(self, chunk_tokens: int, short_tokens: int) -> DeviceEvent:
        """Records the end of a forward after its work was queued, and returns the event. See ForwardTime."""
        ended = self._stream.record_event()
        self._in_flight.append((self._began, ended, chunk_tokens, short_tokens))
        return ended

    def take(self) -> list[ForwardTime]:
        """Returns the forwards that have ended since the last call."""
        times = []
        while self._in_flight and self._in_flight[0][1].is_reached:
            began, ended, chunk_tokens, short_tokens = self._in_flight.popleft()
            times.append(ForwardTime(chunk_tokens, short_tokens, ended.elapsed_ms(began) / 1000))
        return times


class EventWatcher:
    """Writes to a waker's file descriptor when an event is reached. A separate thread waits for the device.

    torch has no callback for CUDA events, and a loop that waits for an event cannot start new batches.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._events: SimpleQueue[DeviceEvent | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def check(self) -> None:
        """Raises DeviceLostError if the waiting thread has failed: later events may never be reported."""
        if self._error is not None:
            raise DeviceLostError(f"waiting for a forward failed: {self._error!r}") from self._error

    def set_wakeup_fd(self, fd: int | None) -> None:
        """Starts or stops the thread that writes to the descriptor when the device reaches an event."""
        if self._thread is not None:
            self._events.put(None)
            self._thread.join()
            self._thread = None
        if fd is not None:
            self._thread = Thread(target=self._run, args=(fd,), name="device-events", daemon=True)
            self._thread.start()

    def add(self, event: DeviceEvent) -> None:
        """Watches an event. Add events in the order of their recording."""
        if self._thread is not None:
            self._events.put(event)

    def _run(self, fd: int) -> None:
        try:
            make_current(self._device)
        except Exception as error:
            logger.exception("%s cannot be used by the thread that waits for forwards", self._device)
            self._error = error  # raised when the loop starts its first forward
        while (event := self._events.get()) is not None:
            try:
                event.wait()
            except Exception as error:
                logger.exception("waiting for the end of a forward failed")
                self._error = error  # raised by `check`, which the loop calls after the wake-up below
            with contextlib.suppress(BlockingIOError):  # the pipe is full, so the loop will wake up anyway
                os.write(fd, b"\0")
