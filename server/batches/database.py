"""Records of files and batches in SQLite, accessed by one thread.

A change is on the disk when its call returns (write-ahead log, synchronous=FULL).
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from penstock.engine.protocol.errors import InvalidRequestError, StorageError

from ..errors import quote
from ..settings import UsageError
from .records import BatchRecord, FileRecord

Record = TypeVar("Record", FileRecord, BatchRecord)
Result = TypeVar("Result")

_VERSION: Final = 2
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, purpose TEXT, expires_at INTEGER, record BLOB
);
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, has_ended INTEGER, record BLOB,
    input_file_id TEXT, ended_at INTEGER
);
CREATE TABLE IF NOT EXISTS answers (batch_id TEXT, line INTEGER, PRIMARY KEY (batch_id, line)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS files_of_owners ON files (owner, seq);
CREATE INDEX IF NOT EXISTS batches_of_owners ON batches (owner, seq);
CREATE INDEX IF NOT EXISTS unfinished_batches ON batches (seq) WHERE NOT has_ended;
CREATE INDEX IF NOT EXISTS batches_of_files ON batches (input_file_id);
CREATE INDEX IF NOT EXISTS ended_batches ON batches (ended_at) WHERE has_ended;
"""
_FROM_VERSION_1: Final = """
ALTER TABLE batches ADD COLUMN input_file_id TEXT;
ALTER TABLE batches ADD COLUMN ended_at INTEGER;
UPDATE batches SET input_file_id = json_extract(CAST(record AS TEXT), '$.input_file_id');
UPDATE batches SET ended_at = coalesce(
    json_extract(CAST(record AS TEXT), '$.completed_at'), json_extract(CAST(record AS TEXT), '$.failed_at'),
    json_extract(CAST(record AS TEXT), '$.expired_at'), json_extract(CAST(record AS TEXT), '$.cancelled_at')
) WHERE has_ended;
"""


class Page(NamedTuple):
    """A page of a list.

    Attributes:
        after: Id of the entry before the page; None: the first page.
        limit: Maximum number of entries.
        is_ascending: Oldest entries first.
    """

    after: str | None
    limit: int
    is_ascending: bool = False


