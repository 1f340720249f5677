"""The data folder, which outlives the server.

lock          locked by the server that uses the folder
secret        salt that turns API keys into owner ids; mode 0600
penstock.db   records of files and batches (SQLite)
files/        contents of files by id; names of running uploads end in .part
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from penstock.engine.private_files import check_folder, open_private, secret_of

from ..settings import UsageError


class DataDir:
    """The data folder of one server. Created if missing, and locked until `close`.

    Attributes:
        secret: Secret bytes that stay the same after a restart.

    Raises:
        UsageError: Another server uses the folder, it cannot be written, or other users can write to it.
    """

    def __init__(self, folder: Path) -> None:
        self.files = folder / "files"
        self.database = folder / "penstock.db"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_folder(folder)
            self.files.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.fdopen(open_private(folder / "lock"), "w")
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

    def close(self) -> None:
        """Unlocks the folder."""
        self._lock.close()
