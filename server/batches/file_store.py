"""The data folder, and the files of clients in it: uploads, limits and removal.

The folder outlives the server:

lock          locked by the server that uses the folder
secret        salt that turns API keys into owner ids; mode 0600
penstock.db   records of files and batches (SQLite)
files/        contents of files by id; names of running uploads end in .part
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Final

from penstock.engine.private_files import check_folder, open_private, secret_of, sync_folder
from penstock.engine.protocol.errors import InvalidRequestError, StorageError, UnknownObjectError

from ..admission import LimitError, ServerRejectionReason
from ..errors import quote
from ..schemas.batch_bodies import MAX_EXPIRY_S, MIN_EXPIRY_S
from ..settings import UsageError
from .database import BatchDatabase
from .records import FileRecord, new_file_id
from .upload import Upload

PART: Final = ".part"
PURPOSE: Final = "batch"
OUTPUT_PURPOSE: Final = "batch_output"
MAX_LARGE_FILES: Final = 100
"""Limit of an owner's bytes as a number of files of maximum size: 20 GB by default. Outputs of batches count."""
RESERVED_BYTES: Final = 2**30
"""Disk space that uploads leave free, for the output of batches and for the database."""
_RESERVED_SHARE: Final = 20
"""On a small disk, a twentieth is left free instead."""
_CHECK_EVERY_BYTES: Final = 4 * 1024 * 1024
"""Bytes of an upload after which disk space and limits are checked again."""
_FIELDS: Final = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})


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


