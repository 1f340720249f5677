"""Writes the output of a batch: responses to one file, errors to another.

A line is done when the line and its record are on disk. Lines are appended to the two files. Then one transaction
records the line numbers and the new lengths of the files. Bytes after the recorded length were written by a server that
was killed before the transaction. They are overwritten, and their lines run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from penstock.engine.private_files import sync_folder
from penstock.engine.protocol.errors import StorageError

from .database import BatchDatabase
from .internal_client import RouteResponse
from .records import BatchRecord, LineError

logger = logging.getLogger(__name__)

RETRY_S: Final = 5.0
"""Seconds between two attempts to write to a failing disk."""


class OutputLine(NamedTuple):
    """The output for one line.

    Attributes:
        text: The line in the output file, with its end.
        is_error: Whether it goes to the error file.
        model: Served name of the model; "" for none.
    """

    number: int
    text: bytes
    is_error: bool
    num_tokens: int = 0
    model: str = ""


class OutputWriter:
    """Writes the output of one batch. Lines that arrive during a write are written together. Used by one event loop.

    Args:
        batch: Its counts are updated when lines are on the disk.
        retry_s: Seconds until the next attempt to write if the disk fails.
    """

    def __init__(
        self,
        batch: BatchRecord,
        store: BatchDatabase,
        output: Path,
        errors: Path,
        retry_s: float = RETRY_S,
    ) -> None:
        self.done: set[int] = set()
        self._batch = batch
        self._store = store
        self._paths = (output, errors)
        self._retry_s = retry_s
        self._closing = asyncio.Event()
        self._saving = asyncio.Lock()  # saves must store states in order
        self._waiting: list[tuple[OutputLine, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Reads the numbers of the completed lines from the store."""
        self.done = await self._store.completed_lines(self._batch.id)

    async def add(self, line: OutputLine) -> None:
        """Returns when a line is on the disk. Waits while the disk fails."""
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((line, written))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_waiting())
        await written

    async def wait_idle(self) -> None:
        """Waits until nothing is being written. Discards lines whose `add` was cancelled."""
        if self._writing is not None:
            await self._writing

    async def close(self) -> None:
        """Finishes the current write, unless the disk fails."""
        self._closing.set()
        await self.wait_idle()

    async def save_batch(self) -> None:
        """Stores the state of the batch. Raises StorageError."""
        async with self._saving:
            await self._store.save(self._batch)

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                entries, self._waiting = self._waiting, []
                await self._write(entries)
        finally:
            self._writing = None

    async def _write(self, entries: list[tuple[OutputLine, asyncio.Future[None]]]) -> None:
        is_logged = False
        while entries := [entry for entry in entries if not entry[1].done()]:  # `add` was cancelled
            try:
                await self._save([line for line, _ in entries])
            except (OSError, StorageError) as error:
                if not is_logged:
                    logger.error("%s waits: its responses cannot be written: %s", self._batch.id, error)
                    is_logged = True
            except Exception as error:  # a bug: `add` raises it
                logger.exception("the responses of %s cannot be written", self._batch.id)
                _resolve(entries, error)
                return
            else:
                _resolve(entries, None)
                return
            with contextlib.suppress(TimeoutError):  # the pause has passed without `close`
                async with asyncio.timeout(self._retry_s):
                    await self._closing.wait()
            if self._closing.is_set():
                return

    async def _save(self, lines: Sequence[OutputLine]) -> None:
        """Writes lines, then updates the counts. If it raises OSError or StorageError, no line counts."""
        batch = self._batch
        texts = [b"".join([line.text for line in lines if line.is_error is is_error]) for is_error in (False, True)]
        await asyncio.to_thread(self._append, texts, (batch.num_output_bytes, batch.num_error_bytes))
        num_failed = sum(line.is_error for line in lines)
        counts = {
            "num_output_bytes": batch.num_output_bytes + len(texts[0]),
            "num_error_bytes": batch.num_error_bytes + len(texts[1]),
            "num_failed": batch.num_failed + num_failed,
            "num_completed": batch.num_completed + len(lines) - num_failed,
            "num_tokens": batch.num_tokens + sum(line.num_tokens for line in lines),
            "model": batch.model or next((line.model for line in lines if line.model), None),
        }
        numbers = [line.number for line in lines]
        async with self._saving:
            await self._store.save(msgspec.structs.replace(batch, **counts), numbers)
            for name, value in counts.items():
                setattr(batch, name, value)
        self.done.update(numbers)

    def _append(self, texts: Sequence[bytes], starts: Sequence[int]) -> None:
        """Writes at the recorded ends of the files."""
        for path, text, start in zip(self._paths, texts, starts, strict=True):
            if not text:
                continue
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.seek(start)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if not start:
                sync_folder(path.parent)


def _resolve(entries: Sequence[tuple[OutputLine, asyncio.Future[None]]], error: Exception | None) -> None:
    for _, written in entries:
        if written.done():
            continue
        if error is None:
            written.set_result(None)
        else:
            written.set_exception(error)


def response_line(name: str, number: int, custom_id: str, response: RouteResponse) -> OutputLine:
    """Returns the output line of a response. `name`: id of the line in the output."""
    is_error = response.status >= 400
    head = _as_json({"status_code": response.status, "request_id": response.request_id})
    if response.is_json:
        text = _output_line(name, custom_id, b'%b,"body":%b}' % (head[:-1], response.body), b"null")
        return OutputLine(number, text, is_error, response.num_tokens, response.model)
    error = LineError("unsupported_answer", "The response is not JSON; use float or base64.", "encoding_format")
    return error_line(name, number, custom_id, error)


def error_line(name: str, number: int, custom_id: str, error: LineError) -> OutputLine:
    """Returns the line of a request without a response."""
    return OutputLine(number, _output_line(name, custom_id, b"null", _as_json(error)), is_error=True)


def _output_line(name: str, custom_id: str, response: bytes, error: bytes) -> bytes:
    names = _as_json({"id": name, "custom_id": custom_id})
    return b'%b,"response":%b,"error":%b}\n' % (names[:-1], response, error)


def _as_json(value: dict[str, Any] | LineError) -> bytes:
    return msgspec.json.encode(value)
