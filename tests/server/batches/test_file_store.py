"""The folder of files and batches: for one server, and without files of other users."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.server.batches.file_store import DataDir
from penstock.server.settings import UsageError


@pytest.mark.parametrize(("name", "mode"), [("", 0o777), ("secret", 0o644), ("lock", 0o666)])
def test_world_readable_or_writable_file_is_refused(tmp_path: Path, name: str, mode: int) -> None:
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


def test_linked_secret_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    DataDir(folder).close()
    (folder / "secret").rename(tmp_path / "secret")
    (folder / "secret").symlink_to(tmp_path / "secret")
    with pytest.raises(UsageError, match=r"--data-dir: .*secret is a link; remove it"):
        DataDir(folder)
