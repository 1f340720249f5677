"""Sockets find a place wherever temporary files lie."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq

from penstock.engine.frontend import socket_folder as module
from penstock.engine.frontend.socket_folder import socket_folder

ANSWER = """
import sys, zmq
context = zmq.Context()
inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
inbox.bind(sys.argv[1])
outbox.connect(sys.argv[2])
outbox.send(inbox.recv())
outbox.close(linger=2000)
inbox.close()
context.term()
"""


@pytest.mark.parametrize("name", ["short", "a" * 119, "é" * 60, "blank and 'quotes'"])
def test_processes_meet_in_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / name
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    context = zmq.Context()
    try:
        with socket_folder() as folder:
            assert len(f"{folder.path}/outbox") <= 107
            (made,) = place.iterdir()
            assert made.stat().st_mode & 0o777 == 0o700
            inbox, outbox = (f"ipc://{folder.path}/{name}" for name in ("inbox", "outbox"))
            asking, hearing = context.socket(zmq.PUSH), context.socket(zmq.PULL)
            asking.connect(inbox)
            hearing.bind(outbox)
            asking.send(b"hello")
            command = [sys.executable, "-P", "-c", ANSWER, inbox, outbox]
            with subprocess.Popen(command, pass_fds=folder.descriptors):
                assert hearing.poll(20_000)
                assert hearing.recv() == b"hello"
            assert (made / "outbox").exists()
    finally:
        context.destroy(linger=0)
    assert not list(place.iterdir())


def test_without_proc_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / ("a" * 119)
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(module, "_DESCRIPTORS", tmp_path / "none")
    with pytest.raises(OSError, match="set TMPDIR to a shorter folder"), socket_folder():
        pass
    assert not list(place.iterdir())
