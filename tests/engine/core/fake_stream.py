"""A DeviceStream with a thread that does the queued work later, in order."""

import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Semaphore, Thread

import torch
from torch import Tensor

from penstock.engine.core.device.stream import DeviceEvent, DeviceStream


class FakeEvent(DeviceEvent):
    """A DeviceEvent of a FakeStream."""

    def __init__(self, stream: "FakeStream") -> None:
        self.stream = stream
        self.reached = Event()
        self.reached_s = 0.0

    @property
    def is_reached(self) -> bool:
        self.stream.check()
        return self.reached.is_set()

    def wait(self) -> None:
        self.stream.check()
        assert self.reached.wait(30)
        self.stream.check()

    def elapsed_ms(self, first: DeviceEvent) -> float:
        assert isinstance(first, FakeEvent)
        assert first.reached.is_set()
        assert self.reached.is_set()
        return (self.reached_s - first.reached_s) * 1000


class FakeStream(DeviceStream):
    """Copies to the host hold NaN until the thread has made them, so an early read fails the test.

    Attributes:
        delay_s: Seconds before each copy.
        gate: The thread works only while it is set.
        permits: Each copy takes one permit; None for no limit.
        error: Raised by every call once it is set, as by a lost device.
    """

    is_asynchronous = True

    def __init__(self, permits: Semaphore | None = None) -> None:
        self.delay_s = 0.0
        self.permits = permits
        self.gate = Event()
        self.gate.set()
        self.error: Exception | None = None
        self._saved: list[tuple[Tensor, Tensor]] = []
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.gate.set()
        self._work.put(None)
        self._thread.join()

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def record_event(self) -> FakeEvent:
        self.check()
        event = FakeEvent(self)

        def reach() -> None:
            event.reached_s = time.perf_counter()
            event.reached.set()

        self._work.put(reach)
        return event

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        sources = [tensor.clone() for tensor in tensors]  # later work may write to the tensors
        copies = [torch.full_like(tensor, True if tensor.dtype is torch.bool else torch.nan) for tensor in tensors]

        def copy() -> None:
            time.sleep(self.delay_s)
            if self.permits is not None:
                self.permits.acquire()
            for place, source in zip(copies, sources, strict=True):
                place.copy_(source)

        self._work.put(copy)
        return copies

    def save(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        copies = [torch.full_like(tensor, torch.nan) for tensor in tensors]
        self._saved += zip(copies, [tensor.clone() for tensor in tensors], strict=True)
        return copies

    def restore(self, saved: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        for copy, place in zip(saved, targets, strict=True):
            place.copy_(next(source for known, source in self._saved if known is copy))

    @torch.inference_mode()
    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self.gate.wait()
            work()
