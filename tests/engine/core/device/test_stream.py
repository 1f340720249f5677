"""Marks in the work of a device, copies on their way out of it, and the thread that rings when an event is reached."""

from __future__ import annotations

from threading import current_thread

import pytest
import torch

from penstock.engine.core.device.stream import EventWatcher, HostEvent, HostStream, stream_of
from penstock.engine.core.runner import DeviceLostError
from penstock.engine.core.waker import Waker
from penstock.engine.pooling.output import OutputBlock, PoolerOutput

from ..played_stream import PlayedStream


def test_on_a_cpu_all_is_done_when_it_has_been_asked_for() -> None:
    stream = stream_of(torch.device("cpu"))
    assert isinstance(stream, HostStream)
    first, second = stream.record_event(), stream.record_event()
    assert first.is_reached
    first.wait()
    assert 0 <= second.at_ms(first) < 10_000
    tensor = torch.ones(3)
    assert stream.to_host([tensor])[0] is tensor


def test_a_bell_rings_for_every_mark_once_it_is_reached(stream: PlayedStream) -> None:
    waker, watch = Waker(), EventWatcher()
    watch.add(stream.record_event())  # nobody hears it
    watch.set_wakeup_fd(waker.fd)
    stream.gate.clear()
    events = [stream.record_event(), stream.record_event()]
    for event in events:
        watch.add(event)
    assert not events[0].is_reached
    stream.gate.set()
    while not all(event.is_reached for event in events):
        waker.wait()
    watch.set_wakeup_fd(None)
    assert events[1].at_ms(events[0]) >= 0


def test_a_watch_that_is_ended_writes_to_its_bell_no_more(stream: PlayedStream) -> None:
    old, new, watch = Waker(), Waker(), EventWatcher()
    watch.set_wakeup_fd(old.fd)
    watch.add(stream.record_event())
    watch.set_wakeup_fd(new.fd)  # waits for what was added before
    old.wait()
    del old
    watch.add(stream.record_event())
    new.wait()
    watch.set_wakeup_fd(None)


def test_a_device_that_fails_wakes_the_loop_which_meets_the_error(stream: PlayedStream) -> None:
    waker, watch = Waker(), EventWatcher()
    event = stream.record_event()
    stream.error = torch.AcceleratorError("gone")
    watch.set_wakeup_fd(waker.fd)
    watch.add(event)
    waker.wait()
    with pytest.raises(torch.AcceleratorError):
        _ = event.is_reached
    watch.set_wakeup_fd(None)


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda:1", [1]), ("cuda", [0]), ("cpu", [])], ids=["second", "first", "none"]
)
def test_the_device_of_the_marks_is_current_in_the_thread(
    stream: PlayedStream, device: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another one is current, a wait opens a context there."""
    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: calls.append((current_thread().name, index)))
    waker, watch = Waker(), EventWatcher(torch.device(device))
    watch.set_wakeup_fd(waker.fd)
    watch.add(stream.record_event())
    waker.wait()
    assert calls == [("device-events", index) for index in expected]
    watch.set_wakeup_fd(None)


@pytest.mark.parametrize(
    "error", [torch.AcceleratorError("gone"), RuntimeError("gone"), AssertionError("gone")], ids=repr
)
def test_error_of_the_device_does_not_end_the_thread(
    error: Exception, stream: PlayedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(index: int) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "set_device", fail)
    waker, watch = Waker(), EventWatcher(torch.device("cuda"))
    watch.set_wakeup_fd(waker.fd)
    watch.add(stream.record_event())
    waker.wait()
    with pytest.raises(DeviceLostError, match="gone"):
        watch.check()
    watch.set_wakeup_fd(None)


class FailingEvent(HostEvent):
    """An event that cannot be waited for."""

    error = ValueError("made up")

    def wait(self) -> None:
        raise self.error


def test_watch_survives_a_mark_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    waker, watch = Waker(), EventWatcher()
    watch.check()
    watch.set_wakeup_fd(waker.fd)
    for _ in range(2):
        watch.add(FailingEvent())
        waker.wait()
        with pytest.raises(DeviceLostError, match="made up"):
            watch.check()
    assert "waiting for the end of a forward failed" in caplog.text
    watch.set_wakeup_fd(None)


@pytest.mark.parametrize("bad", [None, torch.nan, torch.inf, -torch.inf])
def test_results_leave_a_device_with_what_is_finite_of_them(stream: PlayedStream, bad: float | None) -> None:
    rows, tokens = torch.rand(3, 7), torch.rand(5, 4)
    if bad is not None:
        tokens[3, 2] = bad
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
        values.fill_(9.0)  # comes later on the stream
    stream.gate.set()
    event.wait()
    found = copy.arrived()
    assert found.is_finite.tolist() == [True] * 5 + [bad is None, True]
    assert found.is_finite.tolist() == expected.is_finite.tolist()
    assert [{name: array.tobytes() for name, array in arrays.items()} for arrays in found.split()] == bits


@pytest.mark.gpu
def test_a_gpu_copies_out_beside_the_host() -> None:
    device = torch.device("cuda")
    stream = stream_of(device)
    a = torch.rand(4096, 4096, device=device)
    values = [a, a[:, :5], torch.tensor(True, device=device), torch.empty(0, 3, device=device)]
    stream.to_host(values)  # the first block of pinned memory is made by the driver, which waits
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        first = stream.record_event()
        for _ in range(50):
            a = torch.nn.functional.normalize(a @ a)
        values = [a, a[:, :5], *values[2:]]
        copies = stream.to_host(values)
        second = stream.record_event()
        assert not second.is_reached  # 50 products of 4096 take 10 ms and more
    finally:
        torch.cuda.set_sync_debug_mode("default")
    second.wait()
    assert first.is_reached
    assert second.at_ms(first) > 1
    for copy, value in zip(copies, values, strict=True):
        assert copy.is_pinned() or not copy.numel()
        assert torch.equal(copy, value.cpu())
    waker, watch = Waker(), EventWatcher()
    watch.set_wakeup_fd(waker.fd)
    watch.add(stream.record_event())
    waker.wait()
    watch.set_wakeup_fd(None)
