"""Batches over fake routes: retries, failing disks, cancellation, expiry and killed servers."""

import asyncio
import errno
import gc
import logging
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from penstock.engine.protocol.errors import ConflictError, StorageError
from penstock.engine.protocol.stage_times import STAGE_TIMES
from penstock.server.batches.batch_run import _MAX_REJECTED, BatchRun, _on_thread, _retry_delay_s
from penstock.server.batches.database import BatchDatabase
from penstock.server.batches.input_lines import BatchInput, CheckResult
from penstock.server.batches.internal_client import InternalClient, RouteResponse
from penstock.server.batches.line_limiter import LineLimiter
from penstock.server.batches.output_writer import OutputWriter
from penstock.server.batches.records import BatchRecord, BatchStatus, LineError
from penstock.server.request_state import state_of

from ...tables import cases
from ...waiting import loop_iterations, until
from .helpers import (
    Routes,
    begin,
    create,
    killed,
    lines,
    numbers,
    output_files,
    record,
    until_completed,
    until_status,
    until_stored,
    upload,
)


@pytest.mark.parametrize("seconds", [3599.7, 3600])
async def test_unanswered_lines_fail_when_the_window_ends(running, clock, seconds: float) -> None:
    """The window ends while the batch runs, or while the server is off."""
    routes = Routes()
    routes.holds = lambda number: number >= 5
    routes.gate.clear()
    async with running(routes) as batches:
        batch = await begin(batches, lines(range(120)), hours=1)
        await until_completed(batches, batch, 5)
    clock.now_s += seconds
    async with running(routes) as batches:
        batch = await until_status(batches, batch, BatchStatus.EXPIRED)
        output, errors = output_files(batches, batch)
        assert (numbers(output), numbers(errors)) == (list(range(5)), list(range(5, 120)))
        assert (batch.num_completed, batch.num_failed, batch.expired_at) == (5, 115, int(clock.now_s))
        assert (errors[0]["error"]["code"], errors[0]["response"]) == ("batch_expired", None)
        assert (await batches.files.find(batch.error_id, "me")).purpose == "batch_output"


async def test_error_after_the_start_of_a_response_replaces_it() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        record = state_of(scope).record
        assert record is not None
        record.stages.was_sent, record.model, record.num_tokens = True, "m", 7
        for status, body in ((200, b'{"data": [1'), (500, b'{"error": 1}')):
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": body, "more_body": True})

    client = InternalClient(FastAPI(), fail, Mock(), lambda owner: owner, lambda owner: owner, lambda owner: True)
    response = await client.send("/v1/embeddings", b"{}", "me", "line-1")
    assert response == (500, {}, b'{"error": 1}', "line-1", "m", 7, True)
    assert STAGE_TIMES.get() is None


@pytest.mark.parametrize(
    ("header", "delays"), [(None, [1, 1, 2, 4, 8, 16, 30, 30]), (b"3", [3, 3, 3, 4, 8, 16, 30, 30]), (b"60", [30] * 8)]
)
def test_rejected_line_waits_longer_each_time(monkeypatch, header: bytes | None, delays: list[float]) -> None:
    headers = {} if header is None else {b"retry-after": header}
    response = RouteResponse(429, headers, b"", "r", "m", 0)
    for jitter in (1.0, 1.25):
        monkeypatch.setattr("random.uniform", lambda least, most: {1.0: least, 1.25: most}[jitter])  # noqa: B023
        assert [_retry_delay_s(response, number) for number in range(8)] == [jitter * delay for delay in delays]
    assert _retry_delay_s(response, 10**6) == 1.25 * 30


@pytest.mark.parametrize(
    ("more", "is_saved"),
    [
        ({"status": BatchStatus.IN_PROGRESS}, True),
        ({"status": BatchStatus.IN_PROGRESS, "errors": [LineError("server_error", "x")]}, False),
        ({"status": BatchStatus.COMPLETED}, False),
    ],
)
async def test_clean_stop_is_recorded_for_batches_that_continue(more: dict[str, object], is_saved: bool) -> None:
    save = AsyncMock()
    await BatchRun(record(**more), Mock(), Mock(store=Mock(save=save))).record_clean_stop()
    assert save.called is is_saved


