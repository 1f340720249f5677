import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from math import inf
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.protocol.errors import EngineUnavailableError, ModelLoadError
from penstock.server.admission import ServerRejectionReason
from penstock.server.models import model_manager as manager_module
from penstock.server.models.model_entry import ModelEntry, ModelMetrics, ModelStatus
from penstock.server.models.model_manager import ModelLimits, ModelManager
from penstock.server.models.served_model import ServedModel

from ...tables import cases
from ...waiting import later, loop_iterations, until

MIB = 1 << 20


@dataclass
class Engines:
    """Makes managers of fake engines. An engine starts when the gate of its name is set, or fails with its failure.

    The lists hold the names of engines that were started, closed, or cancelled during the start.
    """

    make_engine: Callable
    started: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    managers: list[ModelManager] = field(default_factory=list)
    open_gate: asyncio.Event = field(default_factory=asyncio.Event)

    def model(self, name: str, **more: object) -> ServedModel:
        async def start() -> object:
            self.started.append(name)
            try:
                await self.gates.get(name, self.open_gate).wait()
            except asyncio.CancelledError:
                await loop_iterations()
                self.cancelled.append(name)
                raise
            if name in self.failures:
                raise self.failures[name]
            engine = self.make_engine(name=name)
            close = engine.close

            async def record_and_close() -> None:
                self.closed.append(name)
                await close()

            engine.close = record_and_close
            return engine

        return ServedModel((name,), start, **more)

    def manager(self, *models: str | ServedModel, **limits: object) -> ModelManager:
        served = [self.model(model) if isinstance(model, str) else model for model in models]
        manager = ModelManager(served, ModelLimits(**{"drain_timeout_s": 0.2, "wait_s": 120.0, **limits}))
        self.managers.append(manager)
        return manager


@pytest.fixture
async def engines(make_engine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engines]:
    monkeypatch.setattr(manager_module, "MIN_LOADED_S", 0.05)
    engines = Engines(make_engine)
    engines.open_gate.set()
    yield engines
    for manager in engines.managers:
        await manager.close()


async def use(manager: ModelManager, entry: ModelEntry) -> None:
    """Begin and end a request."""
    if entry.status is ModelStatus.LOADED:
        entry.acquire()
    else:
        await manager.acquire(entry)
    entry.release(time.monotonic())


async def cancel(*tasks: asyncio.Task) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def states(manager: ModelManager) -> list[str]:
    return [entry.state for entry in manager.entries]


async def test_requests_of_one_model_wait_for_one_load(engines: Engines) -> None:
    manager = engines.manager("a")
    engines.gates["a"] = asyncio.Event()
    (entry,) = manager.entries
    cancelled, *waiting = [asyncio.create_task(manager.acquire(entry)) for _ in range(5)]
    await until(lambda: (entry.state, len(entry.waiters)) == ("starting", 5))
    cancelled.cancel()
    engines.gates["a"].set()
    assert len({id(engine) for engine in await asyncio.gather(*waiting)}) == 1
    assert cancelled.cancelled()
    assert (engines.started, entry.num_requests, entry.num_loads) == (["a"], 4, 1)
    await manager.close()
    assert engines.closed == ["a"]


async def test_load_continues_after_a_request_waited_too_long(engines: Engines) -> None:
    manager = engines.manager("a", wait_s=0.05)
    engines.gates["a"] = asyncio.Event()
    (entry,) = manager.entries
    with pytest.raises(EngineUnavailableError, match=r"more than 0\.05 s"):
        await manager.acquire(entry)
    assert entry.waiters == []
    engines.gates["a"].set()
    await manager.load(entry)
    assert (engines.started, entry.is_idle) == (["a"], True)


@pytest.mark.parametrize(("method", "state"), [("set_loaded", "ready"), ("set_failed", "failed")])
async def test_engine_that_comes_after_a_disconnect_is_released(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, method: str, state: str
) -> None:
    end_load = getattr(ModelEntry, method)

    def end_and_cancel(entry: ModelEntry, *arguments: object) -> None:
        end_load(entry, *arguments)
        request.cancel()  # its future has a result, which it has not read

    monkeypatch.setattr(ModelEntry, method, end_and_cancel)
    if method == "set_failed":
        engines.failures["a"] = ModelLoadError("no")
    manager = engines.manager("a")
    (entry,) = manager.entries
    request = asyncio.create_task(manager.acquire(entry))
    with pytest.raises(asyncio.CancelledError):
        await request
    assert (entry.state, entry.num_requests) == (state, 0)


