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
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from penstock.engine.protocol.errors import StorageError, drop_tracebacks

from .database import BatchDatabase
from .file_store import FileStore
from .input_lines import BatchInput, CheckResult, LineSpan
from .internal_client import RouteResponse
from .line_limiter import LineLimiter
from .output_writer import RETRY_S, OutputLine, OutputWriter, error_line, response_line
from .records import CHECK_LINE, BatchRecord, BatchStatus, LineError, already_ended_error

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
SendRequest = Callable[[str, bytes, str, str], Awaitable[RouteResponse]]
"""Sends a request to a route. Arguments: path, JSON body, owner, request id."""

RETRY_STATUSES: Final = frozenset({429, 503, 504})
"""Statuses of a server that is full or starting, or has exceeded a deadline. The line runs again later."""
_KEY_REVOKED: Final = 401
"""Status if the owner's API key is no longer valid. The batch ends."""
_MAX_LOSSES: Final = 3
"""Attempts of a line that exceeds the server's deadline or loses its engine, before it fails."""
MAX_CRASHES: Final = 2
"""Number of kills of the server while a line runs alone, or a file is checked, before the line or batch fails."""
_MAX_REJECTED: Final = 16
"""Maximum number of rejected lines that wait. At this number the batch starts no other lines."""
_MIN_WAIT_S: Final = 0.5
_MAX_WAIT_S: Final = 30.0
_NOT_RUN: Final = {
    BatchStatus.FAILED: LineError("batch_failed", "The batch failed before this request was answered."),
    BatchStatus.CANCELLED: LineError("batch_cancelled", "The batch was cancelled before this request was answered."),
    BatchStatus.EXPIRED: LineError("batch_expired", "The completion window was over before this request was answered."),
}
_CRASHED: Final = LineError(
    "server_crashed",
    f"The server was killed {MAX_CRASHES} times while it answered this request alone, for example for lack of memory. "
    "Send less in one request.",
)


class _KeyRevokedError(Exception):
    """The API key of the owner of a batch is not valid any more."""


@dataclass(frozen=True, slots=True, eq=False)
class RunContext:
    """State that all runs share.

    Attributes:
        num_lines: Lines with a response ("completed") and with an error ("failed") since the start.
        file_lock: Lock for checking a file or reading its custom ids: one file at a time.
        isolation_lock: Lock: one suspected line or file check at a time. A line or check is suspected if it ran when
            the engine or the server died. If it dies again, the line or check is the cause.
        now: Unix time.
        retry_s: Seconds between two attempts to use a failing disk.
    """

    store: BatchDatabase
    files: FileStore
    send: SendRequest
    limiter: LineLimiter
    num_lines: Counter[str] = field(default_factory=Counter)
    file_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    isolation_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    now: Callable[[], float] = time.time
    retry_s: float = RETRY_S


