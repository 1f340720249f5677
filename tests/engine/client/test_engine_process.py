"""The path of the socket of an engine process."""

import tempfile
from pathlib import Path

import pytest

from penstock.engine.client import engine_process
from penstock.engine.client.engine_process import socket_folder


def test_long_path_without_proc_is_rejected_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = tmp_path / ("a" * 119)
    parent.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    monkeypatch.setattr(engine_process, "_DESCRIPTORS", tmp_path / "none")
    with pytest.raises(OSError, match="set TMPDIR to a shorter folder"), socket_folder():
        pass
    assert not list(parent.iterdir())