async def test_number_of_waiting_requests_is_limited(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "MAX_WAITING", 2)
    manager = engines.manager("a", "b")
    engines.gates["a"] = asyncio.Event()
    a, b = manager.entries
    waiting = [asyncio.create_task(manager.acquire(a)) for _ in range(2)]
    await until(lambda: len(a.waiters) == 2)
    with pytest.raises(EngineUnavailableError, match="2 requests wait"):
        await manager.acquire(b)
    await cancel(*waiting)
    await manager.acquire(b)


async def test_unload_waits_for_a_load_or_another_unload(engines: Engines) -> None:
    manager = engines.manager("a", "b", max_loaded=1, drain_timeout_s=0.1)
    engines.gates["a"] = asyncio.Event()
    a, b = manager.entries
    loading = asyncio.create_task(manager.load(a))
    await until(lambda: engines.started == ["a"])
    unloading = asyncio.create_task(manager.unload(a))
    await loop_iterations()
    engines.gates["a"].set()
    await asyncio.gather(loading, unloading)
    assert a.state == "unloaded"
    await manager.acquire(a)
    for_b = asyncio.create_task(manager.acquire(b))
    await until(lambda: a.status is ModelStatus.UNLOADING)
    await manager.unload(a)  # its request does not end before the drain timeout
    assert a.state == "unloaded"
    await for_b


async def test_unload_ends_when_a_load_fails_or_is_cancelled(engines: Engines) -> None:
    manager = engines.manager("a")
    (entry,) = manager.entries
    engines.failures["a"] = ModelLoadError("no")
    for fails in (True, False):
        engines.gates["a"] = asyncio.Event()
        loading = asyncio.create_task(manager.load(entry))
        await until(lambda: entry.status is ModelStatus.LOADING)
        unloading = asyncio.create_task(manager.unload(entry))
        await loop_iterations()
        assert not unloading.done()
        if fails:
            engines.gates["a"].set()
        else:
            manager._loads["a"].cancel()
        await asyncio.wait_for(unloading, 120)
        await asyncio.gather(loading, return_exceptions=True)
        assert entry.state == "unloaded"


async def test_pinned_model_is_unloaded_on_request_only(engines: Engines, caplog) -> None:
    manager = engines.manager(engines.model("a", is_pinned=True))
    (entry,) = manager.entries
    assert await manager.load(entry) is None
    await manager.unload(entry)
    await manager.unload(entry)
    assert (entry.state, engines.closed, caplog.messages) == ("unloaded", ["a"], [])
    await use(manager, entry)
    assert engines.started == ["a", "a"]


async def test_model_can_be_loaded_again_after_its_engine_failed_to_stop(engines: Engines) -> None:
    manager = engines.manager("a")
    (entry,) = manager.entries
    assert await manager.load(entry) is None
    assert entry.engine is not None
    entry.engine.drain = AsyncMock(side_effect=OSError("a bug"))
    with pytest.raises(OSError, match="a bug"):
        await manager.unload(entry)
    await use(manager, entry)
    assert (entry.state, engines.started) == ("ready", ["a", "a"])


