"""The folder that outlives the server: who owns it, its secret, and where things lie in it.

lock          held by the server that owns the folder
secret        what turns API keys into owners of files; mode 0600
penstock.db   the state of files and batches (SQLite)
files/        bodies of files, each under its id; what is on its way in ends in .part
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

from penstock.engine.client.own_files import check_folder, open_own, secret_of

from ..settings import UsageError

PART: Final = ".part"


class DataDir:
    """The folder of one server. It is made where it is missing, and locked until `close`.

    Attributes:
        secret: Bytes that nobody else knows, the same after a restart.

    Args:
        folder: Where.

    Raises:
        UsageError: Another server has it, it cannot be written, or others may have put there what is in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_folder(folder)
            self.files.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.fdopen(open_own(folder / "lock"), "w")
        except OSError as error:
            raise UsageError(f"--data-dir: {folder} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise UsageError(
                f"--data-dir: another server uses {folder}; give each server a folder of its own"
            ) from error
        try:
            self.secret = secret_of(folder)
        except OSError as error:
            self._lock.close()
            raise UsageError(f"--data-dir: {folder}: {error.strerror}") from error

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
