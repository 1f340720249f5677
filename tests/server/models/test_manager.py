"""Models that come and go, with engines that answer by arithmetic."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import pytest

from penstock.engine.protocol.errors import EngineUnavailableError, ModelLoadError
from penstock.server.models import manager as manager_module
from penstock.server.models.manager import ModelLimits, ModelManager
from penstock.server.models.served_model import ModelEntry, ModelStatus, ServedModel

from ...waiting import turns, until

MIB = 1 << 20


@dataclass
class Shelf:
    """Makes models, and notes which engines were started."""

    make_engine: Callable
    started: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)

    def model(self, name: str, **more: object) -> ServedModel:
        async def start() -> object:
            self.started.append(name)
            if name in self.gates:
                await self.gates[name].wait()
            if name in self.failures:
                raise self.failures[name]
            engine = self.make_engine(name=name)
            close = engine.close

            async def noted_close() -> None:
                self.closed.append(name)
                await close()

            engine.close = noted_close
            return engine

        return ServedModel((name,), start, **more)

    def manager(self, *names: str, models: tuple[ServedModel, ...] = (), **limits: object) -> ModelManager:
        made = models or tuple(self.model(name) for name in names)
        return ModelManager(made, ModelLimits(**{"drain_timeout_s": 0.2, "wait_s": 120.0, **limits}))


@pytest.fixture
def shelf(make_engine, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.setattr(manager_module, "LEAST_STAY_S", 0.05)
    return Shelf(make_engine)


async def used(manager: ModelManager, entry: ModelEntry) -> None:
    """A request from its arrival to its end."""
    if entry.status is ModelStatus.LOADED:
        entry.enter()
    else:
        await manager.acquire(entry)
    entry.leave(asyncio.get_running_loop().time())


async def test_requests_for_one_model_wait_for_one_load(shelf: Shelf) -> None:
    manager = shelf.manager("a")
    shelf.gates["a"] = asyncio.Event()
    (entry,) = manager.entries
    waiting = [asyncio.create_task(manager.acquire(entry)) for _ in range(5)]
    await until(lambda: (entry.state, len(entry.waiters)) == ("starting", 5))
    shelf.gates["a"].set()
    engines = await asyncio.gather(*waiting)
    assert len({id(engine) for engine in engines}) == 1
    assert (shelf.started, entry.num_in_use, entry.num_loads) == (["a"], 5, 1)
    await manager.close()
    assert shelf.closed == ["a"]


async def test_a_request_that_gives_up_leaves_nothing_behind(shelf: Shelf) -> None:
    manager = shelf.manager("a")
    shelf.gates["a"] = asyncio.Event()
    (entry,) = manager.entries
    waiting = [asyncio.create_task(manager.acquire(entry)) for _ in range(2)]
    await until(lambda: len(entry.waiters) == 2)
    waiting[0].cancel()
    shelf.gates["a"].set()
    await waiting[1]
    assert waiting[0].cancelled()
    assert entry.num_in_use == 1
    entry.leave(0.0)
    # One that is cancelled in the very turn in which its engine comes gives it back.
    await manager.unload(entry)
    shelf.gates["a"].clear()
    late = asyncio.create_task(manager.acquire(entry))
    while not shelf.started[1:]:
        await asyncio.sleep(0)
    (waiter,) = entry.waiters
    shelf.gates["a"].set()
    while not waiter.done():
        await asyncio.sleep(0)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert entry.is_idle
    await manager.close()


async def test_who_waits_too_long_is_told_to_come_back_and_the_load_goes_on(shelf: Shelf) -> None:
    manager = shelf.manager("a", wait_s=0.05)
    shelf.gates["a"] = asyncio.Event()
    (entry,) = manager.entries
    with pytest.raises(EngineUnavailableError, match=r"more than 0\.05 s"):
        await manager.acquire(entry)
    shelf.gates["a"].set()
    await manager.load(entry)
    assert (shelf.started, entry.is_idle) == (["a"], True)
    await manager.close()


async def test_no_more_than_some_wait(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "MAX_WAITING", 2)
    manager = shelf.manager("a")
    shelf.gates["a"] = asyncio.Event()
    waiting = [asyncio.create_task(manager.acquire(manager.entries[0])) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(EngineUnavailableError, match="2 requests wait"):
        await manager.acquire(manager.entries[0])
    shelf.gates["a"].set()
    await asyncio.gather(*waiting)
    await manager.close()


async def test_those_that_have_given_up_do_not_count_as_waiting(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "MAX_WAITING", 3)
    manager = shelf.manager("a", "b", wait_s=0.02)
    shelf.gates["a"] = asyncio.Event()
    a, b = manager.entries
    for _ in range(5):
        with pytest.raises(EngineUnavailableError, match="more than"):
            await manager.acquire(a)
    gone = asyncio.create_task(manager.acquire(a))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert a.waiters == []
    assert await manager.load(b) is None
    await used(manager, b)
    await manager.close()


async def test_without_a_wait_models_are_swapped_all_the_same(shelf: Shelf) -> None:
    manager = shelf.manager("a", "b", max_loaded=1, wait_s=0.0)
    a, b = manager.entries
    assert await manager.load(a) is None
    with pytest.raises(EngineUnavailableError):
        await manager.acquire(b)
    assert await manager.load(b) is None
    assert [entry.state for entry in (a, b)] == ["unloaded", "ready"]
    await manager.close()


async def test_an_operator_unloads_what_is_being_loaded_or_about_to_go(shelf: Shelf) -> None:
    manager = shelf.manager("a", "b", max_loaded=1, drain_timeout_s=0.1)
    shelf.gates["a"] = asyncio.Event()
    a, b = manager.entries
    loading = asyncio.create_task(manager.load(a))
    await until(lambda: shelf.started == ["a"])
    unloading = asyncio.create_task(manager.unload(a))
    await turns()
    shelf.gates["a"].set()
    await asyncio.gather(loading, unloading)
    assert a.state == "unloaded"
    await manager.acquire(a)
    for_b = asyncio.create_task(manager.acquire(b))
    await until(lambda: a.status is ModelStatus.LEAVING)
    await manager.unload(a)  # its request does not end: it is forced
    assert a.state == "unloaded"
    await for_b
    await manager.close()


async def test_a_word_of_ollama_to_a_model_that_is_not_there_holds_for_no_later_life(shelf: Shelf) -> None:
    manager = shelf.manager(models=(shelf.model("a", is_preloaded=False, ttl_s=60.0),))
    (entry,) = manager.entries
    manager.set_ttl(entry, 0.0)
    await manager.load(entry)
    await asyncio.sleep(0.05)
    assert (entry.state, entry.ttl_s) == ("ready", 60.0)
    await manager.close()


async def test_the_end_in_the_middle_of_a_swap_stops_both(shelf: Shelf) -> None:
    manager = shelf.manager("a", "b", max_loaded=1, drain_timeout_s=0.2)
    a, b = manager.entries
    await manager.acquire(a)
    tasks = [asyncio.create_task(manager.acquire(b))]
    await until(lambda: a.status is ModelStatus.LEAVING)
    tasks.append(asyncio.create_task(manager.acquire(a)))
    await turns()
    await manager.close()
    assert shelf.closed == ["a"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_failed_load_is_told_and_tried_again_later(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = shelf.manager("a")
    (entry,) = manager.entries
    shelf.failures["a"] = ModelLoadError("secret path /x")
    for _ in range(2):
        with pytest.raises(EngineUnavailableError, match="a could not be loaded; the server's log") as told:
            await manager.acquire(entry)
        assert "secret" not in told.value.message
    assert shelf.started == ["a"]  # the second request did not try at once again
    assert caplog.text.count("secret path") == 1
    assert (entry.state, entry.can_serve) == ("failed", False)
    shelf.failures.clear()
    monkeypatch.setattr(manager_module, "RETRY_S", 0.0)
    await used(manager, entry)
    assert (entry.state, entry.error) == ("ready", None)
    await manager.close()


async def test_the_longest_unused_idle_model_goes(shelf: Shelf) -> None:
    manager = shelf.manager("a", "b", "c", max_loaded=2)
    a, b, c = manager.entries
    for entry in (a, b, a):
        await used(manager, entry)
        await asyncio.sleep(0.01)
    await used(manager, c)
    assert [entry.state for entry in (a, b, c)] == ["ready", "unloaded", "ready"]
    await used(manager, b)
    assert [entry.state for entry in (a, b, c)] == ["unloaded", "ready", "ready"]
    assert (shelf.started, shelf.closed) == (["a", "b", "c", "b"], ["b", "a"])
    await manager.close()


async def test_a_pinned_model_stays(shelf: Shelf) -> None:
    models = (shelf.model("a", is_pinned=True), shelf.model("b"), shelf.model("c"))
    manager = shelf.manager(models=models, max_loaded=2)
    a, b, c = manager.entries
    for entry in (a, b, c):
        await used(manager, entry)
    assert [entry.state for entry in (a, b, c)] == ["ready", "unloaded", "ready"]
    await manager.close()
    manager = shelf.manager(models=models, max_loaded=1)
    await used(manager, manager.entries[0])
    with pytest.raises(EngineUnavailableError, match=r"cannot be loaded now\. There is no room for it beside"):
        await manager.acquire(manager.entries[1])
    await manager.close()


async def test_memory_bounds_what_is_loaded(shelf: Shelf) -> None:
    models = tuple(shelf.model(name, num_bytes=size * MIB) for name, size in (("a", 60), ("b", 30), ("c", 50)))
    manager = shelf.manager(models=models, max_bytes=100 * MIB)
    a, b, c = manager.entries
    for entry in (a, b, c):
        await used(manager, entry)
        await asyncio.sleep(0.01)
    assert [entry.state for entry in (a, b, c)] == ["unloaded", "ready", "ready"]
    await manager.close()


async def test_a_model_in_use_is_waited_for_and_its_new_requests_wait(shelf: Shelf) -> None:
    manager = shelf.manager("a", "b", max_loaded=1, drain_timeout_s=120.0)
    a, b = manager.entries
    await manager.acquire(a)
    for_b = asyncio.create_task(manager.acquire(b))
    await until(lambda: a.status is ModelStatus.LEAVING)
    for_a = asyncio.create_task(manager.acquire(a))
    await turns()
    assert not for_b.done()
    assert shelf.closed == []  # the request that runs keeps its engine
    a.leave(0.0)
    await for_b
    assert not for_a.done()
    b.leave(asyncio.get_running_loop().time())
    await for_a
    assert [entry.state for entry in (a, b)] == ["ready", "unloaded"]
    await manager.close()


async def test_a_long_request_keeps_its_model_and_those_behind_it_go_on(shelf: Shelf) -> None:
    manager = shelf.manager("a", "b", max_loaded=1, drain_timeout_s=0.05)
    a, b = manager.entries
    await manager.acquire(a)
    for_b = asyncio.create_task(manager.acquire(b))
    await until(lambda: a.status is ModelStatus.LEAVING)
    await manager.acquire(a)  # a stays, as its first request does not end
    assert not for_b.done()
    assert shelf.closed == []
    assert a.num_in_use == 2
    for_b.cancel()
    await asyncio.gather(for_b, return_exceptions=True)
    await manager.close()


async def test_an_idle_model_leaves_after_its_time(shelf: Shelf) -> None:
    manager = shelf.manager(models=(shelf.model("a", ttl_s=0.1), shelf.model("b")))
    a, b = manager.entries
    await manager.acquire(a)
    await used(manager, b)
    await asyncio.sleep(0.2)
    assert a.state == "ready"  # it is in use
    a.leave(0.0)
    a.enter()
    await asyncio.sleep(0.15)
    assert a.state == "ready"
    a.leave(asyncio.get_running_loop().time())
    await until(lambda: a.state == "unloaded")
    assert b.state == "ready"
    await used(manager, a)
    assert a.state == "ready"
    await manager.close()


async def test_clients_say_how_long_a_model_stays_that_comes_and_goes(shelf: Shelf) -> None:
    models = (shelf.model("a"), shelf.model("b", is_preloaded=False), shelf.model("c", ttl_s=60.0, is_pinned=True))
    manager = shelf.manager(models=models)
    for entry in manager.entries:
        await used(manager, entry)
        manager.set_ttl(entry, 0.0)
    await until(lambda: [entry.state for entry in manager.entries] == ["ready", "unloaded", "ready"])
    await used(manager, manager.entries[1])
    assert manager.entries[1].ttl_s == inf  # what was asked for ended with the model
    await manager.close()


async def test_an_operator_unloads_what_is_pinned_and_the_next_request_loads_it(shelf: Shelf) -> None:
    manager = shelf.manager(models=(shelf.model("a", is_pinned=True),))
    (entry,) = manager.entries
    assert await manager.load(entry) is None
    await manager.unload(entry)
    await manager.unload(entry)
    assert (entry.state, shelf.closed) == ("unloaded", ["a"])
    await used(manager, entry)
    assert shelf.started == ["a", "a"]
    await manager.close()


async def test_the_end_stops_what_is_being_loaded(shelf: Shelf) -> None:
    manager = shelf.manager("a", "b")
    shelf.gates["b"] = asyncio.Event()
    a, b = manager.entries
    await used(manager, a)
    loading = asyncio.create_task(manager.acquire(b))
    await until(lambda: "b" in shelf.started)
    await manager.close()
    assert shelf.closed == ["a"]
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    assert b.status is ModelStatus.UNLOADED


async def test_many_models_under_one_place_all_get_their_turn(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed loops of clients for three models with room for one: nobody starves, no request loses its engine."""
    monkeypatch.setattr(manager_module, "LEAST_STAY_S", 0.01)
    manager = shelf.manager("a", "b", "c", max_loaded=1)
    answered = {entry.name: 0 for entry in manager.entries}

    async def client(entry: ModelEntry) -> None:
        while min(answered.values()) < 3:
            if entry.status is ModelStatus.LOADED:
                entry.enter()
                engine = entry.engine
            else:
                engine = await manager.acquire(entry)
            await asyncio.sleep(0.002)
            assert not engine.is_closed
            answered[entry.name] += 1
            entry.leave(asyncio.get_running_loop().time())

    async with asyncio.timeout(120):
        await asyncio.gather(*(client(entry) for entry in manager.entries for _ in range(3)))
    assert sum(entry.uses_memory for entry in manager.entries) <= 1
    await manager.close()


