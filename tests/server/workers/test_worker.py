"""HTTP processes and their supervisor, connected by real sockets in one process."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client.core import CounterMetricFamily, Metric

from penstock.engine import EngineConfig
from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.client.shared_engine import EngineStatus
from penstock.engine.protocol import errors
from penstock.engine.protocol.config import SchedulerConfig
from penstock.engine.protocol.messages import ModelReady, first_request_id
from penstock.engine.protocol.model_info import TokenizerSpec
from penstock.server.middleware.auth import SALT_BYTES
from penstock.server.models.served_model import ServedModel
from penstock.server.settings import ServerSettings
from penstock.server.workers import supervisor as supervisor_module, worker as worker_module
from penstock.server.workers.handover import MAIN, METRICS
from penstock.server.workers.messages import (
    Channel,
    EngineChanged,
    GetMetrics,
    GetModel,
    MetricsReport,
    ModelLoaded,
    ModelNotLoaded,
    WorkerConfig,
    decode_from_worker,
    to_families,
)
from penstock.server.workers.supervisor import WorkerSupervisor
from penstock.server.workers.worker import SupervisorConnection
from penstock.server.workers.worker_process import WorkerProcess

from ...engine.model_infos import make_info
from ...waiting import until

READY = ModelReady(make_info(), TokenizerSpec(json="{}", truncation_side="left", uses_token_types=True))
CONFIG = EngineConfig(model="m", scheduler=SchedulerConfig(max_queued_tokens=40_000, max_queue_s=8.0))
MODEL = ServedModel(("m",), config=CONFIG)


@pytest.fixture(autouse=True)
def attached(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Called with the parts of each engine that an HTTP process attaches to."""
    attached = Mock(return_value="engine")
    monkeypatch.setattr(worker_module.AsyncEngine, "attached", attached)
    monkeypatch.setattr(worker_module, "Dispatcher", Mock(wraps=worker_module.Dispatcher))
    return attached


def answers(count: float) -> list[Metric]:
    return [CounterMetricFamily("penstock_answers", "Text.", value=count)]


class Worker:
    """A fake HTTP process with its link. It records signals, and SIGTERM ends it."""

    def __init__(self, number: int) -> None:
        self.returncode: int | None = None
        self.signals: list[int] = []
        self.num_reloads = 0
        self.link: SupervisorConnection | None = None
        self._number = number
        self._ended = asyncio.Event()

    async def start(self) -> tuple[Any, socket.socket, socket.socket]:
        (end, own_end), (connections, self._connections) = socket.socketpair(), socket.socketpair()
        self._opening = asyncio.create_task(self._open(own_end))
        return self, end, connections

    async def _open(self, end: socket.socket) -> None:
        self.worker_config = await asyncio.to_thread(WorkerConfig.receive, end)
        self.link = SupervisorConnection(self.worker_config, self._ended.set)
        self.link.open(end, lambda: answers(self._number), self._reload)

    def _reload(self) -> None:
        self.num_reloads += 1

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        self.returncode = 0
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        self.link._channel.close()
        self._connections.close()
        return 0


@pytest.fixture
def no_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("signals", "num_calls"), [([], 1), ([signal.SIGTERM], 0)])
async def test_server_that_stops_is_not_announced(signals: list[int], num_calls: int) -> None:
    announced = Mock()
    supervisor = WorkerSupervisor(ServerSettings(api_workers=1), [MODEL], None, announced)
    for number in signals:
        supervisor._handle_signal(number)
    supervisor._models_ready()
    assert announced.call_count == num_calls