async def test_failed_load_is_retried_after_growing_pauses(engines: Engines, monkeypatch, caplog) -> None:
    now_s, pauses_s = 0.0, (1, 3, 7, 10, 10)
    monkeypatch.setattr(manager_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    manager = engines.manager("a")
    (entry,) = manager.entries
    engines.failures["a"] = ModelLoadError("secret path /x")
    for pause_s in pauses_s:
        for _ in range(2):
            with pytest.raises(EngineUnavailableError, match="a could not be loaded; the server's log") as error:
                await manager.acquire(entry)
            assert ("secret" in error.value.message, error.value.reason) == (False, ServerRejectionReason.MODEL_LOADING)
            assert error.value.retry_after_s == pause_s
        now_s += pause_s
    assert engines.started == ["a"] * len(pauses_s)
    assert caplog.text.count("secret path") == len(pauses_s)
    assert (entry.state, entry.can_serve) == ("failed", False)
    engines.failures.clear()
    await use(manager, entry)
    assert (entry.state, entry.error, entry.num_failures) == ("ready", None, 0)


@cases(__file__, "requests", "limits", "unloaded")
async def test_least_recently_used_models_are_unloaded(engines: Engines, requests: str, limits, unloaded: str) -> None:
    sizes = {"a": 60, "b": 30, "c": 50}
    models = [engines.model(name, num_bytes=size * MIB) for name, size in sizes.items()]
    manager = engines.manager(*models, engines.model("p", is_pinned=True), **limits)
    entries = {entry.name: entry for entry in manager.entries}
    for name in requests:
        await use(manager, entries[name])
        await loop_iterations()
    assert engines.closed == list(unloaded)


async def test_time_and_memory_of_a_load_are_measured(engines: Engines, monkeypatch) -> None:
    passed_s = 0.0
    monkeypatch.setattr(manager_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s))
    monkeypatch.setattr(engines.make_engine, "host_bytes", lambda _: 80 * MIB)
    manager = engines.manager(*(engines.model(name, num_bytes=5 * MIB) for name in "abc"), max_bytes=100 * MIB)
    a, b, c = manager.entries
    engines.gates |= {"a": asyncio.Event(), "b": asyncio.Event()}
    loading = asyncio.create_task(manager.load(a))
    await until(lambda: engines.started == ["a"])
    passed_s = 70.0
    engines.gates["a"].set()
    await loading
    request = asyncio.create_task(manager.acquire(b))
    await until(lambda: engines.started == ["a", "b"])
    metrics = {family.name: [s.value for s in family.samples] for family in ModelMetrics(manager.entries).collect()}
    assert metrics.pop("penstock_model_load_seconds") == [pytest.approx(70.0, abs=10.0), 0, 0]
    assert metrics == {
        "penstock_model_loaded": [1, 0, 0],
        "penstock_model_loads": [1, 0, 0],
        "penstock_model_memory_bytes": [80 * MIB, 0, 0],
        "penstock_model_waiting_requests": [0, 1, 0],
    }
    engines.gates["b"].set()
    await request
    b.release(time.monotonic() + passed_s)
    await use(manager, c)
    assert engines.closed == ["a"], "it used more memory than expected"


async def test_request_is_rejected_if_pinned_models_take_all_space(engines: Engines) -> None:
    manager = engines.manager(engines.model("a", is_pinned=True), "b", max_loaded=1)
    await use(manager, manager.entries[0])
    with pytest.raises(EngineUnavailableError, match=r"cannot be loaded now\. b does not fit beside the p") as error:
        await manager.acquire(manager.entries[1])
    assert error.value.reason is ServerRejectionReason.MODEL_MEMORY


async def test_model_in_use_is_unloaded_after_its_requests(engines: Engines) -> None:
    manager = engines.manager("a", "b", "c", max_loaded=2, drain_timeout_s=120.0)
    a, b, c = manager.entries
    for entry in (a, c):
        await manager.acquire(entry)
    for_b = asyncio.create_task(manager.acquire(b))
    await until(lambda: a.status is ModelStatus.UNLOADING)
    for_a = asyncio.create_task(manager.acquire(a))
    await loop_iterations()
    assert not for_b.done()
    assert engines.closed == []
    a.release(0.0)
    await for_b
    assert not for_a.done()
    c.release(time.monotonic())
    await for_a
    assert states(manager) == ["ready", "ready", "unloaded"]


