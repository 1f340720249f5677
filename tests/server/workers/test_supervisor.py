import asyncio
import logging
import signal
import socket
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from penstock.engine import EngineConfig
from penstock.engine.protocol.errors import InvalidRequestError
from penstock.server.models.served_model import ServedModel
from penstock.server.settings import ServerSettings
from penstock.server.workers import supervisor as supervisor_module
from penstock.server.workers.messages import (
    EngineChanged,
    ModelLoaded,
    ModelNotLoaded,
    WorkerListening,
    to_families,
    to_metrics,
)
from penstock.server.workers.supervisor import (
    NothingServedError,
    SupervisedModels,
    WorkerSupervisor,
    merge_metrics,
    sum_metrics,
)
from penstock.server.workers.worker_process import WorkerProcess

from ...tables import table
from ...waiting import later, loop_iterations, until


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slots of processes that died before they served. The third process of slot 1 serves until the end."""
    deaths: list[int] = []

    async def run_process(self: WorkerProcess) -> str:
        await asyncio.sleep(0.01)
        if self.slot == 1 and deaths.count(1) == 2:
            self._heartbeat = Mock(run=lambda: asyncio.sleep(0))
            self._handle(WorkerListening())
            await self._stopping.wait()
            return "exit code 0"
        deaths.append(self.slot)
        self._end()
        return "signal 9"

    async def pause(self: WorkerProcess, seconds: float) -> None:
        await asyncio.sleep(0.01)

    monkeypatch.setattr(WorkerProcess, "_run_process", run_process)
    monkeypatch.setattr(WorkerProcess, "_pause", pause)
    return deaths


def listener() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener


def make_supervisor() -> WorkerSupervisor:
    return WorkerSupervisor(ServerSettings(api_workers=2), [], None, Mock())


async def test_server_ends_if_no_process_can_serve(deaths: list[int]) -> None:
    supervisor = make_supervisor()
    await asyncio.wait_for(supervisor.run(listener()), 120)
    assert [type(error) for error in supervisor.failures] == [NothingServedError]
    assert set(deaths) == {0, 1}


async def test_server_continues_while_one_process_serves(deaths: list[int], caplog) -> None:
    caplog.set_level(logging.INFO)
    deaths += [1, 1]  # slot 1 serves at once
    supervisor = make_supervisor()
    running = asyncio.create_task(supervisor.run(listener()))
    await until(lambda: deaths.count(0) >= 5 or running.done())
    assert not running.done()
    supervisor._handle_signal(15)
    await asyncio.wait_for(running, 120)
    assert (supervisor.failures, supervisor.signals) == ([], [15])
    assert caplog.messages[-2:] == ["SIGTERM: the server is shutting down", "the server has stopped"]


async def test_server_ends_if_a_process_cannot_be_supervised(monkeypatch, caplog) -> None:
    monkeypatch.setattr(WorkerProcess, "run", AsyncMock(side_effect=RuntimeError("a bug")))
    supervisor = make_supervisor()
    await asyncio.wait_for(supervisor.run(listener()), 120)
    assert [type(error) for error in supervisor.failures] == [NothingServedError]
    assert "an HTTP process cannot be supervised any more" in caplog.messages


async def test_process_that_does_not_end_in_time_is_killed(monkeypatch, caplog) -> None:
    killed = asyncio.Event()
    monkeypatch.setattr(WorkerProcess, "run", lambda self: killed.wait())
    monkeypatch.setattr(WorkerProcess, "kill", lambda self: killed.set())
    supervisor = WorkerSupervisor(ServerSettings(api_workers=2, drain_timeout_s=5), [], None, Mock())
    running = asyncio.create_task(supervisor.run(listener()))
    await asyncio.sleep(0)
    supervisor._handle_signal(15)
    await loop_iterations()
    with later(9.0):
        await loop_iterations()
        assert not killed.is_set()
    with later(16.0):
        await asyncio.wait_for(running, 120)
    assert "2 HTTP processes have not ended in time; they are killed" in caplog.messages


async def test_loaded_and_failed_models_are_reported(make_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, Any, dict[str, Any]]] = []
    failures = {"bad": InvalidRequestError("no weights"), "worse": RuntimeError("a bug")}

    def engine_server(config: EngineConfig, on_status: Any, **named: Any) -> Any:
        engine = make_engine(name=config.model)
        engine.ready, engine.status = "ready", "status"
        engine.start = AsyncMock(side_effect=failures.get(config.model))
        engine.drain = AsyncMock(return_value=True)
        made.append((engine, on_status, named))
        return engine

    monkeypatch.setattr(supervisor_module, "EngineServer", engine_server)
    sent: list[Any] = []
    models = [ServedModel((name,), config=EngineConfig(model=name)) for name in ("good", *failures)]
    settings = ServerSettings(log_level="debug", log_format="json", drain_timeout_s=7)
    process, nothing = Mock(), Mock()
    supervised = SupervisedModels(settings, models, process, send_all=sent.append, on_ready=nothing, on_failure=nothing)
    for number in range(3):
        await supervised.send_model(number, sent.append)
    made[1][1]("new")
    expected = [EngineChanged(0, "status"), ModelLoaded(0, "ready")]
    expected += [ModelNotLoaded(1, "InvalidRequestError", "no weights"), ModelNotLoaded(2, "ModelLoadError", "a bug")]
    assert sent == [*expected, EngineChanged(1, "new")]
    assert supervised._named_engines() == [(made[0][0], "good")]
    await supervised.manager.unload(supervised.manager.entries[0])
    assert 0 < made[0][0].drain.call_args.args[0] <= 7
    await supervised.send_model(0, sent.append)
    logs = {"log_level": "DEBUG", "log_format": "json"}
    assert [named for _, _, named in made] == [{**logs, "process": each} for each in (process, None, None, None)]


async def test_second_ctrl_c_reaches_the_processes() -> None:
    supervisor, worker = make_supervisor(), Mock()
    supervisor._workers = [worker]
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        assert not worker.stop.called
        supervisor._handle_signal(number)
    worker.stop.assert_called_once_with(signal.SIGINT)


def counter(name: str, **values: float) -> Metric:
    family = CounterMetricFamily(name, "Text.", labels=("route",))
    for route, value in values.items():
        family.add_metric((route,), value)
    return family


def gauge(name: str, value: float) -> Metric:
    return GaugeMetricFamily(name, "Text.", value=value)


def histogram(*counts: int, total: float) -> Metric:
    family = HistogramMetricFamily("penstock_seconds", "Text.", labels=("route",))
    family.add_metric(("a",), [(bound, float(n)) for bound, n in zip(("1.0", "+Inf"), counts, strict=True)], total)
    return family


def lines(families: list) -> list[str]:
    text = generate_latest(Mock(collect=lambda: to_metrics(families))).decode()
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_counters_and_histograms_are_summed() -> None:
    parts = [
        to_families([counter("penstock_answers", a=3, b=1), histogram(1, 2, total=1.5)]),
        to_families([counter("penstock_answers", a=4, c=2), histogram(5, 9, total=8.5)]),
    ]
    assert lines(sum_metrics(parts)) == table(__file__, "test_counters_and_histograms_are_summed")


def test_engine_metrics_are_those_of_the_supervisor() -> None:
    def process(cpu_s: float, tokens: float, started_s: float) -> list:
        return to_families(
            [
                counter("penstock_engine_steps", a=tokens),
                gauge("penstock_engine_queued_tokens", tokens + 3),
                gauge("penstock_engine_ready", 1),
                gauge("penstock_model_loaded", 1),
                gauge("process_resident_memory_bytes", 100),
                gauge("process_start_time_seconds", started_s),
                counter("process_cpu_seconds", a=cpu_s),
            ]
        )

    of_all = lines(merge_metrics(process(1, 50, 1000), [process(2, 0, 2000), process(4, 0, 3000)]))
    assert of_all == table(__file__, "test_engine_metrics_are_those_of_the_supervisor")


async def test_counts_of_ended_processes_remain() -> None:
    families = to_families([counter("penstock_answers", a=3), gauge("penstock_open", 4), histogram(1, 2, total=1.5)])
    supervisor, worker = make_supervisor(), Mock(metrics=families, has_failed=False)
    supervisor._workers = [worker]
    for _ in range(2):  # the second process ends before it has sent metrics
        supervisor._handle_worker_end(worker)
    assert [family.kind for family in supervisor._ended_metrics] == ["counter", "histogram"]
    assert lines(supervisor._ended_metrics)[0] == 'penstock_answers_total{route="a"} 3.0'
