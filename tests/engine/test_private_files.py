"""Folders and files are trusted only if no other user can have changed them."""

import os
from pathlib import Path

import pytest

from penstock.engine.private_files import check_folder, check_owner, open_private, secret_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir(0o700)
    return folder


def be_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o2777])
def test_world_writable_folder_is_rejected(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(PermissionError, match="every user may write to it; chmod o-w it"):
        check_folder(folder)
    folder.chmod(0o1777)  # only the owner may replace a file
    check_folder(folder)


def test_folder_of_another_user_needs_group_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid():
        be_another_user(monkeypatch)
        group = folder.stat().st_gid
    else:
        os.chown(folder, 12345, group := 12345)
    monkeypatch.setattr(os, "getegid", lambda: group + 1)
    monkeypatch.setattr(os, "getgroups", lambda: [group])
    with pytest.raises(PermissionError, match=r"belongs to another user, \d+; chown it"):
        check_folder(folder)
    folder.chmod(0o770)
    check_folder(folder)
    monkeypatch.setattr(os, "getgroups", list)
    with pytest.raises(PermissionError, match="belongs to another user"):
        check_folder(folder)
    monkeypatch.setattr(os, "getegid", lambda: group)
    check_folder(folder)


def test_secret_is_constant_and_private(folder: Path) -> None:
    num_open_files = len(list(Path("/proc/self/fd").iterdir()))
    (folder / "secret.new").write_bytes(b"of a killed process")
    secret = secret_of(folder)
    assert len(secret) == 32
    assert secret_of(folder) == secret
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    (folder / "secret").chmod(0o660)  # Kubernetes sets this mode on volumes with fsGroup
    assert secret_of(folder) == secret
    for content in (b"half", secret + b"more"):
        (folder / "secret").write_bytes(content)
        assert len(secret_of(folder)) == 32
    assert secret_of(folder) not in (secret, b"half")
    assert len(list(Path("/proc/self/fd").iterdir())) <= num_open_files


def test_links_and_pipes_are_rejected(folder: Path) -> None:
    secret_of(folder)
    (folder / "secret").rename(folder / "other")
    (folder / "secret").symlink_to(folder / "other")
    with pytest.raises(PermissionError, match="secret is a link"):
        secret_of(folder)
    with pytest.raises(PermissionError, match="secret is neither file nor folder"):
        check_owner(folder / "secret")
    os.mkfifo(folder / "pipe")
    with pytest.raises(PermissionError, match="pipe is neither file nor folder"):
        open_private(folder / "pipe", os.O_RDONLY)