class BatchRun:
    """Runs one batch. Used by one event loop.

    If the server was killed, lines up to `last_started` run one at a time, because one of them may be the cause.
    """

    def __init__(self, batch: BatchRecord, input_file: BatchInput, context: RunContext) -> None:
        self.batch = batch
        self._input = input_file
        self._context = context
        paths = context.files.path(batch.output_id), context.files.path(batch.error_id)
        self._output = OutputWriter(batch, context.store, *paths, retry_s=context.retry_s)
        self._last_suspect = batch.last_started
        has_suspects = bool(batch.last_started or batch.num_crashes) or batch.lone_line is not None
        self._has_passed_suspects = not has_suspects
        self._lone_lines: set[int] = set()  # running lines that may have killed the server
        self._rejected_lines: set[int] = set()
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._cancelled = asyncio.Event()
        if batch.status is BatchStatus.CANCELLING:
            self._cancelled.set()

    @property
    def may_have_crashed_server(self) -> bool:
        """Whether a line without a response may have killed the server."""
        return bool(self._lone_lines) or not self._has_passed_suspects

    async def run(self) -> None:
        """Runs the batch to its end. After a cancellation of this task, another run can continue."""
        try:
            ending = await self._run_or_fail()
        finally:
            await self._output.close()
        await self._finish(ending)

    async def record_clean_stop(self) -> None:
        """Records after the end of `run` that the server was not killed. Raises StorageError."""
        if self.batch.has_ended or self.batch.errors:  # the end is not stored yet: the next run repeats it
            return
        self.batch.lone_line = None
        if not self.may_have_crashed_server:
            self.batch.last_started = 0
        await self._context.store.save(self.batch)

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
            raise already_ended_error(batch)

    async def _run_or_fail(self) -> BatchStatus:
        """Runs the batch. Records errors in it."""
        batch = self.batch
        try:
            return await self._run()
        except FileNotFoundError as error:  # the lines without a response are unknown
            drop_tracebacks(error)
            batch.errors.append(LineError("file_not_found", "The input file does not exist any more.", "input_file_id"))
        except Exception as error:  # a bug: the batch fails, and the others go on
            logger.exception("%s failed", batch.id)
            drop_tracebacks(error)
            message = f"The server failed ({type(error).__name__}); see its log."
            batch.errors.append(LineError("server_error", message))
            if batch.num_lines:
                try:
                    await self._write_missing_lines(_NOT_RUN[BatchStatus.FAILED])
                except Exception as second_error:  # the batch still ends as failed
                    logger.exception("the lines of %s without a response cannot be written", batch.id)
                    drop_tracebacks(second_error)
        return BatchStatus.FAILED

    async def _run(self) -> BatchStatus:
        """Runs the batch up to its end and returns its final status."""
        batch = self.batch
        await self._retry_disk(self._output.open)
        if batch.lone_line is not None:
            if batch.lone_line not in self._output.done:
                batch.num_crashes[batch.lone_line] = batch.num_crashes.get(batch.lone_line, 0) + 1
            batch.lone_line = None
            await self._save()
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
                    await self._write_missing_lines(_NOT_RUN[ending])
                return ending
            self._set_status(BatchStatus.FINALIZING)
            await self._save()
        return BatchStatus.COMPLETED

    async def _check(self) -> CheckResult:
        """Checks the input file. If the server was killed during an earlier check, holds `isolation_lock`.

        Raises OSError or StorageError. Other files are checked before the next try.
        """
        num_crashes = self.batch.num_crashes.get(CHECK_LINE, 0)
        if num_crashes >= MAX_CRASHES:
            message = f"The server was killed {MAX_CRASHES} times while it checked this file; send shorter lines."
            return CheckResult(0, [LineError("server_crashed", message)])
        async with self._context.isolation_lock if num_crashes else contextlib.nullcontext(), self._context.file_lock:
            await self._set_lone_line(CHECK_LINE)
            try:
                result = await asyncio.to_thread(self._input.check)
                self.batch.num_crashes.pop(CHECK_LINE, None)
                return result
            finally:
                await self._set_lone_line(None)

    async def _set_lone_line(self, number: int | None) -> None:
        self.batch.lone_line = number
        await self._output.save_batch()

    async def _run_lines(self) -> BatchStatus:
        """Runs lines until all have a response or the batch is cancelled or expires. Returns the final status."""
        starting = asyncio.create_task(self._start_lines())
        cancelled = asyncio.create_task(self._cancelled.wait())
        try:
            remaining_s = self.batch.expires_at - self._context.now()  # may be negative
            await asyncio.wait({starting, cancelled}, timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
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
            await self._output.wait_idle()

    async def _start_lines(self) -> None:
        """Starts the lines as the limiter admits them. Returns when all have a response."""
        if self._cancelled.is_set():
            return
        failure: Exception | None = None
        try:
            async with asyncio.TaskGroup() as running, contextlib.aclosing(self._lines_to_run()) as slices:
                async for spans in slices:
                    last = spans[-1].number
                    if last > self._last_suspect:
                        self.batch.last_started = last
                        await self._save()
                    for span in spans:
                        await self._may_start.wait()
                        await self._context.limiter.acquire(span.num_bytes)
                        self._start_line(running, span)
        except ExceptionGroup as group:
            failure = group.exceptions[0]
            drop_tracebacks(group)  # TaskGroup of Python 3.11 leaves a reference cycle with the group
        if failure is not None:  # raised outside the handler: otherwise the group is its context, again a cycle
            raise failure

    def _start_line(self, running: asyncio.TaskGroup, span: LineSpan) -> None:
        runs_alone = span.number <= self._last_suspect or span.number in self.batch.num_crashes
        if runs_alone:
            self._lone_lines.add(span.number)
        else:
            self._has_passed_suspects = True

        def release(_: asyncio.Task[None]) -> None:
            self._context.limiter.release(span.num_bytes)

        running.create_task(self._run_line(span, runs_alone=runs_alone)).add_done_callback(release)

    async def _lines_to_run(self) -> AsyncGenerator[list[LineSpan], None]:
        """Yields lists of spans of lines without a response. Retries if the disk fails."""
        last: LineSpan | None = None

        async def read() -> list[LineSpan]:
            return await asyncio.to_thread(self._input.next_spans, self._output.done, last)

        while spans := await self._retry_disk(read):
            last = spans[-1]
            yield spans

    async def _run_line(self, span: LineSpan, *, runs_alone: bool) -> None:
        """Runs a line until it has a response. Returns when that is on the disk."""
        if self.batch.num_crashes.get(span.number, 0) >= MAX_CRASHES:
            logger.error("line %d of %s is not run: the server was killed with it", span.number, self.batch.id)
            async with self._context.limiter.released(span.num_bytes):
                ((number, custom_id),) = await self._retry_disk(lambda: self._custom_ids([span]))
            output = error_line(self._name(number), number, custom_id, _CRASHED)
        else:
            output = await self._response_line(span, runs_alone=runs_alone)
        with self._context.limiter.count_response(len(output.text)):
            await self._add(output)
        self._lone_lines.discard(span.number)
        self.batch.num_crashes.pop(span.number, None)
        if self.batch.lone_line == span.number:
            self.batch.lone_line = None

    async def _add(self, output: OutputLine) -> None:
        await self._output.add(output)
        self._context.num_lines["failed" if output.is_error else "completed"] += 1

    async def _response_line(self, span: LineSpan, *, runs_alone: bool) -> OutputLine:
        """Sends a line until the response is final, and returns the output. A line that waits is not in memory."""
        num_responses = num_losses = 0
        may_kill_engine = False
        with contextlib.ExitStack() as rejected:
            while True:
                async with self._context.isolation_lock if runs_alone or may_kill_engine else contextlib.nullcontext():
                    result = await self._send(span, runs_alone=runs_alone)
                wait_s = self._context.retry_s
                if result is not None:
                    custom_id, response = result
                    if response.status == _KEY_REVOKED:
                        raise _KeyRevokedError
                    num_responses += 1
                    engine_died = response.status == 503 and response.reached_engine
                    may_kill_engine = may_kill_engine or engine_died
                    num_losses += engine_died or response.status == 504
                    if response.status not in RETRY_STATUSES or num_losses == _MAX_LOSSES:
                        return response_line(self._name(span.number), span.number, custom_id, response)
                    self._context.limiter.reject()
                    wait_s = _retry_delay_s(response, num_responses)
                if span.number not in self._rejected_lines:
                    rejected.enter_context(self._rejected_line(span.number))
                async with self._context.limiter.released(span.num_bytes):  # other lines may use another model
                    await asyncio.sleep(wait_s)

    @contextlib.contextmanager
    def _rejected_line(self, number: int) -> Iterator[None]:
        """Starts no other lines while _MAX_REJECTED rejected lines wait."""
        self._rejected_lines.add(number)
        if len(self._rejected_lines) >= _MAX_REJECTED:
            self._may_start.clear()
        try:
            yield
        finally:
            self._rejected_lines.discard(number)
            if len(self._rejected_lines) < _MAX_REJECTED:
                self._may_start.set()

    async def _send(self, span: LineSpan, *, runs_alone: bool) -> tuple[str, RouteResponse] | None:
        """Returns the custom id of a line and the response of the route; None if the line cannot be read now."""
        try:
            return await self._read_and_send(span, runs_alone=runs_alone)
        except Exception as error:  # logged here, because the caller does not know the line
            logger.exception("line %d of %s failed", span.number, self.batch.id)
            drop_tracebacks(error)
            raise
        except asyncio.CancelledError as error:
            drop_tracebacks(error)
            raise

    async def _read_and_send(self, span: LineSpan, *, runs_alone: bool) -> tuple[str, RouteResponse] | None:
        batch = self.batch
        name = self._name(span.number)
        try:
            custom_id, content = await _on_thread(lambda: self._input.read(span))
        except FileNotFoundError:
            raise
        except OSError as error:
            self._log_disk_error(error)
            return None
        if runs_alone:
            await self._retry_disk(partial(self._set_lone_line, span.number))
        with self._context.limiter.run():
            response = await self._context.send(batch.endpoint, content, batch.owner, name)
        if runs_alone and response.status in RETRY_STATUSES:
            await self._retry_disk(partial(self._set_lone_line, None))
        return custom_id, response

    async def _write_missing_lines(self, error: LineError) -> None:
        async for spans in self._lines_to_run():
            named = await self._retry_disk(partial(self._custom_ids, spans))
            outputs = [error_line(self._name(number), number, custom_id, error) for number, custom_id in named]
            await asyncio.gather(*map(self._add, outputs))

    async def _custom_ids(self, spans: list[LineSpan]) -> list[tuple[int, str]]:
        """Reads numbers and custom ids of lines. Only one line of all batches is in memory at a time."""
        async with self._context.file_lock:
            return await _on_thread(lambda: self._input.custom_ids(spans))

    async def _finish(self, status: BatchStatus) -> None:
        batch = self.batch
        files = self._context.files
        output_files = [
            files.output_record(file_id, batch.owner, f"{batch.id}_{name}.jsonl", num_bytes, batch.output_expires_s)
            for name, file_id, num_bytes in batch.output_files
            if num_bytes
        ]
        await self._retry_disk(self._truncate_outputs)
        self._set_status(status)
        await self._retry_disk(lambda: self._context.store.end(batch, output_files))
        counts = batch.num_lines, batch.num_completed, batch.num_failed
        logger.info("%s is %s: %d lines, %d answered, %d with an error", batch.id, status, *counts)

    async def _truncate_outputs(self) -> None:
        for _, file_id, num_bytes in self.batch.output_files:
            await asyncio.to_thread(self._context.files.truncate, file_id, num_bytes)

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


def _retry_delay_s(response: RouteResponse, num_responses: int) -> float:
    """Returns the seconds until a rejected line runs again: exponential backoff, at least Retry-After, with jitter."""
    retry_after_s = float(response.headers.get(b"retry-after", b"1"))
    delay_s = min(max(retry_after_s, _MIN_WAIT_S * 2.0 ** min(num_responses, 10)), _MAX_WAIT_S)
    return delay_s * random.uniform(1.0, 1.25)  # noqa: S311 - no secret
