"""The folder of a job: a file for each finished shard, and a manifest that identifies the job.

A file is written under a temporary name and then renamed, so that it is either complete or absent. A shard is finished
if its file exists. A shard that runs twice, on two machines or in two runs, has one file.

Parquet files have the digest of their job. Machines of a run that has been overwritten may still write files; these do
not count for the new run.
"""

from __future__ import annotations

import contextlib
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
from penstock.engine.client.vector_cache.keys import add_files, resolved_fields
from penstock.engine.model_files.model_folder import one_line
from penstock.engine.private_files import sync_folder

from ..settings import CommandError, UsageError

MANIFEST: Final = "_manifest.json"
_JOB_KEY: Final = b"penstock_job"
"""Key of the digest of the job in the metadata of Parquet files."""
COLUMN: Final = "embedding"
"""Name of the added column."""
_LOCK: Final = "_lock"
_UNFINISHED: Final = ".unfinished-"
_CHANGES_NO_ROW: Final = ("name", "path", "root", "sources", "device", "kernels", "num_lanes", "auto_truncate")
"""Fields of ModelInfo that may differ when an interrupted job continues."""


class Shard(NamedTuple):
    """Consecutive rows of one file: the unit of work.

    Attributes:
        number: Index in the job, from 0.
        start: Index of its first row in the file, from 0.
    """

    number: int
    path: str
    start: int
    num_rows: int