class FileStore:
    """The files in a data folder.

    Args:
        now: Unix time.
        max_files: Maximum number of files of one owner.
    """

    def __init__(
        self, data: DataDir, store: BatchDatabase, max_bytes: int, now: Callable[[], float], max_files: int
    ) -> None:
        self._folder = data.files
        self._store = store
        self.max_bytes = max_bytes
        self.max_files = max_files
        self._now = now
        self._adding = asyncio.Lock()
        self._running_uploads: dict[str, list[Upload]] = {}  # by owner

    def path(self, file_id: str) -> Path:
        """Returns the path of the content of a file."""
        return self._folder / file_id

    async def receive(self, content_type: str, body: AsyncIterator[bytes], owner: str) -> FileRecord:
        """Receives an upload. Returns its record when content and record are on the disk.

        Raises:
            InvalidRequestError: The form is invalid.
            HTTPException: 413 and 415, see Upload; 413 if the owner has too many files or bytes.
            StorageError: The disk fails or is almost full.
        """
        file_id = new_file_id()
        part = self.path(file_id + PART)
        try:
            upload = Upload(content_type, part, self.max_bytes)
        except OSError as error:
            raise StorageError(f"The server cannot keep the file: {error.strerror}. Please try again later.") from error
        self._running_uploads.setdefault(owner, []).append(upload)
        try:
            await self._check_upload(owner, upload, num_bytes=1)
            await upload.receive(self._checked(body, owner, upload))
            file = self._record(file_id, upload, owner)
        except BaseException:  # also if the client disconnects, which cancels the upload
            self._end_upload(upload, owner, part)
            raise
        # Threads cannot be cancelled: a client that disconnects now has uploaded the file.
        await asyncio.shield(self._add(file, upload, part))
        return file

    async def _add(self, file: FileRecord, upload: Upload, part: Path) -> None:
        """Adds the file of a complete upload."""
        content = self.path(file.id)
        try:
            await asyncio.to_thread(self._move_into_place, part, content)
            async with self._adding:
                await self._check_upload(file.owner, upload)
                await self._store.add_file(file)
        except BaseException:
            self._end_upload(upload, file.owner, part, content)
            raise
        self._end_upload(upload, file.owner)

    def _end_upload(self, upload: Upload, owner: str, *unused: Path) -> None:
        """Closes an upload and removes its unused files."""
        self._running_uploads[owner].remove(upload)
        if not self._running_uploads[owner]:
            del self._running_uploads[owner]
        with contextlib.suppress(OSError):  # the error of a full disk has been raised already
            upload.close()
        for path in unused:
            path.unlink(missing_ok=True)

    async def find(self, file_id: str, owner: str) -> FileRecord:
        """Returns a file of an owner. Raises UnknownObjectError."""
        file = await self._store.file(file_id, owner, int(self._now()))
        if file is None:
            raise UnknownObjectError(f"There is no file {quote(file_id)}.", param="file_id")
        return file

    async def remove(self, file: FileRecord) -> None:
        """Removes a file: first its record, so that no record is left without content."""
        await self._store.remove_file(file.id)
        await asyncio.to_thread(self.path(file.id).unlink, missing_ok=True)

    async def remove_contents(self, file_ids: Iterable[str]) -> None:
        """Removes files without a record."""
        for file_id in file_ids:
            await asyncio.to_thread(self.path(file_id).unlink, missing_ok=True)

    async def expired(self) -> list[FileRecord]:
        """Returns the files that have expired."""
        return await self._store.expired_files(int(self._now()))

    async def remove_orphans(self) -> None:
        """Removes file contents without a record, left by a killed server."""
        known = await self._store.file_ids()

        def clear() -> None:
            for path in self._folder.iterdir():
                if path.name not in known:
                    path.unlink()

        await asyncio.to_thread(clear)

    def output_record(self, file_id: str, owner: str, filename: str, num_bytes: int, expires_s: int) -> FileRecord:
        """Returns the record of an output file of a batch."""
        created_at = int(self._now())
        return FileRecord(
            id=file_id,
            owner=owner,
            filename=filename,
            purpose=OUTPUT_PURPOSE,
            num_bytes=num_bytes,
            created_at=created_at,
            expires_at=created_at + expires_s,
        )

    def truncate(self, file_id: str, num_bytes: int) -> None:
        """Truncates a file to its recorded length; removes an empty file."""
        if num_bytes:
            os.truncate(self.path(file_id), num_bytes)
        else:
            self.path(file_id).unlink(missing_ok=True)

    def _record(self, file_id: str, upload: Upload, owner: str) -> FileRecord:
        if upload.filename is None:
            raise InvalidRequestError("The form has no file; send it as the part `file`.", param="file")
        for name in upload.fields:
            if name not in _FIELDS:
                raise InvalidRequestError(f"{quote(name)} has no use here; leave it out.", param=name[:64])
        purpose = upload.fields.get("purpose")
        if purpose != PURPOSE:
            raise InvalidRequestError(f"purpose is {quote(purpose)}; it must be '{PURPOSE}'.", param="purpose")
        created_at = int(self._now())
        return FileRecord(
            id=file_id,
            owner=owner,
            filename=upload.filename,
            purpose=purpose,
            num_bytes=upload.num_bytes,
            created_at=created_at,
            expires_at=created_at + _expiry_s(upload.fields),
        )

    async def check_num_files(self, owner: str, num_files: int) -> None:
        """Raises HTTPException if an owner may not have `num_files` more files. Running uploads count."""
        count, _ = await self._store.count_and_bytes(owner)
        self._check_count(count + len(self._running_uploads.get(owner, ())) + num_files)

    async def _check_upload(self, owner: str, upload: Upload, num_bytes: int = 0) -> None:
        """Raises HTTPException if an upload with `num_bytes` more exceeds the limits. Earlier uploads count."""
        count, num_stored = await self._store.count_and_bytes(owner)
        uploads = self._running_uploads[owner]
        uploads = uploads[: uploads.index(upload) + 1]
        self._check_count(count + len(uploads))
        num_bytes += num_stored + sum(upload.num_bytes for upload in uploads)
        if num_bytes > (limit := MAX_LARGE_FILES * self.max_bytes):
            raise _storage_limit_error(
                f"would take {num_bytes} bytes; the limit is {limit}, {MAX_LARGE_FILES} of the largest files"
            )

    def _check_count(self, count: int) -> None:
        if count > self.max_files:
            raise _storage_limit_error(f"would be {count}; the limit is {self.max_files} (--max-files)")

    async def _checked(self, body: AsyncIterator[bytes], owner: str, upload: Upload) -> AsyncIterator[bytes]:
        """Yields a body while there is space for it.

        Raises:
            StorageError: The disk is almost full.
            HTTPException: 413, the owner has too many files or bytes.
        """
        unseen = _CHECK_EVERY_BYTES
        async for piece in body:
            unseen += len(piece)
            if unseen >= _CHECK_EVERY_BYTES:
                unseen = 0
                await asyncio.to_thread(self._check_disk)
                await self._check_upload(owner, upload)
            yield piece

    def _check_disk(self) -> None:
        disk = shutil.disk_usage(self._folder)
        if disk.free < min(RESERVED_BYTES, disk.total // _RESERVED_SHARE):
            raise StorageError(
                "The disk of the server is almost full, and the rest is reserved for the output of batches. "
                "Delete files that you do not need, or try again later."
            )

    def _move_into_place(self, part: Path, content: Path) -> None:
        part.rename(content)
        sync_folder(self._folder)


def _storage_limit_error(reason: str) -> LimitError:
    message = (
        f"The files of this key, with the output of batches, {reason}; "
        "delete some (DELETE /v1/files/ID), or wait until they expire."
    )
    return LimitError(413, message, ServerRejectionReason.FILE_STORAGE, {"connection": "close"})


def _expiry_s(fields: dict[str, str]) -> int:
    anchor = fields.get("expires_after[anchor]")
    seconds = fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return MAX_EXPIRY_S
    if anchor != "created_at":
        raise InvalidRequestError(
            f"expires_after[anchor] is {quote(anchor)}; it must be 'created_at'.", param="expires_after"
        )
    if not (seconds or "").isdecimal() or not MIN_EXPIRY_S <= int(seconds or 0) <= MAX_EXPIRY_S:
        raise InvalidRequestError(
            f"expires_after[seconds] is {quote(seconds)}; it must be {MIN_EXPIRY_S} to {MAX_EXPIRY_S}.",
            param="expires_after",
        )
    return int(seconds or 0)
