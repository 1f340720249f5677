"""The socket of an engine process, in folders of any path."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from penstock.engine.client import engine_process
from penstock.engine.client.engine_process import SOCKET, socket_folder

CONNECT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as stream:
    stream.connect(sys.argv[1])
    stream.sendall(b"hello")
"""


@pytest.mark.parametrize("name", ["short", "a" * 119, "é" * 60, "blank and 'quotes'"])
def test_child_connects_to_the_socket(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = tmp_path / name
    parent.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    with socket_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = f"{folder.path}/{SOCKET}"
        assert len(address) <= 107
        (made,) = parent.iterdir()
        assert made.stat().st_mode & 0o777 == 0o700
        listener.bind(address)
        listener.listen()
        with subprocess.Popen([sys.executable, "-P", "-c", CONNECT, address], pass_fds=folder.descriptors):
            listener.settimeout(120)
            stream, _ = listener.accept()
            with stream:
                assert stream.recv(10) == b"hello"
        assert (made / SOCKET).exists()
    assert not list(parent.iterdir())


def test_long_path_without_proc_is_rejected_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = tmp_path / ("a" * 119)
    parent.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    monkeypatch.setattr(engine_process, "_DESCRIPTORS", tmp_path / "none")
    with pytest.raises(OSError, match="set TMPDIR to a shorter folder"), socket_folder():
        pass
    assert not list(parent.iterdir())
