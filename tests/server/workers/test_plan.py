"""What an HTTP process is told when it starts."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from penstock.engine import EngineConfig
from penstock.engine.protocol.config import SchedulerConfig
from penstock.server.settings import ServerSettings, load
from penstock.server.workers.messages import PlannedModel, WorkerPlan

LIMITS = SchedulerConfig(max_queued_tokens=40_000, max_queue_s=8.0)


def plan(**settings: object) -> WorkerPlan:
    model = PlannedModel(("a", "b"), EngineConfig(model="/models/a", max_queued_chars=1_000, scheduler=LIMITS))
    return WorkerPlan(load(ServerSettings, settings), (model,), 4, 11, b"salt", 1_700_000_000)


def test_it_comes_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = plan(
        api_key="one,two", api_key_file=Path("/keys"), answer_memory="1GiB", pooler_config='{"normalize":false}'
    )
    monkeypatch.setenv("PENSTOCK_PORT", "1234")  # what the environment says by then does not count
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sending = threading.Thread(target=sent.send, args=(ours,))
        sending.start()
        got = WorkerPlan.receive(theirs)
        sending.join()
    assert got == sent
    assert got.settings.port == 8000


def test_a_parent_that_has_gone_is_told() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs, pytest.raises(EOFError, match="has gone"):
        WorkerPlan.receive(theirs)


def test_each_process_has_its_share_of_the_queue_limits() -> None:
    made = plan()
    config = made.own_config(made.models[0])
    assert config.max_queued_chars == 250
    assert (config.scheduler.max_queued_tokens, config.scheduler.max_queue_s) == (10_000, 2.0)