async def test_who_can_wait_takes_no_room_of_a_model_that_others_may_miss(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = shelf.manager("a", "b", "c", max_loaded=1)
    first, second, third = manager.entries
    await manager.acquire(first)
    for is_in_use in (True, False):
        if not is_in_use:
            first.leave(time.monotonic())
        with pytest.raises(EngineUnavailableError, match="no room for b while others are in use"):
            await manager.acquire(second, is_patient=True)
        assert (shelf.closed, first.is_idle, second.status) == ([], not is_in_use, ModelStatus.UNLOADED)
    monkeypatch.setattr(manager_module, "UNMISSED_S", 0.01)
    await asyncio.sleep(0.02)
    await manager.acquire(second, is_patient=True)
    second.leave(time.monotonic())
    assert shelf.closed == ["a"]
    # A load that is under way for another one comes first; one that is under way for this model is waited for.
    shelf.gates["a"] = asyncio.Event()
    client = asyncio.create_task(manager.acquire(first))
    while shelf.started.count("a") < 2:
        await asyncio.sleep(0)
    with pytest.raises(EngineUnavailableError, match="no room for c"):
        await manager.acquire(third, is_patient=True)
    line = asyncio.create_task(manager.acquire(first, is_patient=True))
    await asyncio.sleep(0)
    shelf.gates["a"].set()
    assert await line is await client
    await manager.close()
