"""Sockets find a place wherever temporary files lie."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from penstock.engine.client import engine_process as module
from penstock.engine.client.engine_process import SOCKET, socket_folder

ANSWER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as asking:
    asking.connect(sys.argv[1])
    asking.sendall(b"hello")
"""


@pytest.mark.parametrize("name", ["short", "a" * 119, "é" * 60, "blank and 'quotes'"])
def test_processes_meet_in_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / name
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with socket_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = f"{folder.path}/{SOCKET}"
        assert len(address) <= 107
        (made,) = place.iterdir()
        assert made.stat().st_mode & 0o777 == 0o700
        listener.bind(address)
        listener.listen()
        with subprocess.Popen([sys.executable, "-P", "-c", ANSWER, address], pass_fds=folder.descriptors):
            listener.settimeout(120)
            stream, _ = listener.accept()
            with stream:
                assert stream.recv(10) == b"hello"
        assert (made / SOCKET).exists()
    assert not list(place.iterdir())


def test_without_proc_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / ("a" * 119)
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(module, "_DESCRIPTORS", tmp_path / "none")
    with pytest.raises(OSError, match="set TMPDIR to a shorter folder"), socket_folder():
        pass
    assert not list(place.iterdir())
