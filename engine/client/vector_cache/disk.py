"""The tier on disk: rows that the processes of a machine share, in an LMDB environment of a fixed size.

LMDB maps its file into memory: a lookup takes microseconds, any number of processes read while one writes, and a dead
process leaves no lock behind. This module protects against two weaknesses of LMDB. Reading a page that is missing from
the file kills the process (SIGBUS): a file that has become shorter is not read. The table of readers is mapped for
writing: its space on disk is reserved before it is used. The file is sparse and has its full size from the beginning,
so that its content is always inside it.

Rows are stored in order of arrival, each after its key, and are evicted in that order. Storing them in order of their
random keys would leave half of the file empty. A second table maps each key to the number of its row. A digest of the
key and the row follows each row: a damaged row, or the row of another key, is not used.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from errno import EDQUOT, EIO, ENOSPC
from hashlib import blake2b
from pathlib import Path
from typing import Final

import lmdb

from ...private_files import check_folder, check_owner, open_private, secret_of
from .keys import KEY_BYTES

logger = logging.getLogger("penstock.engine")

_NUMBER_BYTES: Final = 8
_SEAL_BYTES: Final = 8
_FOLDER: Final = "vectors-1"
"""The number is the version of the layout. New arithmetic changes the keys instead (NUMERICS of keys.py)."""
_MODE: Final = 0o600
_READERS_BYTES: Final = 64 * 1024
"""Size of the table of readers: a thousand threads of all processes."""
_MAX_USED_SHARE: Final = 0.75
"""Used share of the file at which rows are evicted. LMDB writes every change to free pages."""
_TRANSACTION_SHARE: Final = 1 / 64
"""Share of the file that one transaction writes or frees. Each row may change a page, and a released page can be used
again two transactions later."""
_PAUSES_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Seconds to wait for readers."""
_FEW_ROWS: Final = 128
"""Rows that are read on the event loop, in about 0.5 ms; more are read in a thread."""
_MAX_WAITING_BYTES: Final = 64 * 2**20
"""Bytes of rows that may wait to be written; further rows are dropped."""
_PAUSE_S: Final = 30.0
"""Seconds without writes after the disk was full."""
_WRITE_DELAY_S: Final = 0.05
"""Seconds to collect rows before a write, because each write flushes the disk."""
_CLOSE_S: Final = 10.0


class DiskError(Exception):
    """The tier cannot be used. The message states the reason."""


class DiskFullError(DiskError):
    """The disk, the file or the table of readers is full."""


