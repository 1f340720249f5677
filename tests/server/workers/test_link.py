"""What an HTTP process hears from the supervising one."""

from __future__ import annotations

import asyncio
import select
import socket
from unittest.mock import Mock

import pytest

from penstock.engine import EngineConfig
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.message_connection import MessageConnection
from penstock.server.settings import ServerSettings
from penstock.server.workers.messages import ModelNotLoaded, PlannedModel, WorkerPlan, encode
from penstock.server.workers.worker import SupervisorLink

from ...waiting import turns, until


async def has_read(end: socket.socket) -> None:
    """Waits until everything that was sent to `end` has been received and handled."""
    await until(lambda: not select.select([end], [], [], 0)[0])
    await turns()


async def test_an_answer_that_nobody_awaits_harms_nothing() -> None:
    model = PlannedModel(("a",), EngineConfig(model="/models/a"))
    on_end = Mock()
    link = SupervisorLink(WorkerPlan(ServerSettings(), (model,), 2, 1, b"salt", 0), list, on_end)
    ours, theirs = socket.socketpair()
    link.open(theirs)
    supervisor, refusal = MessageConnection(ours), encode(ModelNotLoaded(0, "ModelLoadError", "There are no weights."))
    supervisor.send(refusal)  # to one that has not asked yet
    await has_read(theirs)
    gives_up = asyncio.create_task(link.engine(0))
    await turns()
    gives_up.cancel()
    supervisor.send(refusal)
    await has_read(theirs)
    loading = asyncio.create_task(link.engine(0))
    await turns()
    supervisor.send(refusal)
    with pytest.raises(ModelLoadError, match="no weights"):
        await asyncio.wait_for(loading, 120)
    on_end.assert_not_called()
    supervisor.close()
    await until(lambda: on_end.called)
    on_end.assert_called_once_with()
