"""Dispatchers over fake cores, and supervised cores that the test controls."""

import pytest

from penstock.engine.client import core_supervisor
from penstock.engine.client.dispatcher import Dispatcher

from .fake_core import FakeCore
from .fake_running_core import FakeRunningCore


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(max_queued_tokens=100)


@pytest.fixture
def core(dispatcher: Dispatcher) -> FakeCore:
    return FakeCore(dispatcher.replicas[0])


@pytest.fixture
def running_cores(monkeypatch: pytest.MonkeyPatch) -> list[FakeRunningCore]:
    """The cores that supervisors have made, in order."""
    monkeypatch.setattr(core_supervisor, "ThreadCore", FakeRunningCore)
    monkeypatch.setattr(core_supervisor, "ProcessCore", FakeRunningCore)
    FakeRunningCore.made = []
    return FakeRunningCore.made
