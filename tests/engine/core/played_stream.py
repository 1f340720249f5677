"""A device beside the host, played by a thread: what it is asked for happens later, in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Semaphore, Thread

import torch
from torch import Tensor

from penstock.engine.core.device.stream import DeviceEvent


class PlayedEvent:
    """A DeviceEvent; `error` is what a lost device says."""

    def __init__(self, stream: PlayedStream) -> None:
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

    def at_ms(self, first: DeviceEvent) -> float:
        assert isinstance(first, PlayedEvent)
        assert first.reached.is_set()
        assert self.reached.is_set()
        return (self.reached_s - first.reached_s) * 1000


class PlayedStream:
    """See DeviceStream. Tensors are computed when they are asked for, as on a CPU; nobody can look at copies too early.

    Attributes:
        delay_s: Seconds before a copy is made.
        gate: Closed, the device stands still.
        permits: Where there are any, as many forwards leave the device as have been released.
        error: Raised to whoever asks, once it is there.
    """

    is_beside_host = True

    def __init__(self, delay_s: float = 0.0, permits: Semaphore | None = None) -> None:
        self.delay_s = delay_s
        self.permits = permits
        self.gate = Event()
        self.gate.set()
        self.error: Exception | None = None
        self._saved: list[tuple[Tensor, Tensor]] = []
        self._asked: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.gate.set()
        self._asked.put(None)
        self._thread.join()

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def record_event(self) -> PlayedEvent:
        self.check()
        event = PlayedEvent(self)

        def reach() -> None:
            event.reached_s = time.perf_counter()
            event.reached.set()

        self._asked.put(reach)
        return event

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        sources = [tensor.clone() for tensor in tensors]  # what comes later writes after this copy
        copies = [torch.full_like(tensor, True if tensor.dtype is torch.bool else torch.nan) for tensor in tensors]

        def copy() -> None:
            time.sleep(self.delay_s)
            if self.permits is not None:
                self.permits.acquire()
            for place, source in zip(copies, sources, strict=True):
                place.copy_(source)

        self._asked.put(copy)
        return copies

    def save(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        sources = [tensor.clone() for tensor in tensors]
        copies = [torch.full_like(tensor, torch.nan) for tensor in tensors]  # who reads them, reads this
        self._saved += zip(copies, sources, strict=True)
        return copies

    def put_back(self, saved: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        for copy, place in zip(saved, places, strict=True):
            place.copy_(next(source for known, source in self._saved if known is copy))

    @torch.inference_mode()
    def _run(self) -> None:
        while (work := self._asked.get()) is not None:
            self.gate.wait()
            work()