@pytest.mark.parametrize("status", BatchStatus)
async def test_only_a_batch_that_runs_is_cancelled(status: BatchStatus) -> None:
    batch = record(status=status)
    save = AsyncMock()
    run = BatchRun(batch, Mock(), Mock(store=Mock(save=save), now=lambda: 9))
    if status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING):
        await run.cancel()
        assert batch.status is BatchStatus.CANCELLING
        assert save.await_count == (status is not BatchStatus.CANCELLING)
        await run.cancel()  # again
    else:
        with pytest.raises(ConflictError, match=status):
            await run.cancel()
        assert (batch.status, save.await_count) == (status, 0)


async def test_restarted_batch_runs_only_unanswered_lines(running, tmp_path: Path) -> None:
    routes, files = Routes(), tmp_path / "data" / "files"
    routes.holds = lambda number: number >= 5
    routes.gate.clear()
    async with running(routes) as batches:
        batch = await begin(batches, lines(range(10)))
        await until_completed(batches, batch, 5)
    with (files / batch.output_id).open("ab") as file:
        file.write(b'{"custom_id": "5", "torn')  # a killed server did not record this line
    (files / "file-unknown.part").write_bytes(b"x")
    (files / "file-unknown").write_bytes(b"x")
    routes.received.clear()
    routes.gate.set()
    async with running(routes) as batches:
        batch = await until_status(batches, batch, BatchStatus.COMPLETED)
        assert set(routes.received) == set(range(5, 10))
        assert numbers(output_files(batches, batch)[0]) == list(range(10))
        assert (batch.num_completed, batch.num_tokens, batch.model) == (10, 30, "m")
        assert {path.name for path in files.iterdir()} == {batch.input_file_id, batch.output_id}


@pytest.mark.parametrize("status", [BatchStatus.COMPLETED, BatchStatus.CANCELLED])
async def test_batch_killed_before_its_end_ends_after_a_restart(running, tmp_path, monkeypatch, caplog, status) -> None:
    routes, end, stored = Routes(), BatchDatabase.end, []

    async def kill_and_end(database: BatchDatabase, batch: BatchRecord, *files: object) -> None:
        found = await database.batch(batch.id, batch.owner)
        stored.append(None if found is None else found.status)
        killed(tmp_path / "data", tmp_path / "killed")
        await end(database, batch, *files)

    with monkeypatch.context() as patched:
        patched.setattr(BatchDatabase, "end", kill_and_end)
        async with running(routes) as batches:
            routes.gate.clear()
            batch = await begin(batches, lines(range(3)))
            await until(lambda: routes.received[0])
            if status is BatchStatus.CANCELLED:
                await batches.cancel(batch.id, "me")
            routes.gate.set()
            batch = await until_status(batches, batch, status)
    assert stored == [BatchStatus.FINALIZING if status is BatchStatus.COMPLETED else BatchStatus.CANCELLING]
    for file in (batch.output_id, batch.error_id):
        if (tmp_path / "killed" / "files" / file).exists():
            with (tmp_path / "killed" / "files" / file).open("ab") as torn:
                torn.write(b'{"custom_id')
    caplog.set_level(logging.INFO, "penstock.server")
    async with running(routes, tmp_path / "killed") as batches:
        assert f"{batch.id} continues: 3 of 3 lines are done" in caplog.messages
        restarted = await until_status(batches, batch, status)
        assert (restarted.num_completed, restarted.num_failed) == (batch.num_completed, batch.num_failed)
        assert restarted.to_openai()["usage"] == batch.to_openai()["usage"]
        assert restarted.to_openai()["usage"]["total_tokens"] == batch.num_tokens
        assert output_files(batches, restarted) == output_files(batches, batch)


