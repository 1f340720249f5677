"""What an HTTP process hears from the supervising one."""

from __future__ import annotations

import asyncio
import socket
from unittest.mock import Mock

import pytest

from penstock.engine import EngineConfig
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.ipc.connection import Connection
from penstock.server.settings import ServerSettings
from penstock.server.workers.link import SupervisorLink
from penstock.server.workers.messages import NotLoaded, encode
from penstock.server.workers.plan import PlannedModel, WorkerPlan


async def test_an_answer_that_nobody_awaits_harms_nothing() -> None:
    model = PlannedModel(("a",), EngineConfig(model="/models/a"), 7)
    on_end = Mock()
    link = SupervisorLink(WorkerPlan(ServerSettings(), (model,), 2, 0, 1, b"salt", 0), list, on_end)
    ours, theirs = socket.socketpair()
    link.open(theirs)
    supervisor, refusal = Connection(ours), encode(NotLoaded(0, "ModelLoadError", "There are no weights."))
    supervisor.send(refusal)  # to one that has not asked yet
    await asyncio.sleep(0.05)
    gives_up = asyncio.create_task(link.engine(0))
    await asyncio.sleep(0.05)
    gives_up.cancel()
    supervisor.send(refusal)
    await asyncio.sleep(0.05)
    loading = asyncio.create_task(link.engine(0))
    await asyncio.sleep(0.05)
    supervisor.send(refusal)
    with pytest.raises(ModelLoadError, match="no weights"):
        await asyncio.wait_for(loading, 5)
    on_end.assert_not_called()
    supervisor.close()
    await asyncio.sleep(0.05)
    on_end.assert_called_once_with()
