"""Models that come and go, with engines that answer by arithmetic."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import pytest

from penstock.engine.protocol.errors import EngineUnavailableError, ModelLoadError
from penstock.server.models import keeper as keeper_module
from penstock.server.models.keeper import KeeperLimits, ModelKeeper
from penstock.server.models.model_entry import ModelEntry, ModelStatus
from penstock.server.models.served_model import ServedModel

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

    def keeper(self, *names: str, models: tuple[ServedModel, ...] = (), **limits: object) -> ModelKeeper:
        made = models or tuple(self.model(name) for name in names)
        return ModelKeeper(made, KeeperLimits(**{"drain_timeout_s": 0.2, "wait_s": 120.0, **limits}))


@pytest.fixture
def shelf(make_engine, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.setattr(keeper_module, "LEAST_STAY_S", 0.05)
    return Shelf(make_engine)


async def used(keeper: ModelKeeper, entry: ModelEntry) -> None:
    """A request from its arrival to its end."""
    if entry.status is ModelStatus.LOADED:
        entry.enter()
    else:
        await keeper.acquire(entry)
    entry.leave(asyncio.get_running_loop().time())


async def test_requests_for_one_model_wait_for_one_load(shelf: Shelf) -> None:
    keeper = shelf.keeper("a")
    shelf.gates["a"] = asyncio.Event()
    (entry,) = keeper.entries
    waiting = [asyncio.create_task(keeper.acquire(entry)) for _ in range(5)]
    await until(lambda: (entry.state, len(entry.waiters)) == ("starting", 5))
    shelf.gates["a"].set()
    engines = await asyncio.gather(*waiting)
    assert len({id(engine) for engine in engines}) == 1
    assert (shelf.started, entry.num_in_use, entry.num_loads) == (["a"], 5, 1)
    await keeper.close()
    assert shelf.closed == ["a"]


async def test_a_request_that_gives_up_leaves_nothing_behind(shelf: Shelf) -> None:
    keeper = shelf.keeper("a")
    shelf.gates["a"] = asyncio.Event()
    (entry,) = keeper.entries
    waiting = [asyncio.create_task(keeper.acquire(entry)) for _ in range(2)]
    await until(lambda: len(entry.waiters) == 2)
    waiting[0].cancel()
    shelf.gates["a"].set()
    await waiting[1]
    assert waiting[0].cancelled()
    assert entry.num_in_use == 1
    entry.leave(0.0)
    # One that is cancelled in the very turn in which its engine comes gives it back.
    await keeper.unload(entry)
    shelf.gates["a"].clear()
    late = asyncio.create_task(keeper.acquire(entry))
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
    await keeper.close()


async def test_who_waits_too_long_is_told_to_come_back_and_the_load_goes_on(shelf: Shelf) -> None:
    keeper = shelf.keeper("a", wait_s=0.05)
    shelf.gates["a"] = asyncio.Event()
    (entry,) = keeper.entries
    with pytest.raises(EngineUnavailableError, match=r"more than 0\.05 s"):
        await keeper.acquire(entry)
    shelf.gates["a"].set()
    await keeper.load(entry)
    assert (shelf.started, entry.is_idle) == (["a"], True)
    await keeper.close()


async def test_no_more_than_some_wait(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "MAX_WAITING", 2)
    keeper = shelf.keeper("a")
    shelf.gates["a"] = asyncio.Event()
    waiting = [asyncio.create_task(keeper.acquire(keeper.entries[0])) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(EngineUnavailableError, match="2 requests wait"):
        await keeper.acquire(keeper.entries[0])
    shelf.gates["a"].set()
    await asyncio.gather(*waiting)
    await keeper.close()


async def test_those_that_have_given_up_do_not_count_as_waiting(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "MAX_WAITING", 3)
    keeper = shelf.keeper("a", "b", wait_s=0.02)
    shelf.gates["a"] = asyncio.Event()
    a, b = keeper.entries
    for _ in range(5):
        with pytest.raises(EngineUnavailableError, match="more than"):
            await keeper.acquire(a)
    gone = asyncio.create_task(keeper.acquire(a))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert a.waiters == []
    assert await keeper.load(b) is None
    await used(keeper, b)
    await keeper.close()


async def test_without_a_wait_models_are_swapped_all_the_same(shelf: Shelf) -> None:
    keeper = shelf.keeper("a", "b", max_loaded=1, wait_s=0.0)
    a, b = keeper.entries
    assert await keeper.load(a) is None
    with pytest.raises(EngineUnavailableError):
        await keeper.acquire(b)
    assert await keeper.load(b) is None
    assert [entry.state for entry in (a, b)] == ["unloaded", "ready"]
    await keeper.close()


async def test_an_operator_unloads_what_is_being_loaded_or_about_to_go(shelf: Shelf) -> None:
    keeper = shelf.keeper("a", "b", max_loaded=1, drain_timeout_s=0.1)
    shelf.gates["a"] = asyncio.Event()
    a, b = keeper.entries
    loading = asyncio.create_task(keeper.load(a))
    await until(lambda: shelf.started == ["a"])
    unloading = asyncio.create_task(keeper.unload(a))
    await turns()
    shelf.gates["a"].set()
    await asyncio.gather(loading, unloading)
    assert a.state == "unloaded"
    await keeper.acquire(a)
    for_b = asyncio.create_task(keeper.acquire(b))
    await until(lambda: a.status is ModelStatus.LEAVING)
    await keeper.unload(a)  # its request does not end: it is forced
    assert a.state == "unloaded"
    await for_b
    await keeper.close()


async def test_a_word_of_ollama_to_a_model_that_is_not_there_holds_for_no_later_life(shelf: Shelf) -> None:
    keeper = shelf.keeper(models=(shelf.model("a", is_preloaded=False, ttl_s=60.0),))
    (entry,) = keeper.entries
    keeper.keep(entry, 0.0)
    await keeper.load(entry)
    await asyncio.sleep(0.05)
    assert (entry.state, entry.ttl_s) == ("ready", 60.0)
    await keeper.close()


async def test_the_end_in_the_middle_of_a_swap_stops_both(shelf: Shelf) -> None:
    keeper = shelf.keeper("a", "b", max_loaded=1, drain_timeout_s=0.2)
    a, b = keeper.entries
    await keeper.acquire(a)
    tasks = [asyncio.create_task(keeper.acquire(b))]
    await until(lambda: a.status is ModelStatus.LEAVING)
    tasks.append(asyncio.create_task(keeper.acquire(a)))
    await turns()
    await keeper.close()
    assert shelf.closed == ["a"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_failed_load_is_told_and_tried_again_later(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = shelf.keeper("a")
    (entry,) = keeper.entries
    shelf.failures["a"] = ModelLoadError("secret path /x")
    for _ in range(2):
        with pytest.raises(EngineUnavailableError, match="a could not be loaded; the server's log") as told:
            await keeper.acquire(entry)
        assert "secret" not in told.value.message
    assert shelf.started == ["a"]  # the second request did not try at once again
    assert caplog.text.count("secret path") == 1
    assert (entry.state, entry.is_good) == ("failed", False)
    shelf.failures.clear()
    monkeypatch.setattr(keeper_module, "RETRY_S", 0.0)
    await used(keeper, entry)
    assert (entry.state, entry.error) == ("ready", None)
    await keeper.close()


async def test_the_longest_unused_idle_model_goes(shelf: Shelf) -> None:
    keeper = shelf.keeper("a", "b", "c", max_loaded=2)
    a, b, c = keeper.entries
    for entry in (a, b, a):
        await used(keeper, entry)
        await asyncio.sleep(0.01)
    await used(keeper, c)
    assert [entry.state for entry in (a, b, c)] == ["ready", "unloaded", "ready"]
    await used(keeper, b)
    assert [entry.state for entry in (a, b, c)] == ["unloaded", "ready", "ready"]
    assert (shelf.started, shelf.closed) == (["a", "b", "c", "b"], ["b", "a"])
    await keeper.close()


async def test_a_pinned_model_stays(shelf: Shelf) -> None:
    models = (shelf.model("a", is_pinned=True), shelf.model("b"), shelf.model("c"))
    keeper = shelf.keeper(models=models, max_loaded=2)
    a, b, c = keeper.entries
    for entry in (a, b, c):
        await used(keeper, entry)
    assert [entry.state for entry in (a, b, c)] == ["ready", "unloaded", "ready"]
    await keeper.close()
    keeper = shelf.keeper(models=models, max_loaded=1)
    await used(keeper, keeper.entries[0])
    with pytest.raises(EngineUnavailableError, match=r"cannot be loaded now\. There is no room for it beside"):
        await keeper.acquire(keeper.entries[1])
    await keeper.close()


async def test_memory_bounds_what_is_loaded(shelf: Shelf) -> None:
    models = tuple(shelf.model(name, num_bytes=size * MIB) for name, size in (("a", 60), ("b", 30), ("c", 50)))
    keeper = shelf.keeper(models=models, max_bytes=100 * MIB)
    a, b, c = keeper.entries
    for entry in (a, b, c):
        await used(keeper, entry)
        await asyncio.sleep(0.01)
    assert [entry.state for entry in (a, b, c)] == ["unloaded", "ready", "ready"]
    await keeper.close()


async def test_a_model_in_use_is_waited_for_and_its_new_requests_wait(shelf: Shelf) -> None:
    keeper = shelf.keeper("a", "b", max_loaded=1, drain_timeout_s=120.0)
    a, b = keeper.entries
    await keeper.acquire(a)
    for_b = asyncio.create_task(keeper.acquire(b))
    await until(lambda: a.status is ModelStatus.LEAVING)
    for_a = asyncio.create_task(keeper.acquire(a))
    await turns()
    assert not for_b.done()
    assert shelf.closed == []  # the request that runs keeps its engine
    a.leave(0.0)
    await for_b
    assert not for_a.done()
    b.leave(asyncio.get_running_loop().time())
    await for_a
    assert [entry.state for entry in (a, b)] == ["ready", "unloaded"]
    await keeper.close()


async def test_a_long_request_keeps_its_model_and_those_behind_it_go_on(shelf: Shelf) -> None:
    keeper = shelf.keeper("a", "b", max_loaded=1, drain_timeout_s=0.05)
    a, b = keeper.entries
    await keeper.acquire(a)
    for_b = asyncio.create_task(keeper.acquire(b))
    await until(lambda: a.status is ModelStatus.LEAVING)
    await keeper.acquire(a)  # a stays, as its first request does not end
    assert not for_b.done()
    assert shelf.closed == []
    assert a.num_in_use == 2
    for_b.cancel()
    await asyncio.gather(for_b, return_exceptions=True)
    await keeper.close()


async def test_an_idle_model_leaves_after_its_time(shelf: Shelf) -> None:
    keeper = shelf.keeper(models=(shelf.model("a", ttl_s=0.1), shelf.model("b")))
    a, b = keeper.entries
    await keeper.acquire(a)
    await used(keeper, b)
    await asyncio.sleep(0.2)
    assert a.state == "ready"  # it is in use
    a.leave(0.0)
    a.enter()
    await asyncio.sleep(0.15)
    assert a.state == "ready"
    a.leave(asyncio.get_running_loop().time())
    await until(lambda: a.state == "unloaded")
    assert b.state == "ready"
    await used(keeper, a)
    assert a.state == "ready"
    await keeper.close()


async def test_clients_say_how_long_a_model_stays_that_comes_and_goes(shelf: Shelf) -> None:
    models = (shelf.model("a"), shelf.model("b", is_preloaded=False), shelf.model("c", ttl_s=60.0, is_pinned=True))
    keeper = shelf.keeper(models=models)
    for entry in keeper.entries:
        await used(keeper, entry)
        keeper.keep(entry, 0.0)
    await until(lambda: [entry.state for entry in keeper.entries] == ["ready", "unloaded", "ready"])
    await used(keeper, keeper.entries[1])
    assert keeper.entries[1].ttl_s == inf  # what was asked for ended with the model
    await keeper.close()


async def test_an_operator_unloads_what_is_pinned_and_the_next_request_loads_it(shelf: Shelf) -> None:
    keeper = shelf.keeper(models=(shelf.model("a", is_pinned=True),))
    (entry,) = keeper.entries
    assert await keeper.load(entry) is None
    await keeper.unload(entry)
    await keeper.unload(entry)
    assert (entry.state, shelf.closed) == ("unloaded", ["a"])
    await used(keeper, entry)
    assert shelf.started == ["a", "a"]
    await keeper.close()


async def test_the_end_stops_what_is_being_loaded(shelf: Shelf) -> None:
    keeper = shelf.keeper("a", "b")
    shelf.gates["b"] = asyncio.Event()
    a, b = keeper.entries
    await used(keeper, a)
    loading = asyncio.create_task(keeper.acquire(b))
    await until(lambda: "b" in shelf.started)
    await keeper.close()
    assert shelf.closed == ["a"]
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    assert b.status is ModelStatus.UNLOADED


async def test_many_models_under_one_place_all_get_their_turn(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed loops of clients for three models with room for one: nobody starves, no request loses its engine."""
    monkeypatch.setattr(keeper_module, "LEAST_STAY_S", 0.01)
    keeper = shelf.keeper("a", "b", "c", max_loaded=1)
    answered = {entry.name: 0 for entry in keeper.entries}

    async def client(entry: ModelEntry) -> None:
        while min(answered.values()) < 3:
            if entry.status is ModelStatus.LOADED:
                entry.enter()
                engine = entry.engine
            else:
                engine = await keeper.acquire(entry)
            await asyncio.sleep(0.002)
            assert not engine.is_closed
            answered[entry.name] += 1
            entry.leave(asyncio.get_running_loop().time())

    async with asyncio.timeout(120):
        await asyncio.gather(*(client(entry) for entry in keeper.entries for _ in range(3)))
    assert sum(entry.takes_room for entry in keeper.entries) <= 1
    await keeper.close()


