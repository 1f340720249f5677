"""What an HTTP process is told when it starts."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from penstock.engine import EngineConfig
from penstock.server.settings import ServerSettings
from penstock.server.workers.plan import PlannedModel, WorkerPlan


def plan(**settings: object) -> WorkerPlan:
    model = PlannedModel(("a", "b"), EngineConfig(model="/models/a", max_queued_chars=1_000), 7)
    return WorkerPlan(ServerSettings(**settings), (model,), 4, 2, 11, b"salt", 1_700_000_000)


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


def test_characters_that_wait_are_divided() -> None:
    made = plan()
    assert made.own_config(made.models[0]).max_queued_chars == 250
