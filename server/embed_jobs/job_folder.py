"""The folder of a job: a file for each finished shard, and a manifest that identifies the job.

A file is written under another name and moved into place, so that it is there whole or not at all. The files alone say
which shards are finished. A shard that runs twice, on two machines or in two runs, leaves one file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.engine import ModelInfo
from penstock.engine.client.vector_cache.keys import add_files
from penstock.engine.model_files.model_folder import one_line

from ..settings import CommandError, UsageError

MANIFEST: Final = "_manifest.json"
COLUMN: Final = "embedding"
"""The column that is added to those of the input."""
_LOCK: Final = "_lock"
_UNFINISHED: Final = ".unfinished-"
_CHANGES_NO_ROW: Final = ("name", "path", "root", "sources", "device", "kernels", "num_lanes", "auto_truncate")
"""Fields of ModelInfo that may differ when an interrupted job continues."""


class Shard(NamedTuple):
    """Consecutive rows of one file, which run as a whole.

    Attributes:
        number: Its place in the job, counted from 0.
        path: The file.
        start: Number of its first row in the file, counted from 0.
        num_rows: Its rows.
    """

    number: int
    path: str
    start: int
    num_rows: int


class JobFolder:
    """The finished shards of a job. Several processes may write to it: for the same shard they write the same file.

    Args:
        folder: The folder; all machines share it.
        suffix: Of the files of shards: ".npy" or ".parquet".
        start_over: How the user starts over, for messages, such as "delete the folder".
    """

    def __init__(self, folder: Path, suffix: str, start_over: str) -> None:
        self.folder = folder
        self._suffix, self._start_over = suffix, start_over
        self._count = _npy_rows if suffix == ".npy" else _parquet_rows

    def begin(self, identity: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """Begins a job, or continues one.

        Args:
            identity: Everything that changes the rows. A job continues only if all of it is equal.
            overwrite: Delete the files of an earlier job first.

        Raises:
            UsageError: The folder holds other files, another job, or a finished job.
            CommandError: It cannot be written.
        """
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            if overwrite:
                self._clear()
            manifest = self._read()
            if manifest is None:
                names = sorted(path.name for path in self.folder.iterdir())
                if others := [name for name in names if name != _LOCK and not name.startswith(_UNFINISHED)]:
                    raise UsageError(
                        f"{self.folder} holds {others[0]}, which no job of this version left: name another folder or "
                        "output, or move it away"
                    )
                self._write_manifest(identity, is_finished=False)
                return
        differing = [key for key, value in identity.items() if manifest["identity"].get(key) != value]
        if differing:
            raise UsageError(
                f"{self.folder} holds an unfinished run with another {', '.join(differing)}; give the same command "
                f"again to finish it, or {self._start_over} to start over"
            )
        if manifest["finished"]:
            raise UsageError(f"{self.folder} is finished; {self._start_over} to start over")

    def path(self, shard: Shard) -> Path:
        """Returns the file of a shard: in the order of their names, files are in the order of the input."""
        return self.folder / f"part-{shard.number:08d}{self._suffix}"

    def has(self, shard: Shard) -> bool:
        """Returns whether a shard is finished: its file is whole and has all rows."""
        return self._count(self.path(shard)) == shard.num_rows

    def left(self, shards: Iterable[Shard]) -> list[Shard]:
        """Returns the unfinished shards: those without a file, or with a damaged one."""
        return [shard for shard in shards if not self.has(shard)]

    def write(self, path: Path, save: Callable[[Path], object]) -> None:
        """Writes a file of the folder; see `replace_file`."""
        replace_file(path, self.folder / f"{_UNFINISHED}{uuid.uuid4().hex}", save)

    def write_vectors(self, shard: Shard, vectors: NDArray[np.float32]) -> None:
        """Writes the file of a shard [N, D]; see `write`."""

        def save(path: Path) -> None:
            with path.open("wb") as file:
                write_npy_header(file, *vectors.shape)
                file.write(np.ascontiguousarray(vectors, "<f4").data)

        self.write(self.path(shard), save)

    def finish(self, identity: Mapping[str, Any]) -> None:
        """Records that all shards are finished, and removes the unfinished files of killed processes."""
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            path.unlink(missing_ok=True)
        self._write_manifest(identity, is_finished=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder against other processes of this machine. At the end a folder without shards is removed.

        Raises:
            UsageError: The folder is a file, or another process is writing it.
            CommandError: It cannot be written.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"{self.folder} is a file, but shards that are done are kept there: move it away")
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / _LOCK).open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UsageError(f"another process is writing to {self.folder}") from error
            try:
                yield
            finally:
                names = {path.name for path in self.folder.glob("*")}
                if all(name in (MANIFEST, _LOCK) or name.startswith(_UNFINISHED) for name in names):
                    self.remove()

    def remove(self) -> None:
        """Deletes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Raises CommandError, which tells the user how to continue, if the disk fails."""
        try:
            yield
        except OSError as error:
            raise CommandError(
                f"{self.folder} cannot be written: {error.strerror or error}; shards that are done are kept there: "
                "give the same command again to go on"
            ) from error

    def _clear(self) -> None:
        """Deletes the files of an earlier job, and no others."""
        if (self.folder / MANIFEST).exists():
            for pattern in ("part-*", f"{_UNFINISHED}*", MANIFEST):
                for path in self.folder.glob(pattern):
                    path.unlink()

    def _read(self) -> dict[str, Any] | None:
        path = self.folder / MANIFEST
        if not path.exists():
            return None
        try:
            manifest = json.loads(path.read_bytes())
            if isinstance(manifest["identity"], dict) and isinstance(manifest["finished"], bool):
                return dict(manifest)
            reason = "it describes no job"
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = one_line(error)
        raise UsageError(f"{path} is damaged ({reason}); {self._start_over} to start over")

    def _write_manifest(self, identity: Mapping[str, Any], *, is_finished: bool) -> None:
        text = json.dumps({"identity": identity, "finished": is_finished}, indent=2)
        self.write(self.folder / MANIFEST, lambda path: path.write_text(text))


class ShardVectors:
    """The vectors of all shards of a job as one array [N, D] float32, mapped from their files.

    Args:
        job: The job; its files are .npy.
        shards: All of its shards, in order.
    """

    def __init__(self, job: JobFolder, shards: Sequence[Shard]) -> None:
        self._job, self._shards = job, shards
        self._starts = np.array([shard.start for shard in shards])
        self._open: tuple[int, NDArray[np.float32]] | None = None
        self.width = max(_npy_shape(job.path(shard))[1] for shard in shards)
        self.num_rows = sum(shard.num_rows for shard in shards)

    def rows(self, numbers: Sequence[int]) -> NDArray[np.float32]:
        """Returns the vectors of rows [len(numbers), D], which are in order; NaN for rows that have none."""
        found = np.full((len(numbers), self.width), np.nan, np.float32)
        wanted = np.asarray(numbers, np.int64)
        places = np.searchsorted(self._starts, wanted, "right") - 1
        for place in np.unique(places):
            of_shard = places == place
            vectors = self._of(int(place))
            if vectors.shape[1]:
                found[of_shard] = vectors[wanted[of_shard] - self._starts[place]]
        return found

    def _of(self, place: int) -> NDArray[np.float32]:
        if self._open is None or self._open[0] != place:
            self._open = (place, np.load(self._job.path(self._shards[place])))
        return self._open[1]


def model_digest(info: ModelInfo) -> str:
    """Returns a digest of all that changes a model's vectors: its resolved configuration and the bytes of its files."""
    resolved = {name: value for name, value in dataclasses.asdict(info).items() if name not in _CHANGES_NO_ROW}
    digest = hashlib.blake2b(json.dumps(resolved, sort_keys=True, default=str).encode())
    add_files(digest, info)
    return digest.hexdigest()


