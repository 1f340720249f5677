"""Checks owner and mode of persistent files before they are used, and creates their secret.

Another user of the machine may have created the folder first, or may write to it. Only this user and root can create a
file of this user or change its mode. So each file is checked when it is opened, and its folder must not let every user
replace files. Group permissions are accepted: this user or root granted them, for example Kubernetes (fsGroup).
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Final

SECRET_BYTES: Final = 32
_MODE: Final = 0o600
_REMEDY: Final = "or name another folder"


def check_folder(folder: Path) -> None:
    """Raises PermissionError if other users may replace files of a folder. `strerror` contains the remedy.

    The folder may belong to root, or to a user that lets a group of this process write.
    """
    status = folder.stat()
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise _rejection(folder, f"every user may write to it; chmod o-w it, name a folder inside it, {_REMEDY}")
    is_granted = status.st_mode & stat.S_IWGRP and status.st_gid in (os.getegid(), *os.getgroups())
    if status.st_uid not in (os.geteuid(), 0) and not is_granted:
        raise _rejection(folder, f"it belongs to another user, {status.st_uid}; chown it, {_REMEDY}")


def check_owner(path: Path) -> None:
    """Raises PermissionError for a link, a file of another user, or a world-writable file."""
    _check(path, path.lstat(), stat.S_IWOTH)


def open_private(path: Path, flags: int = os.O_RDWR | os.O_CREAT, *, forbidden: int = stat.S_IWOTH) -> int:
    """Opens a file after the checks of check_owner. A new file gets mode 0600.

    Args:
        path: Path of the file.
        flags: Flags of os.open, which may create the file.
        forbidden: Permissions that other users must not have.

    Returns:
        Its descriptor.

    Raises:
        OSError: The file cannot be opened, or fails a check.
    """
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, _MODE)  # opening a pipe would block
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _rejection(path, "is a link; remove it", path.name) from error
        raise
    try:
        _check(path, os.fstat(file), forbidden)
    except BaseException:  # close the file, also after an interrupt
        os.close(file)
        raise
    return file


def secret_of(folder: Path) -> bytes:
    """Returns the secret of a folder; creates it if it is missing or incomplete. The caller holds the folder's lock.

    Raises:
        OSError: The secret cannot be read or written, or other users may have read or written it.
    """
    path = folder / "secret"
    try:
        file = open_private(path, os.O_RDONLY, forbidden=stat.S_IROTH | stat.S_IWOTH)
    except FileNotFoundError:
        return _new_secret(path)
    try:
        secret = os.read(file, SECRET_BYTES + 1)
    finally:
        os.close(file)
    return secret if len(secret) == SECRET_BYTES else _new_secret(path)


def sync_folder(folder: Path) -> None:
    """Flushes the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _new_secret(path: Path) -> bytes:
    secret = secrets.token_bytes(SECRET_BYTES)
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    try:
        os.write(file, secret)
        os.fsync(file)
    finally:
        os.close(file)
    new.replace(path)
    sync_folder(path.parent)
    return secret


def _check(path: Path, status: os.stat_result, forbidden: int) -> None:
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise _rejection(path, "is neither file nor folder; remove it", path.name)
    if status.st_uid != os.geteuid():
        raise _rejection(path, f"belongs to another user, {status.st_uid}; remove or chown it, {_REMEDY}", path.name)
    if status.st_mode & forbidden:
        raise _rejection(path, f"is open to every user; remove it, {_REMEDY}", path.name)


def _rejection(path: Path, reason: str, subject: str = "") -> PermissionError:
    return PermissionError(errno.EPERM, f"{subject} {reason}".lstrip(), str(path))