class BatchDatabase:
    """The SQLite database of files and batches. Await its methods from one event loop.

    Raises:
        UsageError: It cannot be opened, or has the format of another version.
    """

    def __init__(self, path: Path) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        try:
            self._database = self._thread.submit(_opened, path).result()
        except (sqlite3.Error, ValueError) as error:
            self._thread.shutdown()
            raise UsageError(f"--data-dir: {path}: {error}") from error

    async def close(self) -> None:
        """Closes the database after pending changes."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._database.close)
        self._thread.shutdown()

    async def add_file(self, file: FileRecord) -> None:
        """Adds the record of a file. FileStore holds its content."""
        await self._do(lambda database: _add_file(database, file))

    async def file(self, file_id: str, owner: str, now: int) -> FileRecord | None:
        """Returns a file of an owner that has not expired."""
        query = "SELECT record FROM files WHERE id = ? AND owner = ? AND (expires_at IS NULL OR expires_at > ?)"
        found = await self._records(FileRecord, query, (file_id, owner, now))
        return found[0] if found else None

    async def files(self, owner: str, page: Page, purpose: str | None, now: int) -> list[FileRecord]:
        """Returns a page of the owner's files, plus one if there are more."""
        where = "(expires_at IS NULL OR expires_at > ?)" + ("" if purpose is None else " AND purpose = ?")
        return await self._page(FileRecord, "files", owner, page, where, (now, *([] if purpose is None else [purpose])))

    async def count_and_bytes(self, owner: str) -> tuple[int, int]:
        """Returns the number of the files of an owner, and their bytes."""
        size = "total(json_extract(CAST(record AS TEXT), '$.num_bytes'))"
        query = f"SELECT count(*), {size} FROM files WHERE owner = ?"  # noqa: S608 - constants only

        def read(database: sqlite3.Connection) -> tuple[int, int]:
            count, num_bytes = database.execute(query, (owner,)).fetchone()
            return count, int(num_bytes)

        return await self._do(read)

    async def expired_files(self, now: int) -> list[FileRecord]:
        """Returns the files that have expired."""
        return await self._records(FileRecord, "SELECT record FROM files WHERE expires_at <= ?", (now,))

    async def file_ids(self) -> set[str]:
        """Returns the ids of all files, including output files of unfinished batches."""

        def read(database: sqlite3.Connection) -> set[str]:
            ids = {file_id for (file_id,) in database.execute("SELECT id FROM files")}
            for batch in _decoded(BatchRecord, database.execute("SELECT record FROM batches WHERE NOT has_ended")):
                ids |= {batch.output_id, batch.error_id}
            return ids

        return await self._do(read)

    async def remove_file(self, file_id: str) -> None:
        """Removes the record of a file, if there is one."""
        await self._do(lambda database: database.execute("DELETE FROM files WHERE id = ?", (file_id,)))

    async def add_batch(self, batch: BatchRecord) -> None:
        """Adds the record of a batch."""
        values = (batch.id, batch.owner, batch.has_ended, msgspec.json.encode(batch), batch.input_file_id)
        insert = "INSERT INTO batches (id, owner, has_ended, record, input_file_id) VALUES (?, ?, ?, ?, ?)"
        await self._do(lambda database: database.execute(insert, values))

    async def batch(self, batch_id: str, owner: str) -> BatchRecord | None:
        """Returns a batch of an owner; None if there is none with this id."""
        query = "SELECT record FROM batches WHERE id = ? AND owner = ?"
        found = await self._records(BatchRecord, query, (batch_id, owner))
        return found[0] if found else None

    async def batches(self, owner: str, page: Page) -> list[BatchRecord]:
        """Returns a page of the owner's batches, plus one if there are more."""
        return await self._page(BatchRecord, "batches", owner, page)

    async def unfinished_batches(self) -> list[BatchRecord]:
        """Returns the unfinished batches, oldest first."""
        return await self._records(BatchRecord, "SELECT record FROM batches WHERE NOT has_ended ORDER BY seq", ())

    async def save(self, batch: BatchRecord, lines: Iterable[int] = ()) -> None:
        """Stores the state of a batch and the numbers of newly completed lines, in one transaction."""
        record = msgspec.json.encode(batch)
        rows = [(batch.id, line) for line in lines]

        def write(database: sqlite3.Connection) -> None:
            database.executemany("INSERT INTO answers VALUES (?, ?)", rows)
            database.execute("UPDATE batches SET record = ? WHERE id = ?", (record, batch.id))

        await self._do(write)

    async def end(self, batch: BatchRecord, files: Sequence[FileRecord]) -> None:
        """Stores the end of a batch and its output files."""
        values = (batch.ended_at, msgspec.json.encode(batch), batch.id)

        def write(database: sqlite3.Connection) -> None:
            for file in files:
                _add_file(database, file)
            database.execute("UPDATE batches SET has_ended = 1, ended_at = ?, record = ? WHERE id = ?", values)
            database.execute("DELETE FROM answers WHERE batch_id = ?", (batch.id,))

        await self._do(write)

    async def batches_ended_before(self, unix_time: int, limit: int = 100) -> list[BatchRecord]:
        """Returns at most `limit` batches that ended at or before a Unix time."""
        query = "SELECT record FROM batches WHERE has_ended AND ended_at <= ? ORDER BY ended_at LIMIT ?"
        return await self._records(BatchRecord, query, (unix_time, limit))

    async def oldest_ended_batches(self, owner: str, num_kept: int, limit: int = 100) -> list[BatchRecord]:
        """Returns at most `limit` ended batches of an owner, without the newest `num_kept`."""
        query = "SELECT record FROM batches WHERE owner = ? AND has_ended ORDER BY seq DESC LIMIT ? OFFSET ?"
        return await self._records(BatchRecord, query, (owner, limit, num_kept))

    async def remove_batch(self, batch: BatchRecord) -> list[str]:
        """Removes the records of a batch and of its files, and returns their ids. The input of another batch stays."""

        def write(database: sqlite3.Connection) -> list[str]:
            database.execute("DELETE FROM batches WHERE id = ?", (batch.id,))
            file_ids = [batch.output_id, batch.error_id]
            query = "SELECT 1 FROM batches WHERE input_file_id = ? LIMIT 1"
            if database.execute(query, (batch.input_file_id,)).fetchone() is None:
                file_ids.append(batch.input_file_id)
            database.executemany("DELETE FROM files WHERE id = ?", [(file_id,) for file_id in file_ids])
            return file_ids

        return await self._do(write)

    async def batch_reading(self, file_id: str) -> str | None:
        """Returns the id of a batch that has not ended and reads this file."""
        query = "SELECT id FROM batches WHERE input_file_id = ? AND NOT has_ended LIMIT 1"

        def read(database: sqlite3.Connection) -> str | None:
            row = database.execute(query, (file_id,)).fetchone()
            return None if row is None else row[0]

        return await self._do(read)

    async def completed_lines(self, batch_id: str) -> set[int]:
        """Returns the numbers of the completed lines of a batch."""
        query = "SELECT line FROM answers WHERE batch_id = ?"
        return await self._do(lambda database: {line for (line,) in database.execute(query, (batch_id,))})

    async def _page(
        self, kind: type[Record], table: str, owner: str, page: Page, where: str = "1", values: Sequence[object] = ()
    ) -> list[Record]:
        order, beyond = ("ASC", ">") if page.is_ascending else ("DESC", "<")

        def read(database: sqlite3.Connection) -> list[Record]:
            condition = ""
            more: list[object] = [owner, *values]
            if page.after is not None:
                query = f"SELECT seq FROM {table} WHERE id = ? AND owner = ?"  # noqa: S608 - constants only
                row = database.execute(query, (page.after, owner)).fetchone()
                if row is None:
                    raise InvalidRequestError(
                        f"after is {quote(page.after)}, which is not an entry of this list.", param="after"
                    )
                condition = f"AND seq {beyond} ?"
                more.append(row[0])
            query = f"SELECT record FROM {table} WHERE owner = ? AND {where} {condition} ORDER BY seq {order} LIMIT ?"  # noqa: S608
            return _decoded(kind, database.execute(query, (*more, page.limit + 1)))

        return await self._do(read)

    async def _records(self, kind: type[Record], query: str, values: Sequence[object]) -> list[Record]:
        return await self._do(lambda database: _decoded(kind, database.execute(query, values)))

    async def _do(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Runs `work` on the thread, as one transaction.

        Raises:
            StorageError: The disk is full or fails. Nothing has changed.
        """

        def run() -> Result:
            with self._database:
                self._database.execute("BEGIN")
                return work(self._database)

        loop = asyncio.get_running_loop()
        try:
            return await asyncio.shield(loop.run_in_executor(self._thread, run))
        except sqlite3.OperationalError as error:
            raise StorageError(f"The server cannot keep this: {error}. Please try again later.") from error


def _opened(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    try:
        with closing(database.execute("PRAGMA user_version")) as rows:
            (version,) = rows.fetchone()
        if version not in (0, 1, _VERSION):
            raise ValueError(f"was written by another version of the server (format {version}, not {_VERSION})")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        if version == 1:
            database.executescript(f"BEGIN; {_FROM_VERSION_1} PRAGMA user_version = {_VERSION}; COMMIT;")
        database.executescript(_TABLES)
        database.execute(f"PRAGMA user_version = {_VERSION}")
    except BaseException:  # close the file, also after an interrupt
        database.close()
        raise
    return database


def _add_file(database: sqlite3.Connection, file: FileRecord) -> None:
    values = (file.id, file.owner, file.purpose, file.expires_at, msgspec.json.encode(file))
    database.execute("INSERT INTO files (id, owner, purpose, expires_at, record) VALUES (?, ?, ?, ?, ?)", values)


def _decoded(kind: type[Record], rows: Iterable[tuple[bytes]]) -> list[Record]:
    return [msgspec.json.decode(record, type=kind) for (record,) in rows]