class DiskTier:
    """Rows by key, in a folder. Any thread may read, also during a write. One thread writes.

    Args:
        folder: Created for this user alone if it does not exist.
        max_bytes: Size of a new file; an existing file keeps its size.

    Attributes:
        secret: Secret of the folder for keys and client namespaces, the same for all processes.
        max_bytes: Size of the file.
        num_evicted: Rows that this process has evicted.
        num_damaged: Damaged rows that this process has found.

    Raises:
        DiskError: The folder cannot be used: a full disk, no permission, a damaged file, or a file of another user.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.num_evicted = 0
        self.num_damaged = 0
        with _errors(folder):
            folder.mkdir(0o700, parents=True, exist_ok=True)
            check_folder(folder)
            with _locked(folder / "lock"):
                self.secret = secret_of(folder)
                self._open(folder / _FOLDER, max_bytes)
        self._folder = folder

    def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Returns the row of each key; None if it is missing or damaged.

        Raises:
            DiskFullError: Too many readers.
            DiskError: The file is damaged.
        """
        self._check_size()
        rows: list[bytes | None] = []
        with _errors(self._folder), self._env.begin() as transaction:
            for key in keys:
                number = transaction.get(key, db=self._numbers)
                stored = None if number is None else transaction.get(number, db=self._rows)
                row = None if stored is None else unseal(key, stored[len(key) :])
                self.num_damaged += number is not None and row is None
                rows.append(row)
        return rows

    def write(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        """Writes rows by key and evicts older rows to make room. Skips rows that are too large.

        Raises:
            DiskFullError: The disk or the file is full. Some rows may have been written.
            DiskError: The file is damaged.
        """
        self._check_size()
        with _errors(self._folder):
            for batch in self._batches(rows):
                self._write(batch)

    def num_bytes(self) -> int:
        """Returns the bytes of the pages that all processes use. Takes microseconds.

        Raises:
            DiskFullError: Too many readers.
            DiskError: The file is damaged.
        """
        self._check_size()
        with _errors(self._folder):
            return self._used_bytes()

    def close(self) -> None:
        """Closes the file. Do not read or write afterwards."""
        self._env.close()
        os.close(self._file)

    def _open(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(0o700, exist_ok=True)
        check_owner(folder)
        data = folder / "data.mdb"
        page = os.sysconf("SC_PAGE_SIZE")
        readers = open_private(folder / "lock.mdb")
        try:
            if os.fstat(readers).st_size < _READERS_BYTES:
                os.posix_fallocate(readers, 0, _READERS_BYTES)
        finally:
            os.close(readers)  # before LMDB opens it: closing a file ends all locks of its process on it
        os.close(open_private(data))  # LMDB treats an empty file as new
        size = data.stat().st_size
        self.max_bytes = max(size, max_bytes) // page * page if size <= 2 * page else size
        self._env = lmdb.open(
            str(folder), map_size=self.max_bytes, max_dbs=2, mode=_MODE, metasync=False, readahead=False, meminit=False
        )
        try:
            last_page: int = self._env.info()["last_pgno"]
            if size and (last_page + 1) * self._env.stat()["psize"] > max(size, 2 * page):
                raise DiskError(f"{data} is damaged: a part of it is missing. Remove it to start with an empty cache")
            os.truncate(data, self.max_bytes)
            self._env.reader_check()
            self._rows = self._env.open_db(b"rows")
            self._numbers = self._env.open_db(b"numbers")
            self._file = open_private(data, os.O_RDONLY)
        except BaseException:  # close the database, also after an interrupt
            self._env.close()
            raise

    def _write(self, batch: list[tuple[bytes, bytes]]) -> None:
        """Writes the rows of one transaction. Waits while readers use the pages that it needs."""
        for pause_s in (*_PAUSES_S, None):
            try:
                self._evict(int(_TRANSACTION_SHARE * self.max_bytes))
                self._put(batch)
            except lmdb.MapFullError:
                if pause_s is None:
                    raise
                self._env.reader_check()  # frees the pages of readers that have died
                time.sleep(pause_s)
            except lmdb.Error as error:
                if os.strerror(EIO) in str(error):
                    self._check_disk_full()
                raise
            else:
                return

    def _batches(self, rows: Sequence[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yields the sealed rows of one transaction at a time."""
        left = max_transaction_bytes = int(_TRANSACTION_SHARE * self.max_bytes)
        batch: list[tuple[bytes, bytes]] = []
        for key, row in rows:
            sealed = seal(key, row)
            if len(sealed) > max_transaction_bytes:
                continue
            if len(sealed) > left:
                yield batch
                left = max_transaction_bytes
                batch = []
            left -= len(sealed)
            batch.append((key, sealed))
        if batch:
            yield batch

    def _put(self, batch: list[tuple[bytes, bytes]]) -> None:
        with self._env.begin(write=True) as transaction:
            rows = transaction.cursor(self._rows)
            last = int.from_bytes(rows.key(), "big") if rows.last() else 0
            for key, sealed in batch:
                number = transaction.get(key, db=self._numbers)
                if number is not None and transaction.get(number, db=self._rows) == key + sealed:
                    continue
                last += 1
                rows.put(last.to_bytes(_NUMBER_BYTES, "big"), key + sealed, append=True)
                transaction.put(key, last.to_bytes(_NUMBER_BYTES, "big"), db=self._numbers)

    def _evict(self, num_bytes: int) -> None:
        """Evicts the oldest rows until `num_bytes` fit, in transactions of limited size."""
        max_used_bytes = max(int(_MAX_USED_SHARE * self.max_bytes) - num_bytes, 0)
        while (used := self._used_bytes()) > max_used_bytes:
            with self._env.begin(write=True) as transaction:
                num_rows = transaction.stat(self._rows)["entries"]
                if not num_rows:
                    return
                rows = transaction.cursor(self._rows)
                rows.first()
                for _ in range(math.ceil(num_rows * min((used - max_used_bytes) / used, _TRANSACTION_SHARE))):
                    number = rows.key()
                    key = rows.value()[:KEY_BYTES]
                    if transaction.get(key, db=self._numbers) == number:
                        transaction.delete(key, db=self._numbers)
                    rows.delete()
                    self.num_evicted += 1

    def _check_disk_full(self) -> None:
        """Raises OSError if the disk is full, because LMDB does not report a full disk after a partial write."""
        with tempfile.TemporaryFile(dir=self._folder) as file:
            os.posix_fallocate(file.fileno(), 0, int(_TRANSACTION_SHARE * self.max_bytes))

    def _used_bytes(self) -> int:
        with self._env.begin() as transaction:
            stats = [transaction.stat(table) for table in (self._rows, self._numbers)]
        pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        return int(pages * stats[0]["psize"])

    def _check_size(self) -> None:
        if os.fstat(self._file).st_size < self.max_bytes:
            raise DiskError(f"{self._folder} is damaged: a part of the file is missing")


@contextmanager
def _errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, lmdb.Error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        is_full = isinstance(error, lmdb.MapFullError | lmdb.ReadersFullError)
        is_disk_full = is_full or os.strerror(ENOSPC) in reason or os.strerror(EDQUOT) in reason
        raise (DiskFullError if is_disk_full else DiskError)(f"{folder}: {reason}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of the folder, so that one process at a time opens it."""
    file = open_private(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


class SharedTier:
    """The rows that processes share. `find`, `num_bytes`, `put` and `close` belong to one event loop.

    Attributes:
        tier: Tier to read and write.
        is_working: Whether rows are read and written.
        num_dropped: Rows that were not written: the disk was full or too slow.

    Raises:
        DiskError: The folder cannot be used.
    """

    def __init__(self, folder: Path, max_bytes: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.tier = DiskTier(folder, max_bytes)
        self.is_working = True
        self.num_dropped = 0
        self._num_bytes = 0
        self._clock_s = clock_s
        self._is_damaged = False
        self._paused_until_s = 0.0
        self._waiting: dict[bytes, bytes] = {}
        self._num_waiting_bytes = 0
        self._is_ending = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._write, name="penstock-cache", daemon=True)
        self._thread.start()

    async def find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Returns the row of each key; None if it is missing."""
        if self._is_damaged or not keys:
            return [None] * len(keys)
        try:
            if len(keys) <= _FEW_ROWS:
                return self.tier.read(keys)
            return await asyncio.to_thread(self.tier.read, keys)
        except DiskError as error:
            self._record_error(error)
            return [None] * len(keys)

    def num_bytes(self) -> int:
        """Returns the bytes of the rows of all processes; the last known value while the disk cannot be read."""
        if not self._is_damaged:
            try:
                self._num_bytes = self.tier.num_bytes()
            except DiskError as error:
                self._record_error(error)
        return self._num_bytes

    def put(self, key: bytes, row: bytes) -> None:
        """Queues a row to be written."""
        with self._wake:
            is_much = self._num_waiting_bytes + len(row) > _MAX_WAITING_BYTES
            if self._is_damaged or is_much:
                self.num_dropped += 1
                return
            if not self._waiting:
                self._wake.notify()
            self._num_waiting_bytes += len(row)
            self._waiting[key] = row

    def close(self) -> None:
        """Writes the waiting rows and closes the files."""
        with self._wake:
            self._is_ending = True
            self._wake.notify()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():  # it is alive if a stopped process holds the write lock
            self.tier.close()

    def _write(self) -> None:
        """Writes queued rows until `close`. Runs in the thread."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._is_ending)
                if not self._waiting:
                    return
                self._wake.wait_for(lambda: self._is_ending, _WRITE_DELAY_S)
                waiting = self._waiting
                self._waiting = {}
                self._num_waiting_bytes = 0
            self._write_rows(list(waiting.items()))

    def _write_rows(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        if self._is_damaged or self._clock_s() < self._paused_until_s:
            self.num_dropped += len(rows)
            return
        try:
            self.tier.write(rows)
        except DiskError as error:
            self.num_dropped += len(rows)
            self._record_error(error)
        else:
            if not self.is_working:
                logger.info("--cache-dir: writing vectors again")
            self.is_working = True

    def _record_error(self, error: DiskError) -> None:
        """Logs the error once and stops writing to the disk, or using it if it is damaged."""
        is_new = self.is_working or (not isinstance(error, DiskFullError) and not self._is_damaged)
        self.is_working = False
        if isinstance(error, DiskFullError):
            self._paused_until_s = self._clock_s() + _PAUSE_S
            outcome = "stored vectors are read, and new ones are not written until there is space"
        else:
            self._is_damaged = True
            outcome = "the server continues without the folder; remove it and restart the server to use it again"
        if is_new:
            logger.error("--cache-dir: %s; %s", error, outcome)


def seal(key: bytes, packed: bytes) -> bytes:
    """Returns a row with its digest, as stored on disk."""
    return packed + _digest(key, packed)


def unseal(key: bytes, sealed: bytes) -> bytes | None:
    """Returns the row that was sealed under `key`; None for a damaged row or the row of another key."""
    packed = sealed[:-_SEAL_BYTES]
    return packed if packed and sealed[-_SEAL_BYTES:] == _digest(key, packed) else None


def _digest(key: bytes, packed: bytes) -> bytes:
    digest = blake2b(key, digest_size=_SEAL_BYTES)
    digest.update(packed)
    return digest.digest()
