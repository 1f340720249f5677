"""Runs one batch, from validation to the end. Every status change is in the database before it takes effect.

    validating -> in_progress -> finalizing -> completed
        |              +-> cancelling -> cancelled
        +-> failed     +-> expired

After a restart a run continues: lines with a response do not run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from penstock.engine.protocol.errors import StorageError, drop_tracebacks

from .file_store import Files
from .input_lines import BatchInput, CheckResult, LineSpan
from .internal_client import RouteResponse
from .output_writer import RETRY_S, OutputLine, OutputWriter, error_line, response_line
from .records import BatchRecord, BatchStatus, LineError, already_ended
from .store import Crashes, Store
from .window import Window

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
SendRequest = Callable[[str, bytes, str, str], Awaitable[RouteResponse]]
"""Sends a request to a route. Arguments: path, JSON body, owner, request id."""

RETRY_STATUSES: Final = frozenset({429, 503, 504})
"""Statuses of a server that is full or starting, or has exceeded a deadline. The line runs again later."""
_KEY_REVOKED: Final = 401
"""Status if the owner's API key is no longer valid. The batch ends."""
_MOST_LOSSES: Final = 3
"""Attempts of a line that exceeds the server's deadline or loses its engine, before it fails."""
MOST_CRASHES: Final = 2
"""Number of kills of the server while a line runs alone, or a file is checked, before the line or batch fails."""
_MAX_REJECTED: Final = 16
"""Maximum number of rejected lines that wait. At this number the batch starts no other lines."""
_CHECK_LINE: Final = 0
"""Line number that stands for the check of the input file in the crash counts of the store."""
_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 30.0
_NOT_RUN: Final = {
    BatchStatus.FAILED: LineError("batch_failed", "The batch failed before this request was answered."),
    BatchStatus.CANCELLED: LineError("batch_cancelled", "The batch was cancelled before this request was answered."),
    BatchStatus.EXPIRED: LineError("batch_expired", "The completion window was over before this request was answered."),
}
_CRASHED: Final = LineError(
    "server_crashed",
    f"The server was killed {MOST_CRASHES} times while it answered this request alone, for example for lack of memory. "
    "Send less in one request.",
)


@dataclass(frozen=True, slots=True, eq=False)
class RunContext:
    """State that all runs share.

    Attributes:
        store: Records of batches.
        files: Input and output files.
        send: Sends requests to routes.
        window: Decides when lines run.
        num_lines: Lines with a response ("completed") and with an error ("failed") since the start.
        checking: Lock that is held while a file is checked or its custom ids are read: one file at a time.
        suspect: Lock of a line, or of the check of a file, that was running when the engine or the server died. It
            runs alone: if the engine or the server dies again, it is the cause.
        now: Unix time.
        retry_s: Seconds between two attempts to use a failing disk.
    """

    store: Store
    files: Files
    send: SendRequest
    window: Window
    num_lines: Counter[str] = field(default_factory=Counter)
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)
    suspect: asyncio.Lock = field(default_factory=asyncio.Lock)
    now: Callable[[], float] = time.time
    retry_s: float = RETRY_S


