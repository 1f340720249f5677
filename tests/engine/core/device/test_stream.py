"""Events of a device, times of forwards, copies to the host, and the thread that waits for events."""

from __future__ import annotations

from collections.abc import Iterator
from threading import current_thread

import pytest
import torch

from penstock.engine.core.device.stream import EventWatcher, ForwardTimer, HostEvent, HostStream, stream_of
from penstock.engine.core.runner import DeviceLostError, ForwardTime
from penstock.engine.core.waker import Waker
from penstock.engine.pooling.output import OutputBlock, PoolerOutput

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
    assert isinstance(stream, HostStream)
    first, second = stream.record_event(), stream.record_event()
    assert first.is_reached
    first.wait()
    assert 0 <= second.elapsed_ms(first) < 10_000
    assert HostEvent(3.5).elapsed_ms(HostEvent(1.0)) == 2500
    tensor = torch.ones(3)
    assert stream.to_host([tensor])[0] is tensor


# Times of forwards


def test_clock_of_a_cpu_returns_each_forward_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ForwardTimer(HostStream())
    times = iter([1.0, 1.5, 4.0, 6.0, 8.0])
    monkeypatch.setattr(HostStream, "record_event", lambda stream: HostEvent(next(times)))
    clock.begin()  # a failed forward, which has no end
    clock.begin()
    clock.end(3, 4)
    clock.begin()
    clock.end(0, 5)
    assert clock.take() == [ForwardTime(3, 4, 2.5), ForwardTime(0, 5, 2.0)]
    assert clock.take() == []


def test_clock_times_overlapping_forwards_of_a_device(stream: FakeStream) -> None:
    clock = ForwardTimer(stream)
    stream.gate.clear()
    stream.delay_s = 0.02
    ends = []
    for chunk_tokens in (3, 0):
        clock.begin()
        stream.to_host([torch.zeros(1)])
        ends.append(clock.end(chunk_tokens, 4))
        assert clock.take() == []
    stream.gate.set()
    ends[0].wait()
    stream.gate.clear()  # the second forward may have ended already
    times = clock.take()
    stream.gate.set()
    ends[1].wait()
    times += clock.take()
    assert [(time.chunk_tokens, time.whole_tokens) for time in times] == [(3, 4), (0, 4)]
    assert all(time.seconds >= 0.02 for time in times)


def test_clock_does_not_wait_for_later_forwards(stream: FakeStream) -> None:
    clock = ForwardTimer(stream)
    clock.begin()
    clock.end(1, 0).wait()
    stream.gate.clear()
    clock.begin()
    clock.end(2, 0)
    assert [time.chunk_tokens for time in clock.take()] == [1]
    assert clock.take() == []
    stream.gate.set()


# The thread that waits for events


def test_every_reached_event_wakes_the_loop(stream: FakeStream, waker: Waker) -> None:
    watcher = EventWatcher()
    watcher.add(stream.record_event())  # ignored without a descriptor
    watcher.set_wakeup_fd(waker.fd)
    stream.gate.clear()
    events = [stream.record_event(), stream.record_event()]
    for event in events:
        watcher.add(event)
    assert not events[0].is_reached
    stream.gate.set()
    while not all(event.is_reached for event in events):
        waker.wait()
    watcher.set_wakeup_fd(None)


def test_watcher_stops_writing_to_its_old_descriptor(stream: FakeStream, watcher: EventWatcher, waker: Waker) -> None:
    new = Waker()
    watcher.add(stream.record_event())
    watcher.set_wakeup_fd(new.fd)  # waits for the earlier event
    waker.wait()
    watcher.add(stream.record_event())
    new.wait()
    assert waker.poll() == []
    watcher.set_wakeup_fd(None)


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda:1", [1]), ("cuda", [0]), ("cpu", [])], ids=["second", "first", "none"]
)
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


@pytest.mark.parametrize("error", [torch.AcceleratorError("gone"), AssertionError("gone")], ids=repr)
def test_thread_survives_an_unusable_device(
    error: Exception, stream: FakeStream, waker: Waker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(index: int) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "set_device", fail)
    watcher = EventWatcher(torch.device("cuda"))
    watcher.set_wakeup_fd(waker.fd)
    watcher.add(stream.record_event())
    waker.wait()
    with pytest.raises(DeviceLostError, match="gone"):
        watcher.check()
    watcher.set_wakeup_fd(None)


class FailingEvent(HostEvent):
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


@pytest.mark.parametrize("value", [1.0, torch.nan, torch.inf, -torch.inf])
def test_copied_results_are_marked_as_finite_or_not(stream: FakeStream, value: float) -> None:
    rows, tokens = torch.rand(3, 7), torch.rand(5, 4)
    tokens[3, 2] = value
    blocks = [
        OutputBlock(name="embedding", values=rows, indices=[0, 2, 3], widths=(7, 3, 7)),
        OutputBlock(name="token_embeddings", values=tokens, indices=[1, 4, 5], row_lens=(2, 0, 3)),
        OutputBlock(name="token_scores", values=torch.empty(0, 2), indices=[6], row_lens=(0,)),
    ]
    expected = PoolerOutput(7, blocks).to_host()
    bits = [{name: array.tobytes() for name, array in arrays.items()} for arrays in expected.split()]
    stream.gate.clear()
    copy = PoolerOutput(7, blocks).begin_copy(stream.to_host)
    event = stream.record_event()
    for values in (rows, tokens):
        values.fill_(9.0)  # later work of the stream
    stream.gate.set()
    event.wait()
    found = copy.arrived()
    assert found.is_finite.tolist() == expected.is_finite.tolist() == [True] * 5 + [value == 1.0, True]
    assert [{name: array.tobytes() for name, array in arrays.items()} for arrays in found.split()] == bits


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
