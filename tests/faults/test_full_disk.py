"""A full disk under the model cache, the log and the sockets. The disk is real, of a few megabytes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ..servers import MIB, Launch
from ..waiting import wait_until


@pytest.mark.slow
def test_server_on_a_full_disk_serves_and_replaces_its_engine(launch: Launch, small_disk) -> None:
    disk = small_disk(8 * MIB)
    folders = {name: str(disk.folder) for name in ("TMPDIR", "HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR")}
    server = launch("--access-log", log=disk.folder / "log.txt", HF_HUB_OFFLINE="1", **folders)
    disk.fill()
    for _ in range(50):
        assert server.embed(["word " * 20] * 4).status_code == 200
    (worker,) = server.children()
    os.kill(worker, signal.SIGKILL)
    server.wait_for("/health/ready", 503)
    server.wait_for("/health/ready", 200)
    assert server.embed("a").status_code == 200
    assert server.metric("penstock_engine_restarts_total") == 1
    size = server.log.stat().st_size
    disk.free()
    server.embed("a")
    wait_until(lambda: server.log.stat().st_size > size)
    assert server.stop() == 0


@pytest.mark.slow
def test_server_without_space_for_its_log_serves(launch: Launch) -> None:
    server = launch("--access-log", "--log-level", "debug", log=Path("/dev/full"))
    for _ in range(20):
        assert server.embed("a").status_code == 200
    assert server.stop() == 0
