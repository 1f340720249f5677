"""Files and batches of one application: operations for the routes, runs and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.engine.protocol.errors import (
    ConflictError,
    EngineOverloadedError,
    InvalidRequestError,
    StorageError,
    UnknownObjectError,
    drop_tracebacks,
)

from ..admission import ServerRejectionReason
from ..errors import quote
from ..routing import BatchUse
from ..schemas.batch_bodies import MAX_EXPIRY_S, MAX_HOURS, BatchRequest
from ..settings import ServerSettings
from .batch_run import BatchRun, RunContext
from .database import BatchDatabase, Page
from .file_store import DataDir, FileStore
from .input_lines import BatchInput
from .internal_client import InternalClient
from .line_limiter import ClientTraffic, LineLimiter
from .output_writer import RETRY_S
from .records import (
    BatchRecord,
    FileRecord,
    already_ended_error,
    new_batch_id,
    new_file_id,
)
from .upload import OVERHEAD_BYTES

logger = logging.getLogger(__name__)

MAX_UNFINISHED: Final = 32
"""Maximum number of unfinished batches of one owner."""
SWEEP_EVERY_S: Final = 60.0
_RETRY_AFTER_S: Final = 60.0
_FILES_PER_BATCH: Final = 2
"""Files of a batch: output and errors."""


class BatchService:
    """Files and batches in the data folder. Locks the folder until the end of `running`.

    Args:
        settings: `data_dir` and the limits. The limits of request bodies apply to lines.
        now: Unix time.
        retry_s: Seconds between two attempts to use a failing disk.

    Attributes:
        secret: Salt that turns API keys into owner ids.
        traffic: Running requests of clients.
        num_lines: Lines with a response ("completed") and with an error ("failed") since the start.
        num_ended: Batches that have ended since the start, by status.

    Raises:
        UsageError: Another server uses the folder, or it cannot be used.
    """

    def __init__(
        self, settings: ServerSettings, now: Callable[[], float] = time.time, retry_s: float = RETRY_S
    ) -> None:
        assert settings.data_dir is not None
        self._data = DataDir(settings.data_dir)
        try:
            self._store = BatchDatabase(self._data.database)
        except BaseException:  # unlock the folder, also after an interrupt
            self._data.close()
            raise
        self.secret = self._data.secret
        self.files = FileStore(self._data, self._store, int(settings.max_file_bytes), now, settings.max_files)
        self.traffic = ClientTraffic()
        self.num_lines: Counter[str] = Counter()
        self.num_ended: Counter[str] = Counter()
        self._settings = settings
        self._now = now
        self._retry_s = retry_s
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._context: RunContext | None = None
        self._batch_uses: Mapping[str, BatchUse] = {}
        # Lock that is held from a check of batches and files to the change that relies on it.
        self._changing = asyncio.Lock()

    @property
    def max_upload_bytes(self) -> int:
        """Maximum bytes of a request body with a file."""
        return self.files.max_bytes + OVERHEAD_BYTES

    @contextlib.asynccontextmanager
    async def running(self, routes: InternalClient) -> AsyncIterator[None]:
        """Runs batches through these routes, starting with the unfinished batches of an earlier server process."""
        limiter = LineLimiter(self.traffic, self._settings.batch_share, int(self._settings.batch_memory))
        self._batch_uses = routes.batch_uses
        self._context = RunContext(
            self._store,
            self.files,
            routes.send,
            limiter,
            num_lines=self.num_lines,
            now=self._now,
            retry_s=self._retry_s,
        )
        await self.files.remove_orphans()
        for batch in await self._store.unfinished_batches():
            logger.info("%s continues: %d of %d lines are done", batch.id, batch.num_done, batch.num_lines)
            if self._start(batch).may_have_crashed_server:
                logger.warning("the server was killed while lines of %s ran; they run one at a time now", batch.id)
        sweeping = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            runs = list(self._runs.values())
            tasks = [sweeping, *(task for _, task in runs)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for run, _ in runs:
                try:
                    await run.record_clean_stop()
                except StorageError as error:
                    logger.error("running lines will run one at a time after the next start: %s", error)
            await self._store.close()
            self._data.close()

    async def create(self, body: BatchRequest, owner: str) -> BatchRecord:
        """Creates a batch and starts it.

        Raises:
            UnknownObjectError: The owner has no such file.
            InvalidRequestError: Lines may not call the endpoint, or the file or the window is not valid.
            EngineOverloadedError: The owner has too many unfinished batches.
            HTTPException: 413 if the owner has too many files.
            StorageError: The disk is full or fails.
        """
        if body.endpoint not in self._batch_uses:
            known = ", ".join(self._batch_uses)
            message = f"endpoint is {quote(body.endpoint)}; lines of batches may call {known}."
            raise InvalidRequestError(message, param="endpoint")
        hours = int(body.completion_window.removesuffix("h"))
        if hours > MAX_HOURS:
            message = f"completion_window is {hours}h; it must be 1h to {MAX_HOURS}h."
            raise InvalidRequestError(message, param="completion_window")
        created_at = int(self._now())
        expiry = body.output_expires_after
        async with self._changing:
            file = await self.files.find(body.input_file_id, owner)
            if file.purpose != "batch":
                message = f"{file.id} has the purpose {file.purpose!r}; an input file has 'batch'."
                raise InvalidRequestError(message, param="input_file_id")
            num_unfinished = sum(run.batch.owner == owner for run, _ in self._runs.values())
            if num_unfinished >= MAX_UNFINISHED:
                message = f"{MAX_UNFINISHED} batches have not ended; wait for one of them."
                raise EngineOverloadedError(
                    message, retry_after_s=_RETRY_AFTER_S, reason=ServerRejectionReason.UNFINISHED_BATCHES
                )
            await self.files.check_num_files(owner, _FILES_PER_BATCH * (num_unfinished + 1))
            for old in await self._store.oldest_ended_batches(owner, self.files.max_files):
                if old.input_file_id != file.id:  # the input would be removed, too
                    await self._remove_batch(old)
            batch = BatchRecord(
                id=new_batch_id(),
                owner=owner,
                endpoint=body.endpoint,
                input_file_id=file.id,
                output_id=new_file_id(),
                error_id=new_file_id(),
                completion_window=body.completion_window,
                metadata=body.metadata,
                output_expires_s=min(MAX_EXPIRY_S if expiry is None else expiry.seconds, self._retention_s),
                created_at=created_at,
                expires_at=created_at + 3600 * hours,
            )
            await self._store.add_batch(batch)
            self._start(batch)
        return batch

    async def find(self, batch_id: str, owner: str) -> BatchRecord:
        """Returns a batch of an owner as stored. Raises UnknownObjectError."""
        batch = await self._store.batch(batch_id, owner)
        if batch is None:
            raise UnknownObjectError(f"There is no batch {quote(batch_id)}.", param="batch_id")
        return batch

    async def page(self, owner: str, page: Page) -> list[BatchRecord]:
        """Returns a page of the owner's batches, plus one if there are more."""
        return await self._store.batches(owner, page)

    async def page_of_files(self, owner: str, page: Page, purpose: str | None) -> list[FileRecord]:
        """Returns a page of the owner's files, plus one if there are more."""
        return await self._store.files(owner, page, purpose, int(self._now()))

    async def cancel(self, batch_id: str, owner: str) -> BatchRecord:
        """Starts to cancel a batch. Raises UnknownObjectError, ConflictError or StorageError."""
        batch = await self.find(batch_id, owner)
        if batch_id not in self._runs:
            raise already_ended_error(batch)
        run, _ = self._runs[batch_id]
        await run.cancel()
        return await self.find(batch_id, owner)

    async def remove_file(self, file_id: str, owner: str) -> None:
        """Removes a file. Raises UnknownObjectError, ConflictError or StorageError."""
        async with self._changing:
            file = await self.files.find(file_id, owner)
            if (batch_id := await self._store.batch_reading(file_id)) is not None:
                raise ConflictError(f"{batch_id} reads this file; cancel it, or wait for its end.", param="file_id")
            await self.files.remove(file)

    def num_unfinished(self) -> Mapping[str, int]:
        """Returns the number of unfinished batches by status."""
        return Counter(run.batch.status.value for run, _ in self._runs.values())

    @property
    def _retention_s(self) -> int:
        return int(self._settings.batch_retention_s)

    def _start(self, batch: BatchRecord) -> BatchRun:
        assert self._context is not None
        settings = self._settings
        path = self.files.path(batch.input_file_id)
        lines = BatchInput(
            path,
            batch.endpoint,
            settings.max_body_bytes,
            settings.max_json_values,
            counts_inputs=self._batch_uses.get(batch.endpoint) is BatchUse.EMBEDDING,
        )
        run = BatchRun(batch, lines, self._context)
        self._runs[batch.id] = run, asyncio.create_task(self._run(run))
        return run

    async def _run(self, run: BatchRun) -> None:
        try:
            await run.run()
            self.num_ended[run.batch.status.value] += 1
        except Exception as error:  # the task of a batch has no caller
            logger.exception("%s cannot be completed; the next start tries again", run.batch.id)
            drop_tracebacks(error)
        finally:
            del self._runs[run.batch.id]

    async def _sweep(self) -> None:
        while True:
            try:
                await self.sweep()
            except (OSError, StorageError) as error:
                logger.warning("expired files and batches could not be removed: %s", error)
            await asyncio.sleep(SWEEP_EVERY_S)

    async def sweep(self) -> None:
        """Removes ended batches after their retention, with their files, and expired files.

        Files of unfinished batches stay. Raises OSError or StorageError.
        """
        while old := await self._store.batches_ended_before(int(self._now()) - self._retention_s):
            for batch in old:
                async with self._changing:
                    await self._remove_batch(batch)
        for file in await self.files.expired():
            async with self._changing:
                if await self._store.batch_reading(file.id) is None:
                    await self.files.remove(file)
                    logger.info("%s has expired", file.id)

    async def _remove_batch(self, batch: BatchRecord) -> None:
        """Removes the records of an ended batch and of its files, then the files."""
        await self.files.remove_contents(await self._store.remove_batch(batch))
        logger.info("%s and its files have been removed", batch.id)


class BatchMetrics(Collector):
    """Prometheus metrics of batches."""

    def __init__(self, batches: BatchService) -> None:
        self._batches = batches

    def collect(self) -> Iterable[Metric]:
        """Returns the current metrics."""
        unfinished = GaugeMetricFamily("penstock_batches", "Batches that have not ended.", labels=("status",))
        for status, count in self._batches.num_unfinished().items():
            unfinished.add_metric((status,), count)
        ended = CounterMetricFamily("penstock_batches_ended", "Batches that have ended.", labels=("status",))
        for status, count in self._batches.num_ended.items():
            ended.add_metric((status,), count)
        lines = CounterMetricFamily(
            "penstock_batch_lines", "Lines of batches with a response, or with an error.", labels=("outcome",)
        )
        for outcome, count in self._batches.num_lines.items():
            lines.add_metric((outcome,), count)
        return (unfinished, ended, lines)
