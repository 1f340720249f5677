"""What `penstock embed` has done so far, on disk beside the output, so that an interrupted run can go on.

The folder OUTPUT.partial holds `vectors.f32` (raw rows) and `job.json` (what the run is, and how many rows count). Rows
reach the disk before job.json says that they are there; what lies behind them is dropped at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.engine.model_files.json_files import one_line

from ...settings import CommandError

ITEM_BYTES: Final = 4


class JournalError(CommandError):
    """It belongs to another run, another process is writing it, or the disk refuses. The message says what to do."""


class Journal:
    """The rows that are done. One process at a time; used as a context manager.

    Args:
        output: The file that is to be written in the end.
        identity: Everything that decides the rows: input, model, options. A run goes on only where all of it is equal.
        most_rows: Rows that there will be in the end, where that is known.

    Attributes:
        num_rows: Rows that are on disk.
    """

    def __init__(self, output: Path, identity: Mapping[str, Any], most_rows: int | None = None) -> None:
        self.folder = output.with_name(output.name + ".partial")
        self.num_rows = 0
        self._identity = dict(identity)
        self._most_rows = most_rows
        self._width = 0

    def __enter__(self) -> Journal:
        """Takes the lock and reads what an earlier run left.

        Raises:
            JournalError: Another run left it, it is damaged, another process holds it, or it cannot be written.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise JournalError(f"{self.folder} is a file, but the work that is done is kept there: move it away")
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise JournalError(f"another process is writing to {self.folder}") from error
        try:
            with self._writing():
                self._resume()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Releases files and lock. Rows that are done stay; a folder without any goes."""
        with contextlib.suppress(OSError):  # a disk that is full: what it has not taken is not counted either
            self._file.close()
        if not self.num_rows:
            self.remove()
        self._lock.close()

    def append(self, vectors: NDArray[np.float32]) -> None:
        """Adds rows and returns when they are safe.

        Args:
            vectors: [N, D] float32.

        Raises:
            JournalError: They cannot be written; those of earlier calls are safe.
        """
        if self.num_rows and vectors.shape[1] != self._width:
            raise self._damaged(self._job_path, f"width is {self._width}, and the model gives {vectors.shape[1]}")
        with self._writing():
            self._file.write(np.ascontiguousarray(vectors, np.float32).data)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._write_job(self.num_rows + len(vectors), vectors.shape[1])
        self.num_rows += len(vectors)
        self._width = vectors.shape[1]

    def vectors(self) -> NDArray[np.float32]:
        """Returns all rows [N, D], mapped from the disk."""
        return np.memmap(self._vectors_path, np.float32, "r", shape=(self.num_rows, self._width))

    def remove(self) -> None:
        """Deletes the journal; the output is in place."""
        shutil.rmtree(self.folder)

    @property
    def _vectors_path(self) -> Path:
        return self.folder / "vectors.f32"

    @property
    def _job_path(self) -> Path:
        return self.folder / "job.json"

    def _resume(self) -> None:
        if self._job_path.exists():
            job = self._read_job()
            differing = [key for key, value in self._identity.items() if job["identity"].get(key) != value]
            if differing:
                raise JournalError(
                    f"{self.folder} holds an unfinished run with another {', '.join(differing)}; "
                    "give the same command again to finish it, or delete the folder to start over"
                )
            self.num_rows, self._width = job["num_rows"], job["width"]
        file = self._vectors_path.open("ab")
        try:
            file.truncate(self.num_rows * self._width * ITEM_BYTES)  # on a full disk, this makes room for what follows
            self._write_job(self.num_rows, self._width)
        except OSError:
            file.close()
            raise
        self._file = file

    def _read_job(self) -> dict[str, Any]:
        """Returns what an earlier run has written, if it can have.

        Raises:
            JournalError: It is damaged.
        """
        try:
            job = json.loads(self._job_path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise self._damaged(self._job_path, one_line(error)) from error
        if not isinstance(job, dict) or not isinstance(job.get("identity"), dict):
            raise self._damaged(self._job_path, "it holds no job")
        for name in ("num_rows", "width"):
            if type(job.get(name)) is not int or job[name] < 0:
                raise self._damaged(self._job_path, f"{name} is {job.get(name)!r}")
        if self._most_rows is not None and job["num_rows"] > self._most_rows:
            raise self._damaged(self._job_path, f"num_rows is {job['num_rows']}, of {self._most_rows}")
        num_bytes = self._vectors_path.stat().st_size if self._vectors_path.exists() else 0
        if num_bytes < job["num_rows"] * job["width"] * ITEM_BYTES:
            raise self._damaged(
                self._vectors_path, f"it holds {num_bytes} bytes, fewer than {job['num_rows']} rows of {job['width']}"
            )
        return job

    def _damaged(self, path: Path, reason: str) -> JournalError:
        return JournalError(
            f"{path} of an interrupted run is damaged ({reason}); delete the folder {self.folder} to start over"
        )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Says what an error of the disk means for the work."""
        try:
            yield
        except OSError as error:
            raise JournalError(
                f"{self.folder} cannot be written: {error.strerror or error}; rows that are done ({self.num_rows}) "
                "are kept there: give the same command again to go on"
            ) from error

    def _write_job(self, num_rows: int, width: int) -> None:
        job = {"identity": self._identity, "num_rows": num_rows, "width": width}
        temporary = self._job_path.with_suffix(".tmp")
        with temporary.open("w") as file:
            file.write(json.dumps(job))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._job_path)
