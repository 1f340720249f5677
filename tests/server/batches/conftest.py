"""Batches over fake routes and a data folder on the disk."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.server.batches.service import BatchService
from penstock.server.settings import ServerSettings, load_settings

from ...clock import Clock
from .helpers import Routes


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000_000.0)


@pytest.fixture
def running(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch):
    """Run the batches of a folder: `async with running(routes) as batches`."""
    # The number of lines at once must not depend on the speed of the machine.
    monkeypatch.setattr("penstock.server.batches.line_limiter.AHEAD_S", float("inf"))

    @asynccontextmanager
    async def run(routes: Routes, folder: Path = tmp_path / "data", **settings: object) -> AsyncIterator[BatchService]:
        batches = BatchService(load_settings(ServerSettings, {"data_dir": folder, **settings}), now=clock, retry_s=0.01)
        async with batches.running(routes):
            yield batches

    return run
