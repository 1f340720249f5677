"""What a device has been asked to do, in order: points in it that can be looked for, and results on their way out."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

import torch
from torch import Tensor

from ...executors.torch.staging import empty_for, views
from ..runner import DeviceLostError

logger = logging.getLogger("penstock.engine")


class Mark(Protocol):
    """A point in the work of a device."""

    @property
    def is_reached(self) -> bool:
        """Whether all that was asked for before it is done."""
        ...

    def wait(self) -> None:
        """Sleeps until it is reached."""

    def at_ms(self, first: Mark) -> float:
        """Returns the milliseconds from another mark to this one; both are reached."""
        ...


class DeviceStream(Protocol):
    """The work of one device. What is asked for later is done later, and may use the same memory.

    Attributes:
        is_beside_host: Whether work goes on when the call that asked for it has returned.
    """

    is_beside_host: bool

    def mark(self) -> Mark:
        """Returns the point behind all that has been asked for."""
        ...

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns copies on the host, to be read once a later mark is reached; nobody else gets their memory before."""
        ...

    def save(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns copies on the host for `put_back` alone: whatever is asked for later may write to the tensors."""
        ...

    def put_back(self, saved: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """Copies what was saved into tensors of the device, behind all that has been asked for."""


@dataclass(frozen=True, slots=True)
class HostMark:
    """A Mark of the host, reached when it is made."""

    at_s: float = field(default_factory=time.perf_counter)
    is_reached = True

    def wait(self) -> None:
        """See Mark."""

    def at_ms(self, first: Mark) -> float:
        """See Mark."""
        assert isinstance(first, HostMark), "marks of one stream are compared"
        return (self.at_s - first.at_s) * 1000


class HostStream:
    """The DeviceStream of a CPU: everything is done when it has been asked for."""

    is_beside_host = False

    def mark(self) -> HostMark:
        """See DeviceStream."""
        return HostMark()

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See DeviceStream. They are there."""
        return list(tensors)

    def save(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See DeviceStream."""
        return [tensor.clone() for tensor in tensors]

    def put_back(self, saved: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """See DeviceStream."""
        for place, copy in zip(places, saved, strict=True):
            place.copy_(copy)


class CudaMark:
    """A Mark of a CUDA stream.

    Args:
        stream: Its point now.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Who waits sleeps in the driver: to spin would take a core from the tokenizers.
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)
        self._event.record(stream)

    @property
    def is_reached(self) -> bool:
        """See Mark."""
        return bool(self._event.query())

    def wait(self) -> None:
        """See Mark. Other threads of Python run meanwhile."""
        self._event.synchronize()

    def at_ms(self, first: Mark) -> float:
        """See Mark. By the clock of the device."""
        assert isinstance(first, CudaMark), "marks of one stream are compared"
        return float(first._event.elapsed_time(self._event))


class CudaStream:
    """The DeviceStream of a CUDA device: the stream that is current when it is asked.

    Args:
        device: Which.
    """

    is_beside_host = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> CudaMark:
        """See DeviceStream."""
        return CudaMark(torch.cuda.current_stream(self._device))

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See DeviceStream. Into one block of pinned memory, which torch keeps for itself until the copies are made."""
        copies = views(empty_for(tensors, pin_memory=True), tensors)
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        return copies

    def save(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See DeviceStream."""
        return self.to_host(tensors)

    def put_back(self, saved: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """See DeviceStream. One stream: the copies out come before, and the host may let go of theirs at once."""
        for place, copy in zip(places, saved, strict=True):
            place.copy_(copy, non_blocking=True)


def stream_of(device: torch.device) -> DeviceStream:
    """Returns the stream that forwards on a device run in."""
    return CudaStream(device) if device.type == "cuda" else HostStream()


def make_current(device: torch.device | None) -> None:
    """Makes a CUDA device the current one of the calling thread; does nothing for a CPU, or for None.

    Every thread that calls CUDA has to. The current device belongs to the thread, and a call that names none, such as
    giving memory back after a shortage, works on it: with another device current, torch waits for the streams of the
    wrong device before it unmaps memory, and each further device that is touched costs a context of some 500 MB.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device.index or 0)


class MarkWatch:
    """Writes to a bell when a mark is reached. A thread of its own waits for the device.

    torch has no callback for CUDA events. If the loop waited for the event, it could not start new requests meanwhile.

    Args:
        device: Of the marks; None: they need none.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._marks: SimpleQueue[Mark | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def check(self) -> None:
        """Raises DeviceLostError if the waiting thread has met an error: whether later marks are reached is unknown."""
        if self._error is not None:
            raise DeviceLostError(f"waiting for a forward failed: {self._error!r}") from self._error

    def ring(self, bell: int | None) -> None:
        """See Runner.ring."""
        if self._thread is not None:
            self._marks.put(None)
            self._thread.join()
            self._thread = None
        if bell is not None:
            self._thread = Thread(target=self._run, args=(bell,), name="device-marks", daemon=True)
            self._thread.start()

    def add(self, mark: Mark) -> None:
        """Rings when a mark is reached, which comes behind all that were added before; if somebody is to hear it."""
        if self._thread is not None:
            self._marks.put(mark)

    def _run(self, bell: int) -> None:
        try:
            make_current(self._device)
        except Exception as error:
            logger.exception("%s cannot be used by the thread that waits for forwards", self._device)
            self._error = error  # raised where the loop asks for its first forward
        while (mark := self._marks.get()) is not None:
            try:
                mark.wait()
            except Exception as error:
                logger.exception("waiting for the end of a forward failed")
                self._error = error  # the loop, woken below, raises it where it asks for a forward
            with contextlib.suppress(BlockingIOError):  # the bell has rung as often as a pipe can keep
                os.write(bell, b"\0")
