"""The folder that outlives the server: who owns it, its secret, and where things lie in it.

lock          held by the server that owns the folder
secret        what turns API keys into owners of files; mode 0600
penstock.db   the state of files and batches (SQLite)
files/        bodies of files, each under its id; what is on its way in ends in .part
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from typing import Final

from ..settings import UsageError

PART: Final = ".part"
_SECRET_BYTES: Final = 32


class DataDir:
    """The folder of one server. It is made where it is missing, and locked until `close`.

    Attributes:
        secret: Bytes that nobody else knows, the same after a restart.

    Args:
        folder: Where.

    Raises:
        UsageError: Another server has it, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.files.mkdir(mode=0o700, exist_ok=True)
            self._lock = (folder / "lock").open("w")
        except OSError as error:
            raise UsageError(f"--data-dir: {folder} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise UsageError(
                f"--data-dir: another server uses {folder}; give each server a folder of its own"
            ) from error
        try:
            self.secret = self._read_secret()
        except OSError as error:
            self._lock.close()
            raise UsageError(f"--data-dir: {folder}/secret: {error.strerror}") from error

    @property
    def files(self) -> Path:
        """The folder of bodies of files."""
        return self._folder / "files"

    @property
    def database(self) -> Path:
        """The file of the database."""
        return self._folder / "penstock.db"

    def close(self) -> None:
        """Lets another server have the folder."""
        self._lock.close()

    def _read_secret(self) -> bytes:
        path = self._folder / "secret"
        if path.exists() and len(secret := path.read_bytes()) == _SECRET_BYTES:
            return secret
        secret = secrets.token_bytes(_SECRET_BYTES)
        written = path.with_suffix(PART)
        written.unlink(missing_ok=True)
        with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)
        sync_folder(self._folder)
        return secret


def sync_folder(folder: Path) -> None:
    """Returns when the names in a folder are safe on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
