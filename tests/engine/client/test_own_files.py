"""Folders and files are trusted where nobody but this user and root can have put there what is in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.engine.client.own_files import check_folder, check_own, open_own, secret_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir(0o700)
    return folder


def be_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o770, 0o2770, 0o1777])
def test_folders_of_this_user(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    check_folder(folder)


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o2777])
def test_a_folder_in_which_everybody_may_exchange_files(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(PermissionError, match="every user may write to it; chmod o-w it"):
        check_folder(folder)


def test_a_folder_of_another_user_is_for_those_whom_it_lets_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid():
        be_another_user(monkeypatch)
        with pytest.raises(PermissionError, match="belongs to another user"):
            check_folder(folder)
        folder.chmod(0o770)
        check_folder(folder)
        monkeypatch.setattr(os, "getegid", lambda: folder.stat().st_gid + 1)
        monkeypatch.setattr(os, "getgroups", list)
        with pytest.raises(PermissionError, match="belongs to another user"):
            check_folder(folder)
    else:
        os.chown(folder, 12345, 12345)
        with pytest.raises(PermissionError, match="belongs to another user, 12345; chown it"):
            check_folder(folder)
        folder.chmod(0o770)
        with pytest.raises(PermissionError, match="belongs to another user"):
            check_folder(folder)
        monkeypatch.setattr(os, "getgroups", lambda: [12345])
        check_folder(folder)


def test_a_secret_stays_the_same_and_is_for_this_user_alone(folder: Path) -> None:
    secret = secret_of(folder)
    assert len(secret) == 32
    assert secret_of(folder) == secret
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    (folder / "secret").chmod(0o660)  # as a volume with fsGroup has it after a restart
    assert secret_of(folder) == secret


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644])
def test_a_secret_that_everybody_may_know(folder: Path, mode: int) -> None:
    secret_of(folder)
    (folder / "secret").chmod(mode)
    with pytest.raises(PermissionError, match="secret is open to every user"):
        secret_of(folder)


def test_a_secret_that_another_user_has_put_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret_of(folder)
    be_another_user(monkeypatch)
    with pytest.raises(PermissionError, match="secret belongs to another user"):
        secret_of(folder)


def test_links_and_pipes_are_not_followed(folder: Path) -> None:
    secret_of(folder)
    (folder / "secret").rename(folder / "other")
    (folder / "secret").symlink_to(folder / "other")
    with pytest.raises(PermissionError, match="secret is a link"):
        secret_of(folder)
    with pytest.raises(PermissionError, match="secret is neither file nor folder"):
        check_own(folder / "secret")
    os.mkfifo(folder / "pipe")
    with pytest.raises(PermissionError, match="pipe is neither file nor folder"):
        open_own(folder / "pipe", os.O_RDONLY)
