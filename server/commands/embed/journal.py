"""What `penstock embed` has done so far, on disk beside the output, so that an interrupted run can go on.

The folder OUTPUT.partial holds `vectors.f32` (raw rows, each in its place) and `job.json` (what the run is, and which
rows count). Rows come in the order in which they are answered, and reach the disk before job.json says that they are
there; what lies in other places has no meaning.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeGuard

import numpy as np
from numpy.typing import NDArray

from penstock.engine.model_files.json_files import one_line

from ...settings import CommandError
from ...wire.shown_values import shown

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
        done: The rows that are on disk, counted from 0: ranges from a first row to one behind the last, in order.
    """

    def __init__(self, output: Path, identity: Mapping[str, Any], most_rows: int | None = None) -> None:
        self.folder = output.with_name(output.name + ".partial")
        self.done: list[tuple[int, int]] = []
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
        if not self.done and not self._has_rows_on_disk():
            self.remove()
        self._lock.close()

    @property
    def num_rows(self) -> int:
        """Rows that are on disk."""
        return sum(end - start for start, end in self.done)

    def add(self, answers: Sequence[tuple[int, NDArray[np.float32]]]) -> None:
        """Adds rows and returns when they are safe.

        Args:
            answers: Numbers of first rows, with vectors [N, D] float32 from there on.

        Raises:
            JournalError: They cannot be written; those of earlier calls are safe.
        """
        width = self._width or answers[0][1].shape[1]
        if any(vectors.shape[1] != width for _, vectors in answers):
            raise self._damaged(self._job_path, f"width is {width}, and the model gives {answers[0][1].shape[1]}")
        done = _joined([*self.done, *((start, start + len(vectors)) for start, vectors in answers)])
        with self._writing():
            for start, vectors in answers:
                self._file.seek(start * width * ITEM_BYTES)
                self._file.write(np.ascontiguousarray(vectors, np.float32).data)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._write_job(done, width)
        self.done, self._width = done, width

    def vectors(self, num_rows: int) -> NDArray[np.float32]:
        """Returns rows [N, D], mapped from the disk. A row that is not done has no meaning.

        Args:
            num_rows: N, at least the rows that are done.

        Raises:
            JournalError: Nothing can be written.
        """
        with self._writing():
            self._file.truncate(num_rows * self._width * ITEM_BYTES)
        return np.memmap(self._vectors_path, np.float32, "r", shape=(num_rows, self._width))

    def remove(self) -> None:
        """Deletes the journal; the output is in place."""
        shutil.rmtree(self.folder)

    def _has_rows_on_disk(self) -> bool:
        """Whether job.json counts rows: a signal may end `add` between the file and `done`."""
        try:
            return bool(json.loads(self._job_path.read_bytes())["done"])
        except FileNotFoundError:
            return False

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
            self.done, self._width = [(start, end) for start, end in job["done"]], job["width"]
        self._vectors_path.touch()
        file = self._vectors_path.open("r+b")
        try:
            file.truncate(_num_bytes(self.done, self._width))  # on a full disk, this makes room for what follows
            self._write_job(self.done, self._width)
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
        done, width = job.get("done"), job.get("width")
        if not _are_ranges(done):
            raise self._damaged(self._job_path, f"done is {shown(done)}")
        if type(width) is not int or width < 0 or (done and not width):
            raise self._damaged(self._job_path, f"width is {shown(width)}")
        if self._most_rows is not None and done and done[-1][1] > self._most_rows:
            raise self._damaged(self._job_path, f"done ends with row {done[-1][1]}, of {self._most_rows}")
        num_bytes = self._vectors_path.stat().st_size if self._vectors_path.exists() else 0
        if num_bytes < _num_bytes(done, width):
            reason = f"it holds {num_bytes} bytes, fewer than {done[-1][1]} rows of {width}"
            raise self._damaged(self._vectors_path, reason)
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

    def _write_job(self, done: list[tuple[int, int]], width: int) -> None:
        job = {"identity": self._identity, "done": done, "width": width}
        temporary = self._job_path.with_suffix(".tmp")
        with temporary.open("w") as file:
            file.write(json.dumps(job))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._job_path)


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns ranges in order, with those that touch as one."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _are_ranges(value: object) -> TypeGuard[list[list[int]]]:
    """Whether a value read from job.json is what `_joined` can have made."""
    if not isinstance(value, list) or any(not isinstance(part, list) or len(part) != 2 for part in value):
        return False
    ends = [end for part in value for end in part]
    return all(type(end) is int and end >= 0 for end in ends) and all(a < b for a, b in itertools.pairwise(ends))


def _num_bytes(done: Sequence[Sequence[int]], width: int) -> int:
    return done[-1][1] * width * ITEM_BYTES if done else 0