async def test_who_can_wait_takes_no_room_of_a_model_that_others_may_miss(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = shelf.keeper("a", "b", "c", max_loaded=1)
    first, second, third = keeper.entries
    await keeper.acquire(first)
    for is_in_use in (True, False):
        if not is_in_use:
            first.leave(time.monotonic())
        with pytest.raises(EngineUnavailableError, match="no room for b while others are in use"):
            await keeper.acquire(second, is_patient=True)
        assert (shelf.closed, first.is_idle, second.status) == ([], not is_in_use, ModelStatus.UNLOADED)
    monkeypatch.setattr(keeper_module, "UNMISSED_S", 0.01)
    await asyncio.sleep(0.02)
    await keeper.acquire(second, is_patient=True)
    second.leave(time.monotonic())
    assert shelf.closed == ["a"]
    # A load that is under way for another one comes first; one that is under way for this model is waited for.
    shelf.gates["a"] = asyncio.Event()
    client = asyncio.create_task(keeper.acquire(first))
    while shelf.started.count("a") < 2:
        await asyncio.sleep(0)
    with pytest.raises(EngineUnavailableError, match="no room for c"):
        await keeper.acquire(third, is_patient=True)
    line = asyncio.create_task(keeper.acquire(first, is_patient=True))
    await asyncio.sleep(0)
    shelf.gates["a"].set()
    assert await line is await client
    await keeper.close()
