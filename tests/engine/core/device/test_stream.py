"""Events of a device, times of forwards, copies to the host, and the thread that waits for events."""

from collections.abc import Iterator
from threading import current_thread

import pytest
import torch

from penstock.engine.core.device.stream import DeviceEvent, DeviceStream, EventWatcher, ForwardTimer, stream_of
from penstock.engine.core.runner import DeviceLostError, ForwardTime
from penstock.engine.core.waker import Waker

from ..fake_stream import FakeStream


@pytest.fixture
def waker() -> Waker:
    return Waker()


@pytest.fixture
def watcher(waker: Waker) -> Iterator[EventWatcher]:
    watcher = EventWatcher()
    watcher.set_wakeup_fd(waker.fd)
    yield watcher
    watcher.set_wakeup_fd(None)


def test_host_stream_is_done_at_once() -> None:
    stream = stream_of(torch.device("cpu"))
    assert isinstance(stream, DeviceStream)
    first, second = stream.record_event(), stream.record_event()
    assert first.is_reached
    first.wait()
    assert 0 <= second.elapsed_ms(first) < 10_000
    assert DeviceEvent(3.5).elapsed_ms(DeviceEvent(1.0)) == 2500
    tensor = torch.ones(3)
    assert stream.to_host([tensor])[0] is tensor


# Times of forwards


def test_clock_of_a_cpu_returns_each_forward_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ForwardTimer(DeviceStream())
    times = iter([1.0, 1.5, 4.0, 6.0, 8.0])
    monkeypatch.setattr(DeviceStream, "record_event", lambda stream: DeviceEvent(next(times)))
    clock.begin()  # a failed forward, which has no end
    clock.begin()
    clock.end(3, 4)
    clock.begin()
    clock.end(0, 5)
    assert clock.take() == [ForwardTime(3, 4, 2.5), ForwardTime(0, 5, 2.0)]
    assert clock.take() == []


# The thread that waits for events


def test_watcher_stops_writing_to_its_old_descriptor(stream: FakeStream, watcher: EventWatcher, waker: Waker) -> None:
    new = Waker()
    watcher.add(stream.record_event())
    watcher.set_wakeup_fd(new.fd)  # waits for the earlier event
    waker.wait()
    watcher.add(stream.record_event())
    new.wait()
    assert waker.poll() == []
    watcher.set_wakeup_fd(None)


@pytest.mark.parametrize(("device", "expected"), [("cuda:1", [1]), ("cuda", [0]), ("cpu", [])])
def test_thread_makes_the_device_of_the_events_current(
    stream: FakeStream, waker: Waker, device: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: calls.append((current_thread().name, index)))
    watcher = EventWatcher(torch.device(device))
    watcher.set_wakeup_fd(waker.fd)
    watcher.add(stream.record_event())
    waker.wait()
    assert calls == [("device-events", index) for index in expected]
    watcher.set_wakeup_fd(None)


class FailingEvent(DeviceEvent):
    def wait(self) -> None:
        raise ValueError("made up")


def test_thread_survives_an_event_that_fails(
    watcher: EventWatcher, waker: Waker, caplog: pytest.LogCaptureFixture
) -> None:
    watcher.check()
    for _ in range(2):
        watcher.add(FailingEvent())
        waker.wait()
        with pytest.raises(DeviceLostError, match="made up"):
            watcher.check()
    assert "waiting for the end of a forward failed" in caplog.text


# Copies


@pytest.mark.gpu
def test_gpu_copies_do_not_block_the_host() -> None:
    device = torch.device("cuda")
    stream = stream_of(device)
    a = torch.rand(4096, 4096, device=device)
    values = [a, a[:, :5], torch.tensor(True, device=device), torch.empty(0, 3, device=device)]
    stream.to_host(values)  # the first allocation of pinned memory waits
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        first = stream.record_event()
        for _ in range(50):
            a = torch.nn.functional.normalize(a @ a)
        values = [a, a[:, :5], *values[2:]]
        copies = stream.to_host(values)
        second = stream.record_event()
        assert not second.is_reached  # 50 products of 4096 take at least 10 ms
    finally:
        torch.cuda.set_sync_debug_mode("default")
    second.wait()
    assert first.is_reached
    assert second.elapsed_ms(first) > 1
    for copy, value in zip(copies, values, strict=True):
        assert copy.is_pinned() or not copy.numel()
        assert torch.equal(copy, value.cpu())
    waker, watcher = Waker(), EventWatcher()
    watcher.set_wakeup_fd(waker.fd)
    watcher.add(stream.record_event())
    waker.wait()
    watcher.set_wakeup_fd(None)
