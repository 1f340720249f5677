"""The answers of a batch on their way to the disk: an answer counts when it, and the fact that it is there, are safe.

Answers go to the end of the two files that the batch makes. Then the database notes, in one change, which lines they
are and how long the files are by now. What lies behind that length was written by a server that was killed before it
counted: it is cut off, and those lines run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from penstock.engine.client.own_files import sync_folder
from penstock.engine.protocol.errors import StorageError

from .records import Batch
from .store import Store

logger = logging.getLogger(__name__)

RETRY_S: Final = 5.0
"""Seconds until a disk that is full is tried again."""


class Answer(NamedTuple):
    """What became of a line.

    Attributes:
        line: Its number.
        text: The line of the output, with its end.
        is_error: It goes to the file of errors.
        num_tokens: Of its inputs.
        model: That answered; "" for none.
    """

    line: int
    text: bytes
    is_error: bool
    num_tokens: int = 0
    model: str = ""


class Journal:
    """Writes the answers of one batch, those that come meanwhile together. Belongs to one event loop.

    Args:
        batch: Its counts are those of what is safe.
        store: Keeps them.
        output: File of answers.
        errors: File of errors.
        retry_s: Seconds until a disk that refuses is tried again.
    """

    def __init__(
        self,
        batch: Batch,
        store: Store,
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
        self._storing = asyncio.Lock()  # what is stored later has been read later
        self._waiting: list[tuple[Answer, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Reads which lines are done."""
        self.done = await self._store.answered(self._batch.id)

    async def add(self, answer: Answer) -> None:
        """Returns when an answer is safe. While the disk refuses, it waits."""
        safe = asyncio.get_running_loop().create_future()
        self._waiting.append((answer, safe))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_waiting())
        await safe

    async def settle(self) -> None:
        """Returns when nothing is being written. Answers that nobody waits for any more are dropped."""
        if self._writing is not None:
            await self._writing

    async def close(self) -> None:
        """Ends: what is being written is finished, unless the disk refuses it."""
        self._closing.set()
        await self.settle()

    async def keep_batch(self) -> None:
        """Stores what the batch has become. Raises StorageError."""
        async with self._storing:
            await self._store.keep(self._batch)

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                entries, self._waiting = self._waiting, []
                await self._write(entries)
        finally:
            self._writing = None

    async def _write(self, entries: list[tuple[Answer, asyncio.Future[None]]]) -> None:
        is_told = False
        while entries := [entry for entry in entries if not entry[1].done()]:  # their lines may have been stopped
            try:
                await self._keep([answer for answer, _ in entries])
            except (OSError, StorageError) as error:
                if not is_told:
                    logger.error("%s waits, its answers cannot be written: %s", self._batch.id, error)
                    is_told = True
            except Exception as error:
                logger.exception("the answers of %s cannot be written", self._batch.id)
                _tell(entries, error)
                return
            else:
                _tell(entries, None)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._retry_s):
                    await self._closing.wait()
            if self._closing.is_set():
                return

    async def _keep(self, answers: Sequence[Answer]) -> None:
        """Writes answers, then counts them. Raises OSError or StorageError; then none of them counts."""
        batch = self._batch
        texts = [b"".join([a.text for a in answers if a.is_error is is_error]) for is_error in (False, True)]
        await asyncio.to_thread(self._append, texts, (batch.num_output_bytes, batch.num_error_bytes))
        num_failed = sum(answer.is_error for answer in answers)
        counted = {
            "num_output_bytes": batch.num_output_bytes + len(texts[0]),
            "num_error_bytes": batch.num_error_bytes + len(texts[1]),
            "num_failed": batch.num_failed + num_failed,
            "num_completed": batch.num_completed + len(answers) - num_failed,
            "num_tokens": batch.num_tokens + sum(answer.num_tokens for answer in answers),
            "model": batch.model or next((answer.model for answer in answers if answer.model), None),
        }
        lines = [answer.line for answer in answers]
        async with self._storing:
            await self._store.keep(msgspec.structs.replace(batch, **counted), lines)
            for name, value in counted.items():
                setattr(batch, name, value)
        self.done.update(lines)

    def _append(self, texts: Sequence[bytes], starts: Sequence[int]) -> None:
        """Writes behind what counts, in place of whatever lies there."""
        for path, text, start in zip(self._paths, texts, starts, strict=True):
            if not text:
                continue
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.truncate(start)
                file.seek(start)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if not start:
                sync_folder(path.parent)


def _tell(entries: Sequence[tuple[Answer, asyncio.Future[None]]], error: Exception | None) -> None:
    for _, safe in entries:
        if safe.done():
            continue
        if error is None:
            safe.set_result(None)
        else:
            safe.set_exception(error)