class JobFolder:
    """The folder of finished shards of a job. Several processes may write to it: they write the same file for a shard.

    Args:
        folder: The folder; all machines share it.
        suffix: Suffix of shard files: ".npy" or ".parquet".
        start_over: Advice for messages, such as "delete the folder".
    """

    def __init__(self, folder: Path, suffix: str, start_over: str) -> None:
        self.folder = folder
        self._suffix = suffix
        self._start_over = start_over
        self._job_digest = b""

    def begin(self, identity: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """Starts or continues a job.

        Args:
            identity: All values that affect the output. A job continues only if all are equal.
            overwrite: Delete the files of an earlier job first.

        Raises:
            UsageError: The folder holds other files, another job, or a finished job.
            CommandError: It cannot be written.
        """
        self._job_digest = _digest_of(identity)
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            if overwrite:
                self._clear()
            manifest = self._read()
            if manifest is None:
                names = sorted(path.name for path in self.folder.iterdir())
                if others := [name for name in names if name != _LOCK and not name.startswith(_UNFINISHED)]:
                    raise UsageError(
                        f"{self.folder} has {others[0]}, which is not a file of a job of this version: use "
                        "another folder or output, or move it away"
                    )
                self._write_manifest(identity, is_finished=False)
                return
        differing = [key for key, value in identity.items() if manifest["identity"].get(key) != value]
        if differing:
            raise UsageError(
                f"{self.folder} has an unfinished run with another {', '.join(differing)}; run the same command "
                f"again to finish it, or {self._start_over} to start over"
            )
        if manifest["finished"]:
            raise UsageError(f"{self.folder} is finished; {self._start_over} to start over")

    def path(self, shard: Shard) -> Path:
        """Returns the file of a shard. Sorted file names have the order of the input."""
        return self.folder / f"part-{shard.number:08d}{self._suffix}"

    def is_finished(self, shard: Shard) -> bool:
        """Returns whether a shard is finished: its file is complete, has all rows, and is of this job."""
        path = self.path(shard)
        num_rows = _npy_rows(path) if self._suffix == ".npy" else _parquet_rows(path, self._job_digest)
        return num_rows == shard.num_rows

    def unfinished_shards(self, shards: Iterable[Shard]) -> list[Shard]:
        """Returns the unfinished shards, which have no file or a damaged one."""
        return [shard for shard in shards if not self.is_finished(shard)]

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

    def write_rejected(self, shard: Shard, reasons: Mapping[int, str]) -> None:
        """Writes why the model rejected rows of a shard, by index in the shard, before its vectors; see `write`."""
        path = self._rejected_path(shard)
        if reasons:
            content = json.dumps(list(reasons.items())).encode()
            self.write(path, lambda path: path.write_bytes(content))
        else:
            path.unlink(missing_ok=True)  # from an interrupted run

    def rejected(self, shards: Iterable[Shard]) -> dict[int, str]:
        """Returns why the model rejected rows of finished shards, by index in the file."""
        rejected: dict[int, str] = {}
        for shard in shards:
            path = self._rejected_path(shard)
            if path.exists():
                rejected |= {shard.start + index: reason for index, reason in json.loads(path.read_bytes())}
        return rejected

    def _rejected_path(self, shard: Shard) -> Path:
        return self.path(shard).with_suffix(".rejected.json")

    def write_table(self, shard: Shard, table: Any) -> None:
        """Writes the file of a shard from a pyarrow.Table, with the digest of the job in its metadata; see `write`.

        Raises:
            UsageError: The folder holds another job now.
        """
        from pyarrow import parquet

        manifest = self._read()
        if manifest is None or _digest_of(manifest["identity"]) != self._job_digest:
            raise UsageError(f"{self.folder} holds another job now: a later run was started with --overwrite")
        of_job = table.replace_schema_metadata({**(table.schema.metadata or {}), _JOB_KEY: self._job_digest})
        self.write(self.path(shard), lambda path: parquet.write_table(of_job, path))

    def finish(self, identity: Mapping[str, Any]) -> None:
        """Records that all shards are finished, and removes temporary files of killed processes."""
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            path.unlink(missing_ok=True)
        self._write_manifest(identity, is_finished=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder against other processes of this machine. At the end, a folder without shards is removed.

        Raises:
            UsageError: The folder is a file, or another process is writing it.
            CommandError: It cannot be written.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"{self.folder} is a file, but it must be the folder of finished shards: move it away")
        with self.writing():
            self.folder.mkdir(exist_ok=True)
            lock = (self.folder / _LOCK).open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UsageError(f"another process is writing to {self.folder}") from error
            if os.fstat(lock.fileno()).st_nlink == 0:  # another process has removed the folder in the meantime
                raise UsageError(f"another process was writing to {self.folder}; run the command again")
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
        """Converts an OSError to a CommandError that states how to continue."""
        try:
            yield
        except OSError as error:
            raise CommandError(
                f"{self.folder} cannot be written: {error.strerror or error}; finished shards are kept there: "
                "run the same command again to continue"
            ) from error

    def _clear(self) -> None:
        """Deletes only the files of an earlier job."""
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
            reason = "it is not a manifest"
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = one_line(error)
        raise UsageError(f"{path} is damaged ({reason}); {self._start_over} to start over")

    def _write_manifest(self, identity: Mapping[str, Any], *, is_finished: bool) -> None:
        text = json.dumps({"identity": identity, "finished": is_finished}, indent=2)
        self.write(self.folder / MANIFEST, lambda path: path.write_text(text))


class ShardVectorReader:
    """The vectors of all shards of a job as one array [N, D] float32, mapped from their files.

    Args:
        job: The job. Its files are .npy.
        shards: All shards in order.
    """

    def __init__(self, job: JobFolder, shards: Sequence[Shard]) -> None:
        self._job = job
        self._shards = shards
        self._starts = np.array([shard.start for shard in shards])
        self._open: tuple[int, NDArray[np.float32]] | None = None
        self.width = max(_npy_shape(job.path(shard))[1] for shard in shards)
        self.num_rows = sum(shard.num_rows for shard in shards)

    def rows(self, numbers: Sequence[int]) -> NDArray[np.float32]:
        """Returns the vectors [len(numbers), D] of rows in ascending order; NaN for rows without a vector."""
        found = np.full((len(numbers), self.width), np.nan, np.float32)
        wanted = np.asarray(numbers, np.int64)
        indices = np.searchsorted(self._starts, wanted, "right") - 1
        for index in np.unique(indices):
            of_shard = indices == index
            vectors = self._vectors_of_shard(int(index))
            if vectors.shape[1]:
                found[of_shard] = vectors[wanted[of_shard] - self._starts[index]]
        return found

    def _vectors_of_shard(self, index: int) -> NDArray[np.float32]:
        if self._open is None or self._open[0] != index:
            self._open = (index, np.load(self._job.path(self._shards[index])))
        return self._open[1]


def model_digest(info: ModelInfo) -> str:
    """Returns a digest of a model's resolved configuration and of the bytes of its files."""
    resolved = resolved_fields(info, _CHANGES_NO_ROW)
    digest = hashlib.blake2b(json.dumps(resolved, sort_keys=True, default=str).encode())
    add_files(digest, info)
    return digest.hexdigest()


def replace_file(path: Path, unfinished: Path, save: Callable[[Path], object]) -> None:
    """Replaces a file atomically. Returns when the new file is on disk.

    Args:
        path: Path of the file to replace.
        unfinished: Path in the same folder for the temporary file, which is removed after an error.
        save: Writes the file to a path.

    Raises:
        OSError: The disk fails. Other errors of `save` are raised, too.
    """
    try:
        save(unfinished)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync_folder(path.parent)  # without it a power loss may undo the renaming
    finally:
        unfinished.unlink(missing_ok=True)


def write_npy_header(file: BinaryIO, num_rows: int, width: int) -> None:
    """Writes the header of a .npy file [num_rows, width] float32."""
    header = {"descr": "<f4", "fortran_order": False, "shape": (num_rows, width)}
    np.lib.format.write_array_header_1_0(file, header)


def _npy_shape(path: Path) -> tuple[int, int]:
    """Returns the shape of a complete .npy file with a matrix. Raises ValueError or OSError for other files."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        num_rows, width = shape
        if path.stat().st_size != file.tell() + num_rows * width * dtype.itemsize:
            raise ValueError("it is truncated")
    return num_rows, width


def _npy_rows(path: Path) -> int | None:
    try:
        return _npy_shape(path)[0]
    except (OSError, ValueError):  # missing or damaged: the shard runs again
        return None


def _digest_of(identity: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest().encode()


def _parquet_rows(path: Path, job_digest: bytes) -> int | None:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        file = parquet.read_metadata(path)
        return int(file.num_rows) if (file.metadata or {}).get(_JOB_KEY) == job_digest else None
    except (pa.ArrowException, OSError):  # missing or damaged: the shard runs again
        return None
