"""One batch, from its check to its end. What it has become is in the database before anything relies on it.

    validating -> in_progress -> finalizing -> completed
        |              +-> cancelling -> cancelled
        +-> failed     +-> expired

A run goes on wherever a killed server has left it: lines that have been answered do not run again.
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

from .files import Files
from .input_lines import Checked, InputFile, LinePlace
from .journal import RETRY_S, Answer, Journal
from .output_lines import answered, unanswered
from .records import Batch, LineError, Status, ended
from .routes_inside import RouteAnswer
from .store import Crashes, Store
from .window import Window

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
AskRoute = Callable[[str, bytes, str, str], Awaitable[RouteAnswer]]
"""Asks a route: path, JSON body, owner, name of the request."""

TRY_AGAIN: Final = frozenset({429, 503, 504})
"""Statuses of a server that is full, starts, starts its engine again, or had no time: the line waits."""
_NO_KEY: Final = 401
"""Status of a line whose owner has lost the key: the batch ends."""
_MOST_LOSSES: Final = 3
"""Times that a line may run into the deadline of the server, or may be in an engine that dies."""
MOST_CRASHES: Final = 2
"""Times that the server may be killed while a line runs alone, or while a file is checked."""
_MOST_WAITING: Final = 16
"""Lines of a batch that were refused and have no answer yet. With so many, the batch begins no others."""
_CHECK: Final = 0
"""Stands for the check of the input file where the store counts crashes by line."""
_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 30.0
_UNANSWERED: Final = {
    Status.FAILED: LineError("batch_failed", "The batch failed before this request was answered."),
    Status.CANCELLED: LineError("batch_cancelled", "The batch was cancelled before this request was answered."),
    Status.EXPIRED: LineError("batch_expired", "The completion window was over before this request was answered."),
}
_CRASHED: Final = LineError(
    "server_crashed",
    f"The server was killed {MOST_CRASHES} times while it answered this request alone, for example for lack of memory. "
    "Send less in one request.",
)


@dataclass(frozen=True, slots=True, eq=False)
class Surroundings:
    """State that the runs of one application share.

    Attributes:
        store: Keeps batches.
        files: Has their lines, and gets their answers.
        ask: Asks a route.
        window: Says when.
        num_lines: Lines with an answer ("completed") and with an error ("failed") since the start.
        checking: Held while a file is checked, or read for its custom ids: one after the other.
        suspect: Held by a line, or by the check of a file, that was running when the engine or the server died: if
            that happens again, it is the cause.
        now: Unix time.
        retry_s: Seconds until a disk that refuses is tried again.
    """

    store: Store
    files: Files
    ask: AskRoute
    window: Window
    num_lines: Counter[str] = field(default_factory=Counter)
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)
    suspect: asyncio.Lock = field(default_factory=asyncio.Lock)
    now: Callable[[], float] = time.time
    retry_s: float = RETRY_S


class BatchRun:
    """The run of one batch. Belongs to one event loop.

    Args:
        batch: Its record.
        input_file: Its lines.
        around: State shared with other runs.
        crashes: Its lines that ran when the server was killed; None after a clean stop.
    """

    def __init__(
        self, batch: Batch, input_file: InputFile, around: Surroundings, crashes: Crashes | None = None
    ) -> None:
        self.batch = batch
        self._input = input_file
        self._around = around
        paths = around.files.path(batch.output_id), around.files.path(batch.error_id)
        self._journal = Journal(batch, around.store, *paths, retry_s=around.retry_s)
        self._crashes = crashes or Crashes(0, {})
        self._has_passed_suspects = crashes is None
        self._suspects: set[int] = set()  # lines under way that may have killed the server
        self._num_refused = 0
        self._may_feed = asyncio.Event()
        self._may_feed.set()
        self._cancelled = asyncio.Event()
        if batch.status is Status.CANCELLING:
            self._cancelled.set()

    @property
    def has_suspects(self) -> bool:
        """Whether a line without an answer may have killed the server."""
        return bool(self._suspects) or not self._has_passed_suspects

    async def run(self) -> None:
        """Runs it to its end. Cancelled, it stops where it is, and another run goes on from there."""
        try:
            ending = await self._run_or_fail()
        finally:
            await self._journal.close()
        await self._end(ending)

    async def cancel(self) -> None:
        """Begins to end it.

        Raises:
            ConflictError: It is at its end already.
            StorageError: The disk does not keep that; it ends all the same.
        """
        batch = self.batch
        if batch.status in (Status.VALIDATING, Status.IN_PROGRESS):
            self._become(Status.CANCELLING)
            self._cancelled.set()
            await self._journal.keep_batch()
        elif batch.status is not Status.CANCELLING:
            raise ended(batch)

    async def _run_or_fail(self) -> Status:
        """Does what `_run` does, and notes why it cannot."""
        batch = self.batch
        try:
            return await self._run()
        except FileNotFoundError as error:  # nobody can tell which lines it had
            drop_tracebacks(error)
            batch.errors.append(LineError("file_not_found", "The input file is gone.", "input_file_id"))
        except Exception as error:
            logger.exception("%s failed", batch.id)
            drop_tracebacks(error)
            message = f"The server failed ({type(error).__name__}); its log says why."
            batch.errors.append(LineError("server_error", message))
            if batch.num_lines:
                try:
                    await self._write_unanswered(_UNANSWERED[Status.FAILED])
                except Exception as second_error:
                    logger.exception("%s cannot tell which lines have no answer", batch.id)
                    drop_tracebacks(second_error)
        return Status.FAILED

    async def _run(self) -> Status:
        """Runs it until nothing is left but to end it, and returns how."""
        batch = self.batch
        await self._insist(self._journal.open)
        if not batch.num_lines and batch.status is Status.VALIDATING:
            checked = await self._insist(self._check)
            batch.errors = checked.errors
            if batch.errors:
                return Status.FAILED
            batch.num_lines = checked.num_lines
            if batch.status is Status.VALIDATING:  # not, where it has been cancelled meanwhile
                self._become(Status.IN_PROGRESS)
            await self._keep()
        if batch.status is not Status.FINALIZING:
            ending = await self._run_lines()
            if ending is not Status.COMPLETED:
                if batch.num_lines:
                    await self._write_unanswered(_UNANSWERED[ending])
                return ending
            self._become(Status.FINALIZING)
            await self._keep()
        return Status.COMPLETED

    async def _check(self) -> Checked:
        """Checks the input file. If the server was killed during the check, no suspect line runs beside it.

        Raises OSError or StorageError. Other files are checked before the next try.
        """
        store, batch_id = self._around.store, self.batch.id
        num_crashes = self._crashes.lines.get(_CHECK, 0)
        if num_crashes >= MOST_CRASHES:
            message = f"The server was killed {MOST_CRASHES} times while it checked this file; send shorter lines."
            return Checked(0, [LineError("server_crashed", message)])
        async with self._around.suspect if num_crashes else contextlib.nullcontext(), self._around.checking:
            await store.begin_suspect(batch_id, _CHECK)
            try:
                return await asyncio.to_thread(self._input.check)
            finally:
                await store.stop_suspect(batch_id, _CHECK)

    async def _run_lines(self) -> Status:
        """Runs lines until all are answered, or it is cancelled or expires; returns which."""
        feeding = asyncio.create_task(self._feed())
        cancelled = asyncio.create_task(self._cancelled.wait())
        try:
            left_s = max(self.batch.expires_at - self._around.now(), 0.0)
            await asyncio.wait({feeding, cancelled}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if self._cancelled.is_set():
                return Status.CANCELLED
            if not feeding.done():
                return Status.EXPIRED
            try:
                await feeding
            except _KeyLostError as error:
                drop_tracebacks(error)
                message = "The API key that made this batch is not valid any more."
                self.batch.errors.append(LineError("invalid_api_key", message))
                self._become(Status.CANCELLING)
                await self._keep()
                return Status.CANCELLED
            return Status.COMPLETED
        finally:
            feeding.cancel()
            cancelled.cancel()
            await asyncio.gather(feeding, cancelled, return_exceptions=True)
            await self._journal.settle()

    async def _feed(self) -> None:
        """Begins line after line, as the window lets them, and returns when all have been answered."""
        if self._cancelled.is_set():
            return
        store, batch_id = self._around.store, self.batch.id
        failure: Exception | None = None
        try:
            async with asyncio.TaskGroup() as running, contextlib.aclosing(self._lines_left()) as slices:
                async for places in slices:
                    last = places[-1].number
                    if last > self._crashes.until:
                        await self._insist(partial(store.begin_lines, batch_id, last))
                    for place in places:
                        await self._may_feed.wait()
                        await self._around.window.enter(place.num_bytes)
                        self._begin(running, place)
        except ExceptionGroup as group:
            failure = group.exceptions[0]
            drop_tracebacks(group)  # TaskGroup of Python 3.11 leaves a reference cycle with the group
        if failure is not None:  # not raised in the handler: the group would be its context, a cycle again
            raise failure

    def _begin(self, running: asyncio.TaskGroup, place: LinePlace) -> None:
        """Starts the task of a line that has entered the window."""
        is_suspect = place.number <= self._crashes.until or place.number in self._crashes.lines
        if is_suspect:
            self._suspects.add(place.number)
        else:
            self._has_passed_suspects = True

        def leave(_: asyncio.Task[None]) -> None:
            self._around.window.leave(place.num_bytes)

        running.create_task(self._answer(place, is_suspect=is_suspect)).add_done_callback(leave)

    async def _lines_left(self) -> AsyncGenerator[list[LinePlace], None]:
        """Yields the places of lines that have no answer, some at a time. A disk that refuses them is tried again."""
        last: LinePlace | None = None
        slices = self._input.slices(self._journal.done)

        async def read() -> list[LinePlace] | None:
            nonlocal slices
            try:
                return await asyncio.to_thread(next, slices, None)
            except OSError:
                slices = self._input.slices(self._journal.done, last)
                raise

        while places := await self._insist(read):
            last = places[-1]
            yield places

    async def _answer(self, place: LinePlace, *, is_suspect: bool) -> None:
        """Runs a line until it has an answer, and returns when that is safe."""
        if self._crashes.lines.get(place.number, 0) >= MOST_CRASHES:
            logger.error("line %d of %s is not run: the server was killed with it", place.number, self.batch.id)
            async with self._around.window.outside(place.num_bytes):
                ((number, custom_id),) = await self._insist(lambda: self._custom_ids([place]))
            answer = unanswered(self._name(number), number, custom_id, _CRASHED)
        else:
            answer = await self._answer_of(place, is_suspect=is_suspect)
        with self._around.window.answer(len(answer.text)):
            await self._add(answer)
        self._suspects.discard(place.number)

    async def _add(self, answer: Answer) -> None:
        await self._journal.add(answer)
        self._around.num_lines["failed" if answer.is_error else "completed"] += 1

    async def _answer_of(self, place: LinePlace, *, is_suspect: bool) -> Answer:
        """Returns the last answer of the route: while the server is full or starts, a line is tried again.

        A line that waits is not in memory.
        """
        num_tries, num_losses, may_kill_engine, was_refused = 0, 0, False, False
        try:
            while True:
                async with self._around.suspect if is_suspect or may_kill_engine else contextlib.nullcontext():
                    asked = await self._ask(place, is_suspect=is_suspect)
                if asked is None:
                    wait_s = self._around.retry_s
                else:
                    custom_id, answer = asked
                    if answer.status == _NO_KEY:
                        raise _KeyLostError
                    num_tries += 1
                    was_lost = answer.status == 503 and answer.was_taken
                    may_kill_engine = may_kill_engine or was_lost
                    num_losses += was_lost or answer.status == 504
                    if answer.status not in TRY_AGAIN or num_losses == _MOST_LOSSES:
                        return answered(self._name(place.number), place.number, custom_id, answer)
                    self._around.window.refuse()
                    least_s = float(answer.headers.get(b"retry-after", b"1"))
                    wait_s = min(max(least_s, _FIRST_WAIT_S * 2.0 ** min(num_tries, 10)), _LONGEST_WAIT_S)
                    wait_s *= random.uniform(1.0, 1.25)  # noqa: S311 - no secret
                if not was_refused:
                    was_refused = True
                    self._count_refused(1)
                async with self._around.window.outside(place.num_bytes):  # other lines may want another model
                    await asyncio.sleep(wait_s)
        finally:
            if was_refused:
                self._count_refused(-1)

    def _count_refused(self, change: int) -> None:
        self._num_refused += change
        if self._num_refused < _MOST_WAITING:
            self._may_feed.set()
        else:
            self._may_feed.clear()

    async def _ask(self, place: LinePlace, *, is_suspect: bool) -> tuple[str, RouteAnswer] | None:
        """Returns the custom id of a line and the answer of the route; None if the line cannot be read now."""
        try:
            return await self._read_and_ask(place, is_suspect=is_suspect)
        except Exception as error:
            logger.exception("line %d of %s failed", place.number, self.batch.id)
            drop_tracebacks(error)
            raise
        except asyncio.CancelledError as error:
            drop_tracebacks(error)
            raise

    async def _read_and_ask(self, place: LinePlace, *, is_suspect: bool) -> tuple[str, RouteAnswer] | None:
        batch, store, name = self.batch, self._around.store, self._name(place.number)
        try:
            line = await _on_thread(lambda: self._input.read(place))
        except FileNotFoundError:
            raise
        except OSError as error:
            self._log_disk(error)
            return None
        if is_suspect:
            await self._insist(lambda: store.begin_suspect(batch.id, place.number))
        with self._around.window.run():
            answer = await self._around.ask(batch.endpoint, line.content, batch.owner, name)
        if is_suspect and answer.status in TRY_AGAIN:
            await self._insist(lambda: store.stop_suspect(batch.id, place.number))
        return line.custom_id, answer

    async def _write_unanswered(self, error: LineError) -> None:
        """Writes an error for each line that has no answer."""
        async for places in self._lines_left():
            named = await self._insist(partial(self._custom_ids, places))
            answers = [unanswered(self._name(number), number, custom_id, error) for number, custom_id in named]
            await asyncio.gather(*map(self._add, answers))

    async def _custom_ids(self, places: list[LinePlace]) -> list[tuple[int, str]]:
        """Reads numbers and custom ids. Of all batches, one line at a time is in memory for that."""
        async with self._around.checking:
            return await _on_thread(lambda: self._input.custom_ids(places))

    async def _end(self, status: Status) -> None:
        """Stores how it ended, with the files that it made."""
        batch, files = self.batch, self._around.files
        made = [
            files.made(file_id, batch.owner, f"{batch.id}_{name}.jsonl", num_bytes, batch.output_expires_s)
            for name, file_id, num_bytes in batch.written
            if num_bytes
        ]
        await self._insist(self._cut)
        self._become(status)
        await self._insist(lambda: self._around.store.end(batch, made))
        counts = batch.num_lines, batch.num_completed, batch.num_failed
        logger.info("%s is %s: %d lines, %d answered, %d with an error", batch.id, status, *counts)

    async def _cut(self) -> None:
        for _, file_id, num_bytes in self.batch.written:
            await asyncio.to_thread(self._around.files.cut, file_id, num_bytes)

    async def _keep(self) -> None:
        await self._insist(self._journal.keep_batch)

    async def _insist(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Reads or writes something as soon as the disk lets it. Raises FileNotFoundError: no time brings that back."""
        while True:
            try:
                return await work()
            except FileNotFoundError:
                raise
            except (OSError, StorageError) as error:
                self._log_disk(error)
            await asyncio.sleep(self._around.retry_s)

    def _log_disk(self, error: Exception) -> None:
        logger.error("%s waits for the disk: %s", self.batch.id, error)
        drop_tracebacks(error)

    def _become(self, status: Status) -> None:
        self.batch.become(status, int(self._around.now()))

    def _name(self, number: int) -> str:
        return f"batch_req_{self.batch.id.removeprefix('batch_')}_{number}"


async def _on_thread(work: Callable[[], Result]) -> Result:
    """Runs work on a thread. A cancellation takes effect after the work: until then it holds memory."""
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        running.exception()  # retrieved, so that asyncio does not log it
        raise


class _KeyLostError(Exception):
    """The owner of a batch has no valid key any more."""