def replace_file(path: Path, unfinished: Path, save: Callable[[Path], object]) -> None:
    """Replaces a file in one step: the file is there whole, or the earlier one stays. Returns when it is on the disk.

    Args:
        path: The file.
        unfinished: Path in the same folder for the unfinished file, which is removed after an error.
        save: Writes the file to the path that it is given.

    Raises:
        OSError: The disk fails, or what `save` raises.
    """
    try:
        save(unfinished)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_npy_header(file: BinaryIO, num_rows: int, width: int) -> None:
    """Writes the header of a .npy file [num_rows, width] float32."""
    header = {"descr": "<f4", "fortran_order": False, "shape": (num_rows, width)}
    np.lib.format.write_array_header_1_0(file, header)


def _npy_shape(path: Path) -> tuple[int, int]:
    """Returns the shape of a whole .npy file of a matrix. Raises ValueError or OSError if it is none."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        num_rows, width = shape
        if path.stat().st_size != file.tell() + num_rows * width * dtype.itemsize:
            raise ValueError("it is cut")
    return num_rows, width


def _npy_rows(path: Path) -> int | None:
    try:
        return _npy_shape(path)[0]
    except (OSError, ValueError):
        return None


def _parquet_rows(path: Path) -> int | None:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return int(parquet.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError):
        return None