async def test_model_that_fits_does_not_wait_for_one_that_needs_space(engines: Engines) -> None:
    sizes = {"used": 60, "large": 70, "fits": 30, "later": 35}  # `later` fits beside `used`, but not beside `large`
    models = [engines.model(name, num_bytes=size * MIB) for name, size in sizes.items()]
    manager = engines.manager(*models, max_bytes=100 * MIB, drain_timeout_s=120.0)
    used, large, fits, later = manager.entries
    await manager.acquire(used)
    for_large = asyncio.create_task(manager.acquire(large))
    await until(lambda: used.status is ModelStatus.UNLOADING)
    for_later = asyncio.create_task(manager.acquire(later))
    for_used = asyncio.create_task(manager.acquire(used))
    await manager.acquire(fits)
    assert (engines.started, for_large.done(), for_later.done()) == (["used", "fits"], False, False)
    used.release(time.monotonic())
    await for_large
    assert (engines.started, engines.closed) == (["used", "fits", "large"], ["used"])
    await cancel(for_later, for_used)


async def test_model_with_long_requests_stays_loaded(engines: Engines, monkeypatch) -> None:
    passed_s = 0.0
    monkeypatch.setattr(manager_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s))
    manager = engines.manager("a", "b", max_loaded=1, drain_timeout_s=0.1)
    a, b = manager.entries
    await manager.acquire(a)
    for_b = asyncio.create_task(manager.load(b))
    await until(lambda: a.status is ModelStatus.UNLOADING)
    assert await manager.acquire(a) is a.engine
    passed_s = 1000.0
    assert str(await for_b).startswith("b does not fit beside the models that are in use.")
    assert (states(manager), a.num_requests, engines.started, engines.closed) == (["ready", "failed"], 2, ["a"], [])
    await manager.unload(b)
    assert b.state == "unloaded"


async def test_requests_that_outlast_the_drain_are_logged(engines: Engines, caplog) -> None:
    manager = engines.manager("a")
    (entry,) = manager.entries
    await manager.acquire(entry)
    waited = []

    async def drain(timeout_s: float) -> bool:
        waited.append(timeout_s)
        entry.engine.state = EngineState.DRAINING
        assert entry.can_serve, "it is loaded again for the next request"
        return False

    entry.engine.drain = drain
    await manager.unload(entry)
    assert "a was stopped with running requests" in caplog.messages
    assert (entry.state, engines.closed, waited) == ("unloaded", ["a"], [0.0])


async def test_idle_model_is_unloaded_after_its_ttl(engines: Engines) -> None:
    manager = engines.manager(engines.model("a", ttl_s=100.0), "b")
    a, b = manager.entries
    await manager.acquire(a)
    await use(manager, b)
    with later(200.0):
        await loop_iterations()
    assert a.state == "ready", "a request uses it"
    a.release(-inf)
    a.acquire()
    with later(200.0):
        await loop_iterations()
    assert a.state == "ready", "another request uses it"
    a.release(-inf)
    with later(200.0):
        await until(lambda: a.state == "unloaded" and not manager._unloads)
    assert b.state == "ready"
    assert "b" not in manager._timers, "it has no ttl"
    timers = []
    for _ in range(2):
        await use(manager, a)
        timers.append(manager._timers["a"])
    assert (a.state, [timer.cancelled() for timer in timers]) == ("ready", [True, False])
    await manager.close()
    assert timers[1].cancelled()