@pytest.mark.usefixtures("no_signals")
async def test_processes_share_engines_metrics_and_signals(make_engine, attached: Mock, monkeypatch) -> None:
    workers, announced, loaded = [Worker(1), Worker(2)], Mock(), asyncio.Event()
    monkeypatch.setattr(WorkerProcess, "_start", lambda self: workers[self.slot].start())
    engine = make_engine(name="m")
    engine.ready, engine.status, engine.start = READY, EngineStatus(EngineState.DEAD, reason="new"), loaded.wait
    monkeypatch.setattr(supervisor_module, "EngineServer", Mock(return_value=engine))
    with socket.socket() as listener, socket.socket() as metrics_listener:
        for each in (listener, metrics_listener):
            each.bind(("127.0.0.1", 0))
        supervisor = WorkerSupervisor(ServerSettings(api_workers=2), [MODEL], None, announced)
        supervisor._start_task(asyncio.Event().wait())
        (endless,) = supervisor._tasks
        running = asyncio.create_task(supervisor.run(listener, metrics_listener))
        await until(lambda: all(worker.link for worker in workers))
        plans, links = [worker.worker_config for worker in workers], [worker.link for worker in workers]
        assert sorted(worker_config.connection_number for worker_config in plans) == [1, 2]
        assert [(worker_config.num_workers, len(worker_config.salt)) for worker_config in plans] == [
            (2, SALT_BYTES)
        ] * 2
        assert (plans[0].salt, plans[0].started_s) == (plans[1].salt, plans[1].started_s)

        loading = [asyncio.create_task(link.engine(0)) for link in links]
        links[0].report_listening()
        await until(lambda: supervisor._workers[0].has_served)
        acceptors = supervisor._workers[0]._acceptors
        assert [(each._port, len(each._senders)) for each in acceptors] == [(MAIN, 1), (METRICS, 1)]
        loaded.set()
        assert [await each for each in loading] == ["engine"] * 2
        config, ready, _, client = attached.call_args.args
        assert (config, ready, client.state) == (plans[0].config_with_share(MODEL), READY, EngineState.DEAD)
        supervisor._send_all(EngineChanged(0, EngineStatus(EngineState.STARTING)))
        await until(lambda: client.state is EngineState.STARTING)

        for link in links:
            assert not announced.called
            link.report_ready()
            metrics = await link.gather()  # the message before it has been handled
        announced.assert_called_once_with(supervisor._models.manager.entries)
        links[0].report_ready()  # as the successor of an ended process does
        await links[0].gather()
        (counter,) = [metric for metric in metrics if metric.name == "penstock_answers"]
        assert [sample.value for sample in counter.samples] == [3]
        assert {"penstock_engine_ready", "penstock_model_loaded"} <= {metric.name for metric in metrics}
        assert [len(each._senders) for each in acceptors] == [2, 2]

        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: [worker.num_reloads for worker in workers] == [1, 1])
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, 120)
        assert (listener.fileno(), metrics_listener.fileno(), endless.cancelling()) == (-1, -1, 1)
    assert [worker.signals for worker in workers] == [[signal.SIGTERM]] * 2
    assert (supervisor.signals, supervisor.failures, announced.call_count) == ([signal.SIGTERM], [], 1)


class Supervisor:
    """A fake supervisor with the channel of a link. It records messages."""

    def __init__(self) -> None:
        end, own_end = socket.socketpair()
        self.received: list[Any] = []
        self.channel = Channel(decode_from_worker, self.received.append, lambda: None)
        self.channel.open(own_end)
        self.on_end = Mock()
        worker_config = WorkerConfig(ServerSettings(), (MODEL,), 4, 11, b"salt", 0)
        self.link = SupervisorConnection(worker_config, self.on_end)
        self.link.open(end, lambda: answers(5), Mock())

    async def next(self) -> Any:
        await until(lambda: self.received)
        return self.received.pop(0)


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    supervisor = Supervisor()
    yield supervisor
    supervisor.channel.close()
    supervisor.link._channel.close()


async def test_engine_has_the_share_and_the_request_ids_of_its_process(supervisor: Supervisor, attached) -> None:
    loading = asyncio.create_task(supervisor.link.engine(0))
    assert await supervisor.next() == GetModel(0)
    supervisor.channel.send(EngineChanged(0, EngineStatus(EngineState.STARTING)))
    supervisor.channel.send(ModelLoaded(0, READY))
    await loading
    worker_module.Dispatcher.assert_called_once_with(
        10_000, 2.0, max_request_tokens=40_000, first_id=first_request_id(11)
    )
    client = attached.call_args.args[3]
    assert client.state is EngineState.STARTING
    await supervisor.link.close()
    assert client.state is EngineState.DEAD


async def test_model_that_is_not_loaded_raises_its_error_unless_cancelled(supervisor: Supervisor, caplog) -> None:
    loading = asyncio.create_task(supervisor.link.engine(0))
    assert await supervisor.next() == GetModel(0)
    supervisor.channel.send(ModelNotLoaded(0, "InvalidRequestError", "no weights"))
    with pytest.raises(errors.InvalidRequestError, match="no weights"):
        await loading
    for late in (ModelLoaded(0, READY), ModelNotLoaded(0, "ModelLoadError", "late")):
        loading = asyncio.create_task(supervisor.link.engine(0))
        assert await supervisor.next() == GetModel(0)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        supervisor.channel.send(late)
        supervisor.channel.send(GetMetrics(7))
        assert await supervisor.next() == MetricsReport(7, to_families(answers(5)))
    assert not caplog.records


async def test_metrics_of_other_processes_have_a_deadline(supervisor: Supervisor, monkeypatch, caplog) -> None:
    gathering = asyncio.create_task(supervisor.link.gather())
    assert await supervisor.next() == GetMetrics(0)
    supervisor.channel.send(MetricsReport(0, to_families(answers(8))))
    assert await gathering == answers(8)
    monkeypatch.setattr(worker_module, "_METRICS_TIMEOUT_S", 0.01)
    with pytest.raises(errors.EngineUnavailableError, match="have not sent their metrics"):
        await supervisor.link.gather()
    assert await supervisor.next() == GetMetrics(1)
    supervisor.channel.send(MetricsReport(1, []))  # too late
    assert not supervisor.on_end.called
    supervisor.channel.close()
    await until(lambda: supervisor.on_end.called)
    assert not caplog.records
