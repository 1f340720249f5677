"""The path of the socket of an engine process."""

import os
import tempfile
from pathlib import Path

import pytest

from penstock.engine.client import engine_process
from penstock.engine.client.engine_process import SOCKET, EngineProcess, socket_folder


def test_long_path_without_proc_is_rejected_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = tmp_path / ("a" * 119)
    parent.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    monkeypatch.setattr(engine_process, "_DESCRIPTORS", tmp_path / "none")
    with pytest.raises(OSError, match="set TMPDIR to a shorter folder"), socket_folder():
        pass
    assert not list(parent.iterdir())


def test_path_of_more_than_103_bytes_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for length, num_descriptors in ((103, 0), (104, 1)):
        folder = tmp_path / ("a" * (length - len(f"{tmp_path}//{SOCKET}")))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix, made=folder: str(made))
        with socket_folder() as found:
            assert len(found.descriptors) == num_descriptors
            assert Path(found.path).samefile(folder)
        assert not folder.exists()
        for descriptor in found.descriptors:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)


def test_context_kills_the_process_and_removes_its_folder() -> None:
    with EngineProcess() as process:
        folder = Path(process.address).parent
        assert (process.returncode, folder.is_dir()) == (None, True)
    assert (process._process.returncode, folder.exists(), process.host_bytes()) == (-9, False, 0)
