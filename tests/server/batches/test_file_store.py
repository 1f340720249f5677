"""The data folder: locked by one server, and closed to other users."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from penstock.server.batches.file_store import DataDir
from penstock.server.batches.service import Batches
from penstock.server.settings import ServerSettings, UsageError


@pytest.mark.parametrize(("name", "mode"), [("", 0o777), ("secret", 0o644), ("lock", 0o666)])
def test_world_readable_or_writable_file_is_rejected(tmp_path: Path, name: str, mode: int) -> None:
    folder = tmp_path / "data"
    data = DataDir(folder)
    data.close()
    before = (folder / name).stat().st_mode
    (folder / name).chmod(mode)
    with pytest.raises(UsageError, match=r"--data-dir: .*every user.*, or name another folder"):
        DataDir(folder)
    (folder / name).chmod(before)
    again = DataDir(folder)
    assert again.secret == data.secret
    again.close()


def test_database_of_another_version_is_rejected(tmp_path: Path) -> None:
    settings, file = ServerSettings(data_dir=tmp_path), tmp_path / "penstock.db"
    tmp_path.chmod(0o700)
    with closing(sqlite3.connect(file, isolation_level=None)) as database:
        database.execute("PRAGMA user_version = 9")
    for _ in range(2):  # the first rejection unlocks the folder
        with pytest.raises(UsageError, match="format 9"):
            Batches(settings)
    file.write_bytes(b"no database" * 100)
    with pytest.raises(UsageError, match="not a database"):
        Batches(settings)


def test_folder_that_cannot_be_created_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        Batches(ServerSettings(data_dir=tmp_path / "file" / "data"))