async def test_timer_may_be_early_by_10_ms(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = engines.manager(engines.model("a", ttl_s=100.0))
    (entry,) = manager.entries
    await manager.load(entry)
    entry.last_used_s = 0.0
    for now_s, state in ((99.98, "ready"), (99.995, "unloaded")):
        monkeypatch.setattr(manager_module, "time", SimpleNamespace(monotonic=lambda now_s=now_s: now_s))
        await manager._unload_unused(entry)
        assert entry.state == state


async def test_model_in_use_stays_loaded_for_a_minimum_time(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    passed_s = 0.0
    monkeypatch.setattr(manager_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s))
    monkeypatch.setattr(manager_module, "MIN_LOADED_S", 100.0)
    manager = engines.manager("a", "b", max_loaded=1, drain_timeout_s=50.0, wait_s=50.0)
    a, b = manager.entries
    await manager.acquire(a)
    for_b = asyncio.create_task(manager.load(b))
    await loop_iterations()
    assert a.status is ModelStatus.LOADED
    passed_s = 101.0
    with later(101.0):
        await until(lambda: a.status is ModelStatus.UNLOADING)
    a.release(time.monotonic())
    assert await for_b is None


async def test_loaded_model_counts_as_used(engines: Engines) -> None:
    manager = engines.manager("a", "b", "c", engines.model("d", ttl_s=50.0), max_loaded=2)
    a, b, c, d = manager.entries
    for entry in (b, a, c, d):
        await manager.load(entry)
    assert engines.closed == ["b", "a"]
    with later(100.0):
        d.last_used_s -= 100.0
        await until(lambda: d.state == "unloaded")


async def test_ttl_of_a_client_holds_until_the_next_load(engines: Engines) -> None:
    models = (engines.model("b", is_preloaded=False), engines.model("c", ttl_s=60.0, is_pinned=True))
    manager = engines.manager("a", *models)
    for entry in manager.entries:
        await use(manager, entry)
        manager.set_ttl(entry, 0.0)
    await until(lambda: states(manager) == ["ready", "unloaded", "ready"])
    _, on_demand, _ = manager.entries
    manager.set_ttl(on_demand, 0.0)  # no effect: the model is not loaded
    await use(manager, on_demand)
    assert on_demand.ttl_s == inf


@pytest.mark.parametrize("fails", [False, True])
async def test_ttl_of_a_client_during_a_load_holds_for_that_load(engines: Engines, fails: bool) -> None:
    manager = engines.manager(engines.model("a", is_preloaded=False))
    (entry,) = manager.entries
    engines.gates["a"], engines.failures = asyncio.Event(), {"a": ModelLoadError("no")} if fails else {}
    request = asyncio.create_task(manager.acquire(entry))
    await until(lambda: entry.status is ModelStatus.LOADING)
    manager.set_ttl(entry, 0.0)
    engines.gates["a"].set()
    await asyncio.wait([request])
    if not fails:
        entry.release(time.monotonic())
    await until(lambda: entry.state == ("failed" if fails else "unloaded"))
    assert (engines.closed, entry.ttl_s) == ([] if fails else ["a"], inf)
    assert fails == isinstance(request.exception(), EngineUnavailableError)


async def test_patient_request_unloads_no_recently_used_model(engines: Engines, monkeypatch) -> None:
    manager = engines.manager("a", "b", "c", max_loaded=1)
    first, second, third = manager.entries
    await manager.acquire(first)
    for is_in_use in (True, False):
        if not is_in_use:
            first.release(time.monotonic())
        with pytest.raises(EngineUnavailableError, match="no memory for b while other models are in use"):
            await manager.acquire(second, is_background=True)
        assert (engines.closed, first.is_idle, second.status) == ([], not is_in_use, ModelStatus.UNLOADED)
    monkeypatch.setattr(manager_module, "RECENT_USE_S", 0.0)
    await manager.acquire(second, is_background=True)
    second.release(time.monotonic())
    assert engines.closed == ["a"]
    # A loading model may need the space. A patient request may wait for the load of its own model.
    engines.gates["a"] = asyncio.Event()
    request = asyncio.create_task(manager.acquire(first))
    await until(lambda: engines.started.count("a") == 2)
    with pytest.raises(EngineUnavailableError, match="no memory for c"):
        await manager.acquire(third, is_background=True)
    patient = asyncio.create_task(manager.acquire(first, is_background=True))
    await loop_iterations()
    engines.gates["a"].set()
    assert await patient is await request


async def test_patient_request_unloads_no_pinned_model(engines: Engines, monkeypatch) -> None:
    monkeypatch.setattr(manager_module, "RECENT_USE_S", 0.0)
    manager = engines.manager(engines.model("a", is_pinned=True), "b", max_loaded=1)
    pinned, other = manager.entries
    await use(manager, pinned)
    with pytest.raises(EngineUnavailableError, match="no memory for b"):
        await manager.acquire(other, is_background=True)
    assert other.status is ModelStatus.UNLOADED


async def test_shutdown_cancels_a_load(engines: Engines) -> None:
    manager = engines.manager("c")
    engines.gates["c"] = asyncio.Event()
    async with manager.running():
        await until(lambda: "c" in engines.started)
    assert (engines.cancelled, states(manager)) == (["c"], ["unloaded"])