class BatchRun:
    """Runs one batch. Used by one event loop.

    Args:
        batch: Its record.
        input_file: Its lines.
        context: State shared with other runs.
        crashes: Its lines that ran when the server was killed; None after a clean stop.
    """

    def __init__(
        self, batch: BatchRecord, input_file: BatchInput, context: RunContext, crashes: Crashes | None = None
    ) -> None:
        self.batch = batch
        self._input = input_file
        self._context = context
        paths = context.files.path(batch.output_id), context.files.path(batch.error_id)
        self._output = OutputWriter(batch, context.store, *paths, retry_s=context.retry_s)
        self._crashes = crashes or Crashes(0, {})
        self._has_passed_suspects = crashes is None
        self._suspects: set[int] = set()  # running lines that may have killed the server
        self._num_rejected = 0
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._cancelled = asyncio.Event()
        if batch.status is BatchStatus.CANCELLING:
            self._cancelled.set()

    @property
    def has_suspects(self) -> bool:
        """Whether a line without a response may have killed the server."""
        return bool(self._suspects) or not self._has_passed_suspects

    async def run(self) -> None:
        """Runs the batch to its end. After a cancellation of this task, another run can continue."""
        try:
            ending = await self._run_or_fail()
        finally:
            await self._output.close()
        await self._finish(ending)

    async def cancel(self) -> None:
        """Starts to cancel the batch.

        Raises:
            ConflictError: The batch has ended.
            StorageError: The disk failed. The batch is cancelled in memory.
        """
        batch = self.batch
        if batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            self._set_status(BatchStatus.CANCELLING)
            self._cancelled.set()
            await self._output.save_batch()
        elif batch.status is not BatchStatus.CANCELLING:
            raise already_ended(batch)

    async def _run_or_fail(self) -> BatchStatus:
        """Runs the batch. Records errors in it."""
        batch = self.batch
        try:
            return await self._run()
        except FileNotFoundError as error:  # the lines without a response are unknown
            drop_tracebacks(error)
            batch.errors.append(LineError("file_not_found", "The input file does not exist any more.", "input_file_id"))
        except Exception as error:
            logger.exception("%s failed", batch.id)
            drop_tracebacks(error)
            message = f"The server failed ({type(error).__name__}); see its log."
            batch.errors.append(LineError("server_error", message))
            if batch.num_lines:
                try:
                    await self._write_unanswered(_NOT_RUN[BatchStatus.FAILED])
                except Exception as second_error:
                    logger.exception("the unanswered lines of %s cannot be listed", batch.id)
                    drop_tracebacks(second_error)
        return BatchStatus.FAILED

    async def _run(self) -> BatchStatus:
        """Runs the batch up to its end and returns its final status."""
        batch = self.batch
        await self._retry_disk(self._output.open)
        if not batch.num_lines and batch.status is BatchStatus.VALIDATING:
            checked = await self._retry_disk(self._check)
            batch.errors = checked.errors
            if batch.errors:
                return BatchStatus.FAILED
            batch.num_lines = checked.num_lines
            if batch.status is BatchStatus.VALIDATING:  # otherwise it was cancelled meanwhile
                self._set_status(BatchStatus.IN_PROGRESS)
            await self._save()
        if batch.status is not BatchStatus.FINALIZING:
            ending = await self._run_lines()
            if ending is not BatchStatus.COMPLETED:
                if batch.num_lines:
                    await self._write_unanswered(_NOT_RUN[ending])
                return ending
            self._set_status(BatchStatus.FINALIZING)
            await self._save()
        return BatchStatus.COMPLETED

    async def _check(self) -> CheckResult:
        """Checks the input file. If the server was killed during the check, no suspect line runs beside it.

        Raises OSError or StorageError. Other files are checked before the next try.
        """
        store, batch_id = self._context.store, self.batch.id
        num_crashes = self._crashes.lines.get(_CHECK_LINE, 0)
        if num_crashes >= MOST_CRASHES:
            message = f"The server was killed {MOST_CRASHES} times while it checked this file; send shorter lines."
            return CheckResult(0, [LineError("server_crashed", message)])
        async with self._context.suspect if num_crashes else contextlib.nullcontext(), self._context.checking:
            await store.begin_lone_line(batch_id, _CHECK_LINE)
            try:
                return await asyncio.to_thread(self._input.check)
            finally:
                await store.end_lone_line(batch_id, _CHECK_LINE)

    async def _run_lines(self) -> BatchStatus:
        """Runs lines until all have a response or the batch is cancelled or expires. Returns the final status."""
        starting = asyncio.create_task(self._start_lines())
        cancelled = asyncio.create_task(self._cancelled.wait())
        try:
            left_s = max(self.batch.expires_at - self._context.now(), 0.0)
            await asyncio.wait({starting, cancelled}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if self._cancelled.is_set():
                return BatchStatus.CANCELLED
            if not starting.done():
                return BatchStatus.EXPIRED
            try:
                await starting
            except _KeyRevokedError as error:
                drop_tracebacks(error)
                message = "The API key that made this batch is not valid any more."
                self.batch.errors.append(LineError("invalid_api_key", message))
                self._set_status(BatchStatus.CANCELLING)
                await self._save()
                return BatchStatus.CANCELLED
            return BatchStatus.COMPLETED
        finally:
            starting.cancel()
            cancelled.cancel()
            await asyncio.gather(starting, cancelled, return_exceptions=True)
            await self._output.settle()

    async def _start_lines(self) -> None:
        """Starts the lines as the window admits them. Returns when all have a response."""
        if self._cancelled.is_set():
            return
        store, batch_id = self._context.store, self.batch.id
        failure: Exception | None = None
        try:
            async with asyncio.TaskGroup() as running, contextlib.aclosing(self._lines_to_run()) as slices:
                async for places in slices:
                    last = places[-1].number
                    if last > self._crashes.until:
                        await self._retry_disk(partial(store.begin_lines, batch_id, last))
                    for place in places:
                        await self._may_start.wait()
                        await self._context.window.enter(place.num_bytes)
                        self._start_line(running, place)
        except ExceptionGroup as group:
            failure = group.exceptions[0]
            drop_tracebacks(group)  # TaskGroup of Python 3.11 leaves a reference cycle with the group
        if failure is not None:  # raised outside the handler: otherwise the group is its context, again a cycle
            raise failure

    def _start_line(self, running: asyncio.TaskGroup, place: LineSpan) -> None:
        """Starts the task of an admitted line."""
        is_suspect = place.number <= self._crashes.until or place.number in self._crashes.lines
        if is_suspect:
            self._suspects.add(place.number)
        else:
            self._has_passed_suspects = True

        def leave(_: asyncio.Task[None]) -> None:
            self._context.window.leave(place.num_bytes)

        running.create_task(self._run_line(place, is_suspect=is_suspect)).add_done_callback(leave)

    async def _lines_to_run(self) -> AsyncGenerator[list[LineSpan], None]:
        """Yields lists of places of lines without a response. Retries if the disk fails."""
        last: LineSpan | None = None

        async def read() -> list[LineSpan]:
            return await asyncio.to_thread(self._input.next_spans, self._output.done, last)

        while places := await self._retry_disk(read):
            last = places[-1]
            yield places

    async def _run_line(self, place: LineSpan, *, is_suspect: bool) -> None:
        """Runs a line until it has a response. Returns when that is on the disk."""
        if self._crashes.lines.get(place.number, 0) >= MOST_CRASHES:
            logger.error("line %d of %s is not run: the server was killed with it", place.number, self.batch.id)
            async with self._context.window.outside(place.num_bytes):
                ((number, custom_id),) = await self._retry_disk(lambda: self._custom_ids([place]))
            answer = error_line(self._name(number), number, custom_id, _CRASHED)
        else:
            answer = await self._response_line(place, is_suspect=is_suspect)
        with self._context.window.hold_response(len(answer.text)):
            await self._add(answer)
        self._suspects.discard(place.number)

    async def _add(self, answer: OutputLine) -> None:
        await self._output.add(answer)
        self._context.num_lines["failed" if answer.is_error else "completed"] += 1

    async def _response_line(self, place: LineSpan, *, is_suspect: bool) -> OutputLine:
        """Sends a line, repeatedly if the server is full or starting, and returns the output.

        A waiting line is not in memory.
        """
        num_tries, num_losses, may_kill_engine, was_rejected = 0, 0, False, False
        try:
            while True:
                async with self._context.suspect if is_suspect or may_kill_engine else contextlib.nullcontext():
                    result = await self._send(place, is_suspect=is_suspect)
                if result is None:
                    wait_s = self._context.retry_s
                else:
                    custom_id, answer = result
                    if answer.status == _KEY_REVOKED:
                        raise _KeyRevokedError
                    num_tries += 1
                    was_lost = answer.status == 503 and answer.reached_engine
                    may_kill_engine = may_kill_engine or was_lost
                    num_losses += was_lost or answer.status == 504
                    if answer.status not in RETRY_STATUSES or num_losses == _MOST_LOSSES:
                        return response_line(self._name(place.number), place.number, custom_id, answer)
                    self._context.window.reject()
                    least_s = float(answer.headers.get(b"retry-after", b"1"))
                    wait_s = min(max(least_s, _FIRST_WAIT_S * 2.0 ** min(num_tries, 10)), _LONGEST_WAIT_S)
                    wait_s *= random.uniform(1.0, 1.25)  # noqa: S311 - no secret
                if not was_rejected:
                    was_rejected = True
                    self._add_rejected(1)
                async with self._context.window.outside(place.num_bytes):  # other lines may use another model
                    await asyncio.sleep(wait_s)
        finally:
            if was_rejected:
                self._add_rejected(-1)

    def _add_rejected(self, change: int) -> None:
        self._num_rejected += change
        if self._num_rejected < _MAX_REJECTED:
            self._may_start.set()
        else:
            self._may_start.clear()

    async def _send(self, place: LineSpan, *, is_suspect: bool) -> tuple[str, RouteResponse] | None:
        """Returns the custom id of a line and the response of the route; None if the disk cannot read the line now."""
        try:
            return await self._read_and_send(place, is_suspect=is_suspect)
        except Exception as error:
            logger.exception("line %d of %s failed", place.number, self.batch.id)
            drop_tracebacks(error)
            raise
        except asyncio.CancelledError as error:
            drop_tracebacks(error)
            raise

    async def _read_and_send(self, place: LineSpan, *, is_suspect: bool) -> tuple[str, RouteResponse] | None:
        batch, store, name = self.batch, self._context.store, self._name(place.number)
        try:
            custom_id, content = await _on_thread(lambda: self._input.read(place))
        except FileNotFoundError:
            raise
        except OSError as error:
            self._log_disk_error(error)
            return None
        if is_suspect:
            await self._retry_disk(lambda: store.begin_lone_line(batch.id, place.number))
        with self._context.window.run():
            answer = await self._context.send(batch.endpoint, content, batch.owner, name)
        if is_suspect and answer.status in RETRY_STATUSES:
            await self._retry_disk(lambda: store.end_lone_line(batch.id, place.number))
        return custom_id, answer

    async def _write_unanswered(self, error: LineError) -> None:
        """Writes an error for each line without a response."""
        async for places in self._lines_to_run():
            named = await self._retry_disk(partial(self._custom_ids, places))
            answers = [error_line(self._name(number), number, custom_id, error) for number, custom_id in named]
            await asyncio.gather(*map(self._add, answers))

    async def _custom_ids(self, places: list[LineSpan]) -> list[tuple[int, str]]:
        """Reads numbers and custom ids of lines. Only one line of all batches is in memory at a time."""
        async with self._context.checking:
            return await _on_thread(lambda: self._input.custom_ids(places))

    async def _finish(self, status: BatchStatus) -> None:
        """Stores the final status and the output files."""
        batch, files = self.batch, self._context.files
        made = [
            files.output_record(file_id, batch.owner, f"{batch.id}_{name}.jsonl", num_bytes, batch.output_expires_s)
            for name, file_id, num_bytes in batch.written
            if num_bytes
        ]
        await self._retry_disk(self._cut)
        self._set_status(status)
        await self._retry_disk(lambda: self._context.store.end(batch, made))
        counts = batch.num_lines, batch.num_completed, batch.num_failed
        logger.info("%s is %s: %d lines, %d answered, %d with an error", batch.id, status, *counts)

    async def _cut(self) -> None:
        for _, file_id, num_bytes in self.batch.written:
            await asyncio.to_thread(self._context.files.cut, file_id, num_bytes)

    async def _save(self) -> None:
        await self._retry_disk(self._output.save_batch)

    async def _retry_disk(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Repeats `work` until the disk can do it. Raises FileNotFoundError."""
        while True:
            try:
                return await work()
            except FileNotFoundError:
                raise
            except (OSError, StorageError) as error:
                self._log_disk_error(error)
            await asyncio.sleep(self._context.retry_s)

    def _log_disk_error(self, error: Exception) -> None:
        logger.error("%s waits for the disk: %s", self.batch.id, error)
        drop_tracebacks(error)

    def _set_status(self, status: BatchStatus) -> None:
        self.batch.set_status(status, int(self._context.now()))

    def _name(self, number: int) -> str:
        return f"batch_req_{self.batch.id.removeprefix('batch_')}_{number}"


async def _on_thread(work: Callable[[], Result]) -> Result:
    """Runs `work` on a thread. A cancellation takes effect after the work, which holds memory until then."""
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        running.exception()  # retrieved, so that asyncio does not log it
        raise


class _KeyRevokedError(Exception):
    """The API key of the owner of a batch is not valid any more."""