@pytest.mark.parametrize(
    ("status", "num_rejections", "num_failed"), [(429, 4, 0), (503, 4, 0), (504, 2, 0), (504, 3, 2 * _MAX_REJECTED)]
)
async def test_rejected_line_is_retried(
    running, monkeypatch, status: int, num_rejections: int, num_failed: int
) -> None:
    num_responses, reject = Counter(), Mock()
    delay = lambda response, number: num_responses.update([number]) or 0.01  # noqa: E731
    monkeypatch.setattr("penstock.server.batches.batch_run._retry_delay_s", delay)
    monkeypatch.setattr(LineLimiter, "reject", reject)
    routes = Routes()
    routes.status_of = lambda number: status if routes.received[number] <= num_rejections else 200
    async with running(routes) as batches:
        batch = await begin(batches, lines(range(2 * _MAX_REJECTED)))
        batch = await until_status(batches, batch, BatchStatus.COMPLETED)
        assert (batch.num_completed, batch.num_failed) == (2 * _MAX_REJECTED - num_failed, num_failed)
        assert set(routes.received.values()) == {3 if num_failed else num_rejections + 1}
        assert num_responses == dict.fromkeys(range(1, 3 if num_failed else num_rejections + 1), 2 * _MAX_REJECTED)
        assert reject.call_count == num_responses.total(), "the number of lines at once is lowered"


async def test_rejected_lines_do_not_block_other_batches(running) -> None:
    routes = Routes(lambda number: 503 if number >= 1000 else 200)
    async with running(routes) as batches:
        stuck = await begin(batches, lines(range(1000, 1100)))
        await until(lambda: routes.received[1000 + _MAX_REJECTED - 1])
        other = await until_status(batches, await begin(batches, lines(range(50))), BatchStatus.COMPLETED)
        assert other.num_completed == 50
        assert len([number for number in routes.received if number >= 1000]) <= _MAX_REJECTED + 1
        assert (await batches.find(stuck.id, "me")).status is BatchStatus.IN_PROGRESS
        run, _ = batches._runs[stuck.id]
        await batches.cancel(stuck.id, "me")
        stuck = await until_status(batches, stuck, BatchStatus.CANCELLED)
        assert (stuck.num_failed, run._context.limiter.num_lines) == (100, 0)


async def test_only_the_line_that_kills_its_engine_fails(running, monkeypatch) -> None:
    monkeypatch.setattr("penstock.server.batches.batch_run._MAX_WAIT_S", 0.01)
    routes, num_deaths, lost = Routes(), 0, set()

    def status_of(number: int) -> int:
        """Line 7 kills the engine. The first time, other lines are lost with it."""
        nonlocal num_deaths
        if number == 7:
            num_deaths += 1
            lost.update(range(8, 20) if num_deaths == 1 else ())
            return 503
        is_lost = number in lost
        lost.discard(number)
        return 503 if is_lost else 200

    routes.engine_dies, routes.status_of = True, status_of
    async with running(routes) as batches:
        batch = await until_status(batches, await begin(batches, lines(range(40))), BatchStatus.COMPLETED)
        assert (batch.num_completed, batch.num_failed, num_deaths) == (39, 1, 3)
        (error,) = output_files(batches, batch)[1]
        assert (error["custom_id"], error["response"]["status_code"]) == ("7", 503)


