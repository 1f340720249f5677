"""Start, restart and end of a core, seen by its supervisor."""

import asyncio

import pytest

from penstock.engine.client import core_supervisor
from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.client.replica_group import ReplicaGroup
from penstock.engine.client.running_core import restart_pause_s
from penstock.engine.protocol import errors
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import Start

from ...waiting import loop_iterations
from .fake_running_core import FakeRunningCore

Cores = list[FakeRunningCore]


def make_group(dispatcher: Dispatcher) -> ReplicaGroup:
    config = EngineConfig(model="any", in_process=True)
    return ReplicaGroup([Start(config)], dispatcher)


async def started(dispatcher: Dispatcher, cores: Cores) -> ReplicaGroup:
    group = make_group(dispatcher)
    starting = asyncio.create_task(group.start())
    await loop_iterations()
    cores[0].ready()
    await starting
    return group


async def test_replacement_loads_the_same_files_and_arithmetic(dispatcher: Dispatcher, running_cores: Cores) -> None:
    group = await started(dispatcher, running_cores)
    config = running_cores[0].config
    assert (config.model, config.device, config.dtype, config.arithmetic) == ("any", "auto", "auto", None)
    for number in range(2):
        running_cores[number].end("it ended")
        await loop_iterations()
        config = running_cores[number + 1].config
        assert (config.model, config.name) == ("/words", "words")
        assert (config.device, config.dtype, config.arithmetic) == ("cpu", "bfloat16", "float32")
        running_cores[number + 1].ready()
        await loop_iterations()
    await group.close()


async def test_draining_engine_starts_no_core(dispatcher: Dispatcher, running_cores: Cores) -> None:
    group = await started(dispatcher, running_cores)
    running_cores[0].end("it ended")
    await loop_iterations()
    group.drain()
    running_cores[1].ready()
    await loop_iterations()
    assert group.state is EngineState.DRAINING
    assert running_cores[1].is_closed
    await group.close()
    assert len(running_cores) == 2


def record_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Returns the list of pauses of the supervisor, in seconds. From now on they take no time."""
    sleep, pauses = asyncio.sleep, list[float]()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(core_supervisor.asyncio, "sleep", pause)
    return pauses


async def test_engine_is_dead_after_three_failed_restarts_and_retries(
    dispatcher: Dispatcher, running_cores: Cores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = await started(dispatcher, running_cores)
    sleep = asyncio.sleep
    pauses = record_pauses(monkeypatch)

    async def wait_for_core(number: int) -> FakeRunningCore:
        while len(running_cores) == number or not running_cores[number].is_started:
            await sleep(0)
        return running_cores[number]

    running_cores[0].end("it ended")
    for attempt in range(1, 6):
        core = await wait_for_core(attempt)
        assert group.state is (EngineState.STARTING if attempt <= 3 else EngineState.DEAD)
        assert group.num_restarts == 0
        with pytest.raises(errors.EngineUnavailableError, match="started again" if attempt <= 3 else "is down"):
            dispatcher.admission.check()
        assert running_cores[attempt - 1].is_closed
        core.fail("full", "EngineError" if attempt > 4 else "WeightError") if attempt % 2 else core.end("signal 9")
    (await wait_for_core(6)).ready()
    while not group.num_restarts:
        await sleep(0)
    assert pauses == [0.0, 1.0, 3.0, 7.0, 15.0, 30.0]
    assert restart_pause_s(1_100) == 30.0  # 2.0**1100 overflows
    assert (group.state, group.num_restarts) == (EngineState.READY, 1)
    dispatcher.admission.check()
    assert "the engine is down after 3 attempts" in caplog.text
    assert "the engine has been restarted after" in caplog.text
    running_cores[6].end("it ended again")
    (await wait_for_core(7)).ready()
    while group.num_restarts < 2:
        await sleep(0)
    assert pauses[6:] == [0.0]
    await group.close()


@pytest.mark.parametrize(
    ("action", "error"), [("fail", errors.WeightError), ("end", errors.ModelLoadError)], ids=["fails", "ends"]
)
async def test_failed_first_start_raises_its_reason(
    dispatcher: Dispatcher, running_cores: Cores, action: str, error: type[Exception]
) -> None:
    starting = asyncio.create_task(make_group(dispatcher).start())
    await loop_iterations()
    for _ in range(2):  # a second message is ignored
        getattr(running_cores[0], action)("no such file")
    with pytest.raises(error, match="no such file"):
        await starting
    assert running_cores[0].is_closed


async def test_engine_rejects_requests_with_its_state(dispatcher: Dispatcher, running_cores: Cores) -> None:
    group = make_group(dispatcher)
    assert group.state is EngineState.STARTING
    with pytest.raises(errors.EngineUnavailableError, match="is being started again") as rejected:
        dispatcher.admission.check()
    assert rejected.value.reason == errors.RejectionReason.ENGINE_NOT_READY
    group = await started(dispatcher, running_cores)
    assert group.state is EngineState.READY
    dispatcher.admission.check()
    group.drain()
    with pytest.raises(errors.EngineUnavailableError, match=r"shutting down\. Please try again elsewhere") as rejected:
        dispatcher.admission.check()
    assert rejected.value.reason == errors.RejectionReason.DRAINING
    running_cores[0].end("it ended")
    await loop_iterations()
    assert len(running_cores) == 1
    await group.close()
    with pytest.raises(errors.EngineUnavailableError, match="is down"):
        dispatcher.admission.check()
    group.drain()
    assert group.state is EngineState.DEAD
    assert running_cores[0].is_closed
