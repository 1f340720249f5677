from __future__ import annotations

import asyncio
import socket
from unittest.mock import AsyncMock, Mock, call

import pytest

from penstock.server.workers import worker_process
from penstock.server.workers.messages import (
    Channel,
    FromSupervisor,
    GetMetrics,
    MetricFamily,
    MetricsReport,
    WorkerListening,
    decode_from_supervisor,
)
from penstock.server.workers.worker_process import WorkerProcess

from ...waiting import loop_iterations, until


@pytest.fixture
def worker() -> WorkerProcess:
    return WorkerProcess(0, Mock(return_value=Mock(send=AsyncMock())), [Mock()], Mock(), Mock(), 60.0)


@pytest.fixture
def pauses(worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each pause before a successor. The pauses take no time."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(worker, "_pause", pause)
    return pauses


class Process:
    """A process that ends when it gets a signal. `messages` are those of its supervisor."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.signals: list[int] = []
        self.messages: list[FromSupervisor] = []
        self.channel = Channel(decode_from_supervisor, self.messages.append, lambda: None)
        self._ended = asyncio.Event()

    async def start(self) -> tuple[Process, socket.socket, socket.socket]:
        (end, own_end), (connections, self.connections) = socket.socketpair(), socket.socketpair()
        self.channel.open(own_end)
        self.ours = (end, connections)
        return self, *self.ours

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        self.end(-number)

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        self.channel.close()
        self.connections.close()
        assert self.returncode is not None
        return self.returncode


async def test_end_of_a_process_ends_its_heartbeat_and_questions(worker, pauses, monkeypatch, caplog) -> None:
    processes = [Process(), Process()]
    starts = iter(processes)
    monkeypatch.setattr(worker, "_start", lambda: next(starts).start())
    (acceptor,) = worker._acceptors
    await worker.update_metrics(120)  # there is no process
    running = asyncio.create_task(worker.run())
    first, second = processes
    await until(lambda: worker._channel is not None)
    send = worker.sender()
    assert (worker.has_served, worker._on_message.call_count) == (False, 0)
    first.channel.send(WorkerListening())
    await until(lambda: worker.has_served)
    worker._on_message.assert_called_once_with(worker, WorkerListening())
    heartbeat = worker._watch
    worker.open()
    acceptor.add.assert_called_once()

    update = asyncio.create_task(worker.update_metrics(120))
    await until(lambda: GetMetrics(1) in first.messages)
    families = [MetricFamily("a", "b", "counter", [])]
    first.channel.send(MetricsReport(1, families))
    await update
    assert worker.metrics == families
    await worker.update_metrics(0.001)  # the process does not respond in time
    assert not worker._metrics_requests
    update = asyncio.create_task(worker.update_metrics(120))
    await until(lambda: GetMetrics(3) in first.messages)
    first.end(0)
    await until(lambda: worker._process is second)
    assert "an HTTP process ended with exit code 0; another one is started" in caplog.text
    await update
    assert heartbeat.cancelling()
    assert [sock.fileno() for sock in first.ours] == [-1, -1]
    acceptor.remove.assert_called_once()
    send(GetMetrics(7))
    worker.send(GetMetrics(8))
    await until(lambda: GetMetrics(8) in second.messages)
    assert GetMetrics(7) not in second.messages
    worker.stop(15)
    await asyncio.wait_for(running, 120)
    assert (first.signals, second.signals, worker._on_end.call_count) == ([], [15], 2)
    await asyncio.wait_for(worker.update_metrics(120), 30)  # no process is left
    acceptor.add.assert_called_once()
    assert not worker._metrics_requests


async def test_stop_during_the_start_or_a_pause_ends_the_process(worker, monkeypatch, caplog) -> None:
    process, may_start = Process(), asyncio.Event()

    async def start() -> tuple[Process, socket.socket, socket.socket]:
        await may_start.wait()
        return await process.start()

    monkeypatch.setattr(worker, "_start", start)
    running = asyncio.create_task(worker.run())
    await loop_iterations()
    worker.stop(2)
    may_start.set()
    await asyncio.wait_for(running, 30)
    assert process.signals == [15]

    run_process = AsyncMock(return_value="signal 9")
    monkeypatch.setattr(worker, "_run_process", run_process)
    monkeypatch.setattr(worker_process, "restart_pause_s", lambda _: 3600.0)
    worker._stopping.clear()
    running = asyncio.create_task(worker.run())
    await until(lambda: "another one is started in 3600 s" in caplog.text)
    await loop_iterations()
    assert not running.done()
    worker.stop(15)
    await asyncio.wait_for(running, 30)
    assert (process.signals, run_process.await_count) == ([15], 1), "an ended process gets no signal"


async def test_process_may_hang_without_a_timeout(worker, monkeypatch) -> None:
    process, worker._hang_timeout_s = Process(), 0.0
    monkeypatch.setattr(worker, "_start", process.start)
    monkeypatch.setattr(worker_process, "_METRICS_EVERY_S", 0.001)
    monkeypatch.setattr(worker_process, "_MIN_START_TIMEOUT_S", 0.0)
    running = asyncio.create_task(worker.run())
    await until(lambda: worker._channel is not None)
    process.channel.send(WorkerListening())
    await until(lambda: len(process.messages) > 12)  # a process with a timeout is killed after ten
    families = [MetricFamily("a", "b", "counter", [])]
    process.channel.send(MetricsReport(process.messages[0].request_id, families))
    await until(lambda: worker.metrics == families)
    assert process.signals == []
    worker.stop(15)
    await asyncio.wait_for(running, 120)


async def test_process_that_closes_its_socket_or_hangs_is_killed(worker, pauses, monkeypatch, caplog) -> None:
    monkeypatch.setattr(worker_process, "Heartbeat", heartbeat := Mock())
    heartbeat.return_value.run = AsyncMock()
    processes = [Process(), Process()]
    starts = iter(processes)
    monkeypatch.setattr(worker, "_start", lambda: next(starts).start())
    running = asyncio.create_task(worker.run())
    await until(lambda: worker._channel is not None)
    processes[0].channel.close()
    await until(lambda: worker._process is processes[1] and worker._channel is not None)
    assert processes[0].signals == [9]
    assert "could not serve: it ended with signal 9" in caplog.text
    assert worker.has_failed
    processes[1].channel.send(WorkerListening())
    await until(lambda: worker.has_served)
    assert not worker.has_failed
    worker._give_up()
    assert processes[1].signals == [9]
    assert "an HTTP process has not answered for 60 s; it is killed" in caplog.text
    assert heartbeat.call_args == call(60.0, worker._ask_metrics, worker._give_up)
    worker.stop(15)
    await asyncio.wait_for(running, 120)


async def test_process_that_does_not_listen_in_time_is_replaced(worker, pauses, monkeypatch, caplog) -> None:
    monkeypatch.setattr(worker_process, "_MIN_START_TIMEOUT_S", 0.01)
    hung, good = Process(), Process()
    starts = iter([(hung, 0.001), (good, 1000.0)])

    async def start() -> tuple[Process, socket.socket, socket.socket]:
        process, worker._hang_timeout_s = next(starts)
        return await process.start()

    monkeypatch.setattr(worker, "_start", start)
    running = asyncio.create_task(worker.run())
    await until(lambda: worker._process is good and worker._channel is not None)
    assert hung.signals == [9]
    assert "an HTTP process does not listen after 0.01 s; it is killed" in caplog.text
    timer = worker._watch
    good.channel.send(WorkerListening())
    await until(lambda: worker.has_served)
    assert timer.cancelled()
    worker.stop(15)
    await asyncio.wait_for(running, 120)


async def test_pauses_grow_while_processes_die_soon(worker, pauses: list[float], monkeypatch, caplog) -> None:
    now_s, lifetimes_s = 0.0, [61.0, 1.0, 2.0, 60.0, 1.0, 1.0, 1.0, 1.0, 90.0, 1.0, 0.0]

    async def run_process() -> str:
        nonlocal now_s
        worker.has_served = True
        now_s += lifetimes_s.pop(0)
        if not lifetimes_s:
            worker.stop(15)
        return "signal 9"

    monkeypatch.setattr(worker, "_run_process", run_process)
    monkeypatch.setattr(worker_process.time, "monotonic", lambda: now_s)
    await worker.run()
    assert pauses == [0, 0, 1, 3, 7, 15, 30, 30, 0, 0]
    assert caplog.text.count("ended with signal 9; another one is started") == len(pauses)


async def test_process_that_cannot_start_is_tried_again(worker, pauses: list[float], monkeypatch, caplog) -> None:
    monkeypatch.setattr(worker_process.sys, "executable", "/nowhere/python")
    running = asyncio.create_task(worker.run())
    await until(lambda: len(pauses) >= 3)
    worker.stop(15)
    await asyncio.wait_for(running, 120)
    assert pauses[:3] == [0, 1, 3]
    assert worker.has_failed
    assert caplog.text.count("could not serve: it ended with the error [Errno 2]") == len(pauses)
    assert worker._on_end.call_count >= 3