@pytest.mark.parametrize(
    ("owner", "method", "error"),
    [
        (BatchInput, "check", OSError(errno.EMFILE, "Too many open files")),
        (BatchInput, "read", OSError(errno.EMFILE, "Too many open files")),
        (BatchDatabase, "completed_lines", StorageError("disk I/O error")),
        (BatchDatabase, "save", StorageError("disk I/O error")),
        (BatchDatabase, "end", StorageError("disk I/O error")),
        (OutputWriter, "_append", OSError(errno.ENOSPC, "No space left on device")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_short_disk_failure_fails_no_batch(running, monkeypatch, owner: type, method: str, error) -> None:
    original, fails = getattr(owner, method), iter([False, True, False, True, True] if method == "save" else [True] * 2)

    def fail_sometimes(*arguments: object, **options: object) -> object:
        if next(fails, False):
            raise error
        return original(*arguments, **options)

    slept, sleep = Counter(), asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: (slept.update([seconds]), sleep(seconds))[1])
    monkeypatch.setattr(owner, method, fail_sometimes)
    routes = Routes()
    async with running(routes) as batches:
        batch = await until_status(batches, await begin(batches, lines(range(250))), BatchStatus.COMPLETED)
        assert numbers(output_files(batches, batch)[0]) == list(range(250))
        assert (batch.num_completed, routes.received.total(), next(fails, None)) == (250, 250, None)
        assert slept[0.01] == {"_append": 0, "save": 3}.get(method, 2), "it pauses after each failure"


async def test_server_stops_while_the_disk_is_full(running, monkeypatch, caplog) -> None:
    times_s: list[float] = []

    def fail(*_: object) -> None:
        times_s.append(time.monotonic())
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(OutputWriter, "_append", fail)
        async with running(Routes()) as batches:
            batch = await begin(batches, lines(range(3)))
            await until(lambda: len(times_s) > 2)
    assert times_s[2] - times_s[0] >= 2 * 0.01, "it pauses between the attempts"
    async with running(Routes()) as batches:
        assert (await until_status(batches, batch, BatchStatus.COMPLETED)).num_completed == 3
    assert caplog.text.count("its responses cannot be written") == 1


@cases(__file__, "cause", "status", "code")
async def test_ended_run_is_freed_and_has_its_error(running, monkeypatch, caplog, cause: str, status, code) -> None:
    caplog.set_level(logging.CRITICAL, "penstock.server.batches")  # pytest keeps the frames of logged errors
    fail = Mock(side_effect=ZeroDivisionError)
    routes = Routes(lambda number: fail() if cause == "line" else 401 if number == 2 and cause == "key" else 200)
    if cause == "check":
        monkeypatch.setattr(BatchInput, "check", fail)
    if cause == "writer":
        monkeypatch.setattr(OutputWriter, "_append", fail)
    if cause == "removed file":
        routes.gate.clear()
    async with running(routes) as batches:
        gc.collect()
        gc.disable()
        try:
            batch = await begin(batches, lines(range(4)))
            run = weakref.ref(batches._runs[batch.id][0])
            if cause == "removed file":
                await until(lambda: routes.received[0])
                assert (await batches.find(batch.id, "me")).last_started == 4, "it may kill the server"
            if cause.endswith("file"):
                batches.files.path(batch.input_file_id).unlink()
            routes.gate.set()
            batch = await until_status(batches, batch, BatchStatus(status))
            await until(lambda: run() is None)
        finally:
            gc.enable()
        assert [error.code for error in batch.errors] == ([] if code is None else [code])


async def test_error_of_a_cancelled_read_is_not_logged(caplog) -> None:
    ended = threading.Event()

    def fail() -> None:
        ended.wait(120)
        raise OSError

    reading = asyncio.create_task(_on_thread(fail))
    await asyncio.sleep(0)
    reading.cancel()
    ended.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    del reading
    gc.collect()
    assert not caplog.records


async def test_bytes_of_running_lines_are_bounded(running) -> None:
    routes = Routes()
    async with running(routes, batch_memory=35_000) as batches:
        file_ids = [await upload(batches, lines(range(i, i + 30), text="x" * 10_000)) for i in (0, 30, 60)]
        large = await upload(batches, lines(range(90, 92), text="x" * 100_000))
        for batch in [await create(batches, file_id) for file_id in [*file_ids, large]]:
            assert (await until_status(batches, batch, BatchStatus.COMPLETED)).num_failed == 0
        assert 100_000 < routes.max_bytes_at_once < 101_000, "a line above the bound runs alone"
        routes.max_bytes_at_once = 0
        for batch in [await create(batches, file_id) for file_id in file_ids]:
            await until_status(batches, batch, BatchStatus.COMPLETED)
        assert 0 < routes.max_bytes_at_once < 35_000


async def test_lines_are_suspects_only_after_a_kill(running, tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("penstock.server.batches.input_lines._SPANS_PER_READ", 20)
    routes, folder = Routes(), tmp_path / "data"
    routes.holds = lambda number: number >= 2
    routes.gate.clear()
    async with running(routes, folder) as batches:
        batch = await begin(batches, lines(range(80)))
        await until_completed(batches, batch, 2)
        await until(lambda: routes.received[2])
    async with running(routes, folder) as batches:
        await until(lambda: routes.received[2] == 2)
        assert "the server was killed while lines" not in caplog.text, "it stopped cleanly"
        folder = killed(folder, tmp_path / "kill")
    routes.holds = lambda number: number == 20 or number >= 40  # one of 20 suspects; later lines run beside it
    for _ in range(2):
        routes.received.clear()
        async with running(routes, folder) as batches:
            await until_completed(batches, batch, 38)
            await until(lambda: routes.received[20])
    routes.holds = lambda number: number >= 70
    for _ in range(2):  # the first run passes all lines that ran during the kill
        routes.received.clear()
        async with running(routes, folder) as batches:
            await until_completed(batches, batch, 70)
            await until(lambda: routes.received[70])
            assert caplog.text.count("the server was killed while lines") == 3


async def test_line_that_ran_alone_in_two_kills_fails(running, tmp_path: Path, monkeypatch) -> None:
    """Line 40 runs beside others in the first kill, waits after a rejection in the second, and then runs alone."""
    monkeypatch.setattr("penstock.server.batches.batch_run._retry_delay_s", lambda *_: 3600.0)
    routes, folder = Routes(), tmp_path / "data"
    routes.gate.clear()
    for num_kills in range(1, 5):
        routes.holds = {1: lambda number: number >= 7, 2: lambda _: False}.get(num_kills, lambda number: number == 39)
        rejected = {39} if num_kills == 2 else set()
        routes.status_of = lambda number, rejected=rejected: 429 if number in rejected else 200
        async with running(routes, folder) as batches:
            if num_kills == 1:
                batch = await begin(batches, lines(range(40)))
                await until_completed(batches, batch, 7)
                await until(lambda: routes.received[7])
            else:
                await until(lambda: routes.received[39])
                assert routes.max_at_once == 1
            if num_kills == 2:
                await until_stored(batches, batch, lambda stored: stored.lone_line is None)
            if num_kills == 3:  # other files are checked meanwhile
                other = await begin(batches, lines(range(2)))
                await until_stored(batches, other, lambda stored: stored.status is not BatchStatus.VALIDATING)
            folder = killed(folder, tmp_path / f"kill {num_kills}")
        routes.received.clear()
        routes.max_at_once = 0
    async with running(routes, folder) as batches:
        batch = await until_status(batches, batch, BatchStatus.COMPLETED)
        output, (error,) = output_files(batches, batch)
        assert numbers(output) == list(range(39))
        assert (error["custom_id"], error["error"]["code"]) == ("39", "server_crashed")
        assert (routes.received[39], batch.num_crashes, batch.lone_line) == (0, {}, None)


async def test_line_that_is_written_during_a_cancellation_is_answered_once(running, monkeypatch) -> None:
    is_writing, may_write, append = threading.Event(), threading.Event(), OutputWriter._append

    def slow_append(*arguments: object) -> None:
        is_writing.set()
        assert may_write.wait(60)
        append(*arguments)

    monkeypatch.setattr(OutputWriter, "_append", slow_append)
    async with running(Routes()) as batches:
        batch = await begin(batches, lines(range(5)))
        await until(is_writing.is_set)
        await batches.cancel(batch.id, "me")
        await loop_iterations(1000)
        may_write.set()
        batch = await until_status(batches, batch, BatchStatus.CANCELLED)
        output, errors = output_files(batches, batch)
        assert (numbers(output), numbers(errors)) == ([0], [1, 2, 3, 4])


async def test_file_whose_check_ran_in_two_kills_fails(running, tmp_path: Path, monkeypatch) -> None:
    folder, checking, may_end = tmp_path / "data", threading.Semaphore(0), threading.Event()
    check = BatchInput.check

    def wait_and_check(self: BatchInput) -> CheckResult:
        checking.release()
        may_end.wait(120)
        return check(self)

    monkeypatch.setattr(BatchInput, "check", wait_and_check)
    for num_kills in (1, 2):
        may_end.clear()
        async with running(Routes(), folder) as batches:
            if num_kills == 1:
                batch = await begin(batches, lines(range(3)))
            await asyncio.to_thread(checking.acquire)
            folder = killed(folder, tmp_path / f"kill {num_kills}")
            may_end.set()
            checked = await until_status(batches, batch, BatchStatus.COMPLETED)
            assert (checked.num_crashes, checked.lone_line) == ({}, None)
    async with running(Routes(), folder) as batches:
        batch = await until_status(batches, batch, BatchStatus.FAILED)
        assert [error.code for error in batch.errors] == ["server_crashed"]
        assert "killed 2 times while it checked this file" in batch.errors[0].message
        other = await until_status(batches, await begin(batches, lines(range(2))), BatchStatus.COMPLETED)
        assert other.num_completed == 2
