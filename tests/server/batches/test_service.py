"""Batches without HTTP: ends, restarts, and servers that refuse. Routes that answer by hand; the disk is a real one."""

import asyncio
import errno
import gc
import json
import logging
import shutil
import sqlite3
import threading
import tracemalloc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO, ClassVar

import pytest
from fastapi import HTTPException

from penstock.engine.protocol.errors import ConflictError, EngineOverloadedError, StorageError, UnknownObjectError
from penstock.server.admission import LimitError
from penstock.server.batches.batch_run import _MAX_REFUSED
from penstock.server.batches.input_lines import BatchInput, LinePlace
from penstock.server.batches.internal_client import RouteResponse
from penstock.server.batches.output_writer import OutputWriter
from penstock.server.batches.records import BatchRecord, BatchStatus
from penstock.server.batches.service import MOST_UNFINISHED, Batches
from penstock.server.batches.store import Page, Store
from penstock.server.batches.window import MOST_LINES, Window
from penstock.server.routing import BatchUse
from penstock.server.schemas.batch_bodies import BatchRequest
from penstock.server.settings import ServerSettings, UsageError, load

from ...clock import Clock

DAY_S = 24 * 3600
TIMEOUT_S = 60
"""Only a test that fails waits for so long."""
_JSON = {b"content-type": b"application/json"}


class Routes:
    """Routes that answer what `answer` says: a status, or nothing until the gate is open where `holds` says so."""

    batch_uses: ClassVar = {"/v1/embeddings": BatchUse.EMBEDDING}

    def __init__(self, answer: Callable[[int], int] = lambda number: 200) -> None:
        self.answer = answer
        self.dies = False  # the engine, with a 503
        self.holds: Callable[[int], bool] = lambda number: True
        self.num_bytes_at_once = self.most_bytes_at_once = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: Counter[int] = Counter()
        self.num_at_once = self.most_at_once = 0

    async def send(self, path: str, content: bytes, owner: str, name: str) -> RouteResponse:
        number = json.loads(content)["input"]
        self.asked[number] += 1
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        self.num_bytes_at_once += len(content)
        self.most_bytes_at_once = max(self.most_bytes_at_once, self.num_bytes_at_once)
        try:
            await asyncio.sleep(0)
            if self.holds(number):
                await self.gate.wait()
        finally:
            self.num_at_once -= 1
            self.num_bytes_at_once -= len(content)
        answer = json.dumps({"number": number}).encode()
        status = self.answer(number)
        return RouteResponse(status, _JSON, answer, name, "m", 3, was_taken=status == 503 and self.dies)


@pytest.fixture(autouse=True)
def no_line_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """More lines run at once after each line, however slow the machine is."""
    monkeypatch.setattr("penstock.server.batches.window.AHEAD_S", float("inf"))


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000_000.0)


@pytest.fixture
def running(tmp_path: Path, clock: Clock):
    """Run the batches of a folder: `async with running(routes) as batches`."""

    @asynccontextmanager
    async def run(routes: Routes, folder: Path = tmp_path / "data", **settings: object) -> AsyncIterator[Batches]:
        batches = Batches(load(ServerSettings, {"data_dir": folder, **settings}), now=clock, retry_s=0.05)
        async with batches.running(routes):
            yield batches

    return run


def lines(numbers: range, **body: object) -> bytes:
    bodies = ((i, {"input": i, **body}) for i in numbers)
    rows = ({"custom_id": f"{i}", "method": "POST", "url": "/v1/embeddings", "body": body} for i, body in bodies)
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


async def upload(batches: Batches, content: bytes, owner: str = "me", seconds: int = 3600) -> str:
    parts = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": str(seconds)}
    form = b"".join(
        b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), value.encode())
        for name, value in parts.items()
    )
    form += b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n--x--\r\n' % content

    async def body() -> AsyncIterator[bytes]:
        for start in range(0, len(form), 1000):
            yield form[start : start + 1000]

    return (await batches.files.receive("multipart/form-data; boundary=x", body(), owner)).id


async def create(batches: Batches, file_id: str, hours: int = 24, owner: str = "me") -> BatchRecord:
    fields = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "completion_window": f"{hours}h"}
    return await batches.create(BatchRequest(**fields), owner)


async def begin(batches: Batches, content: bytes, hours: int = 24) -> BatchRecord:
    return await create(batches, await upload(batches, content), hours)


async def until(batches: Batches, batch: BatchRecord, *states: BatchStatus) -> BatchRecord:
    async with asyncio.timeout(TIMEOUT_S):
        while (found := await batches.find(batch.id, "me")).status not in states:
            await asyncio.sleep(0.005)
    return found


async def until_done(batches: Batches, batch: BatchRecord, num_lines: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while (await batches.find(batch.id, "me")).num_completed < num_lines:
            await asyncio.sleep(0.005)


async def until_asked(routes: Routes, number: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not routes.asked[number]:
            await asyncio.sleep(0.005)


def written(batches: Batches, batch: BatchRecord) -> tuple[list[str], list[str]]:
    """The custom ids of the output and of the errors."""
    found = []
    for file_id, num_bytes in ((batch.output_id, batch.num_output_bytes), (batch.error_id, batch.num_error_bytes)):
        path = batches.files.path(file_id)
        assert path.exists() is bool(num_bytes)
        found.append([json.loads(line)["custom_id"] for line in path.read_text().splitlines()] if num_bytes else [])
    return found[0], found[1]


async def test_unanswered_lines_fail_when_the_window_is_over(running, clock) -> None:
    routes = Routes()
    async with running(routes) as batches:
        routes.gate.clear()
        batch = await begin(batches, lines(range(120)), hours=1)
        await until(batches, batch, BatchStatus.IN_PROGRESS)
    clock.now_s += 3600
    async with running(routes) as batches:
        batch = await until(batches, batch, BatchStatus.EXPIRED)
        output, errors = written(batches, batch)
        assert (output, sorted(errors, key=int)) == ([], [str(i) for i in range(120)])
        assert (batch.num_completed, batch.num_failed, batch.expired_at) == (0, 120, int(clock.now_s))
        (line,) = batches.files.path(batch.error_id).read_text().splitlines()[:1]
        assert json.loads(line)["error"]["code"] == "batch_expired"
        assert json.loads(line)["response"] is None
        assert (await batches.files.find(batch.error_id, "me")).purpose == "batch_output"


async def test_a_batch_expires_while_it_runs(running, clock) -> None:
    routes = Routes()
    routes.holds = lambda number: number >= 5
    routes.gate.clear()
    async with running(routes) as batches:
        batch = await begin(batches, lines(range(8)), hours=1)
        await until_done(batches, batch, 5)
    clock.now_s += 3599.7
    async with running(routes) as batches:
        batch = await until(batches, batch, BatchStatus.EXPIRED)
        assert (batch.num_completed, batch.num_failed) == (5, 3)
        assert written(batches, batch) == ([str(i) for i in range(5)], ["5", "6", "7"])


async def test_a_stopped_server_goes_on_where_it_was(running) -> None:
    routes, batch = Routes(), None
    async with running(routes) as batches:
        batch = await begin(batches, lines(range(1000)))
        async with asyncio.timeout(TIMEOUT_S):
            while (await batches.find(batch.id, "me")).num_completed < 100:
                await asyncio.sleep(0)
    first = Counter(routes.asked)
    routes.asked.clear()
    async with running(routes) as batches:
        done = (await batches.find(batch.id, "me")).num_completed
        batch = await until(batches, batch, BatchStatus.COMPLETED)
        output, errors = written(batches, batch)
        assert (sorted(output, key=int), errors) == ([str(i) for i in range(1000)], [])
        assert sum(routes.asked.values()) <= 1000 - 100
        assert (first | routes.asked).total() >= 1000
        assert (done, batch.num_tokens, batch.model) >= (100, 3000, "m")


async def test_uncounted_output_is_truncated(running, tmp_path: Path) -> None:
    routes = Routes()
    async with running(routes) as batches:
        routes.gate.clear()
        batch = await begin(batches, lines(range(10)))
        await until(batches, batch, BatchStatus.IN_PROGRESS)
    files = tmp_path / "data" / "files"
    (files / batch.output_id).write_bytes(b'{"custom_id": "0", "torn')  # a killed server got so far
    (files / "file-unknown.part").write_bytes(b"x")
    (files / "file-unknown").write_bytes(b"x")
    routes.gate.set()
    async with running(routes) as batches:
        batch = await until(batches, batch, BatchStatus.COMPLETED)
        assert sorted(written(batches, batch)[0]) == [str(i) for i in range(10)]
        assert {path.name for path in files.iterdir()} == {batch.input_file_id, batch.output_id}


@pytest.mark.parametrize("status", [BatchStatus.VALIDATING, BatchStatus.FINALIZING, BatchStatus.CANCELLING])
async def test_every_state_goes_on_after_a_restart(
    running, status: BatchStatus, caplog: pytest.LogCaptureFixture
) -> None:
    routes = Routes()
    async with running(routes) as batches:
        routes.gate.clear()
        batch = await begin(batches, lines(range(3)))
        await until(batches, batch, BatchStatus.IN_PROGRESS)
        run = batches._runs[batch.id][0]
        if status is BatchStatus.FINALIZING:
            routes.gate.set()
            batch = await until(batches, batch, BatchStatus.COMPLETED)
            batch.output_id, batch.num_output_bytes = run.batch.output_id, 0
        batch.status = status
        batch.num_lines = 0 if status is BatchStatus.VALIDATING else 3
        database = batches._store
        await database._do(lambda db: db.execute("UPDATE batches SET has_ended = 0 WHERE id = ?", (batch.id,)))
        if status is BatchStatus.FINALIZING:
            await database.remove_file(batch.output_id)
        await database.save(batch)
        run.batch.status = status
    routes.gate.set()
    caplog.set_level(logging.INFO, "penstock.server")
    async with running(routes) as batches:
        num_done = 3 if status is BatchStatus.FINALIZING else 0
        assert f"{batch.id} continues: {num_done} of {batch.num_lines} lines are done" in caplog.messages
        expected = BatchStatus.CANCELLED if status is BatchStatus.CANCELLING else BatchStatus.COMPLETED
        batch = await until(batches, batch, expected)
        assert (batch.num_completed, batch.num_failed) == ((0, 3) if expected is BatchStatus.CANCELLED else (3, 0))


@pytest.mark.parametrize("status", [429, 503])
async def test_refused_line_is_retried(running, monkeypatch, status: int) -> None:
    monkeypatch.setattr("penstock.server.batches.batch_run._LONGEST_WAIT_S", 0.01)
    routes = Routes()
    routes.answer = lambda number: status if routes.asked[number] < 2 else 200
    async with running(routes) as batches:
        batch = await begin(batches, lines(range(3)))
        batch = await until(batches, batch, BatchStatus.COMPLETED)
        assert (batch.num_completed, batch.num_failed) == (3, 0)
        assert routes.asked == {0: 2, 1: 2, 2: 2}


async def test_always_refused_lines_do_not_block_other_batches(running) -> None:
    routes = Routes(lambda number: 503 if number >= 1000 else 200)
    async with running(routes) as batches:
        stuck = await begin(batches, lines(range(1000, 1100)))
        async with asyncio.timeout(TIMEOUT_S):
            while not routes.asked[1000 + _MAX_REFUSED - 1]:
                await asyncio.sleep(0.005)
        other = await until(batches, await begin(batches, lines(range(50))), BatchStatus.COMPLETED)
        assert other.num_completed == 50
        assert 1 <= len([number for number in routes.asked if number >= 1000]) <= _MAX_REFUSED + 1
        assert (await batches.find(stuck.id, "me")).status is BatchStatus.IN_PROGRESS
        run, _ = batches._runs[stuck.id]
        await batches.cancel(stuck.id, "me")
        stuck = await until(batches, stuck, BatchStatus.CANCELLED)
        assert (stuck.num_failed, run._context.window.num_lines) == (100, 0)


async def test_many_refused_lines_start_no_further_lines(running, monkeypatch) -> None:
    """However many lines are tried again at once: each of them still counts as refused."""
    monkeypatch.setattr("penstock.server.batches.batch_run._LONGEST_WAIT_S", 0.001)
    monkeypatch.setattr(Window, "refuse", lambda window: None)
    routes = Routes(lambda number: 503)

    async def until_tried(num_times: int) -> int:
        async with asyncio.timeout(TIMEOUT_S):
            while min(routes.asked[number] for number in range(_MAX_REFUSED)) < num_times:
                await asyncio.sleep(0.005)
        return len(routes.asked)

    async with running(routes) as batches:
        await begin(batches, lines(range(500)))
        begun = await until_tried(3)
        assert _MAX_REFUSED <= begun < _MAX_REFUSED + MOST_LINES
        assert await until_tried(60) == begun


async def test_always_refused_line_does_not_block_its_batch(running) -> None:
    routes = Routes(lambda number: 503 if number == 0 else 200)
    async with running(routes) as batches:
        batch = await begin(batches, lines(range(50)))
        async with asyncio.timeout(TIMEOUT_S):
            while (await batches.find(batch.id, "me")).num_completed < 49:
                await asyncio.sleep(0.005)


async def test_line_fails_after_three_timeouts(running, monkeypatch) -> None:
    monkeypatch.setattr("penstock.server.batches.batch_run._LONGEST_WAIT_S", 0.01)
    routes = Routes(lambda number: 504)
    async with running(routes) as batches:
        batch = await until(batches, await begin(batches, lines(range(1))), BatchStatus.COMPLETED)
        assert (batch.num_completed, batch.num_failed, routes.asked[0]) == (0, 1, 3)


async def test_line_that_kills_its_engine_is_found_and_fails(running, monkeypatch) -> None:
    monkeypatch.setattr("penstock.server.batches.batch_run._LONGEST_WAIT_S", 0.01)
    routes, deaths = Routes(), 0
    routes.dies = True

    def answer(number: int) -> int:
        """Line 7 kills the engine, with all that is in it."""
        nonlocal deaths
        deaths += number == 7
        routes.doomed = routes.in_engine if number == 7 else routes.doomed - {number}
        return 503 if number == 7 or number in routes.doomed else 200

    routes.doomed, routes.in_engine, routes.answer = set(), set(range(4, 20)), answer
    async with running(routes) as batches:
        batch = await until(batches, await begin(batches, lines(range(40))), BatchStatus.COMPLETED)
        assert (batch.num_completed, batch.num_failed, deaths) == (39, 1, 3)
        (error,) = batches.files.path(batch.error_id).read_text().splitlines()
        assert (json.loads(error)["custom_id"], json.loads(error)["response"]["status_code"]) == ("7", 503)


async def test_failing_database_loses_nothing(running, monkeypatch) -> None:
    routes = Routes()
    async with running(routes) as batches:
        batch = await begin(batches, lines(range(200)))
        save, refusals = batches._store.save, iter([False, True, False, True, True] * 2)

        async def save_or_refuse(*arguments: object) -> None:
            if next(refusals, False):
                raise StorageError("disk I/O error")
            await save(*arguments)

        monkeypatch.setattr(batches._store, "save", save_or_refuse)
        batch = await until(batches, batch, BatchStatus.COMPLETED)
        assert sorted(written(batches, batch)[0], key=int) == [str(i) for i in range(200)]
        assert routes.asked.total() == 200
        assert next(refusals, None) is None


async def test_two_batches_run_side_by_side(running) -> None:
    routes = Routes()
    routes.gate.clear()
    routes.holds = lambda number: number == 4999
    async with running(routes) as batches:
        large = await begin(batches, lines(range(5000)))
        await until(batches, large, BatchStatus.IN_PROGRESS)
        small = await until(batches, await begin(batches, lines(range(5000, 5020))), BatchStatus.COMPLETED)
        assert (await batches.find(large.id, "me")).status is BatchStatus.IN_PROGRESS
        assert small.num_completed == 20


async def test_files_expire_but_for_those_in_use(running, clock) -> None:
    routes = Routes()
    async with running(routes) as batches:
        routes.gate.clear()
        batch = await begin(batches, lines(range(2)))
        other = await upload(batches, b"x")
        clock.now_s += 3601
        with pytest.raises(UnknownObjectError):
            await batches.files.find(other, "me")
        await batches.sweep()
        assert not batches.files.path(other).exists()
        assert batches.files.path(batch.input_file_id).exists()
        routes.gate.set()
        batch = await until(batches, batch, BatchStatus.COMPLETED)
        clock.now_s += 30 * DAY_S + 1
        await batches.sweep()
        assert not list(batches.files.path("x").parent.iterdir())


async def test_missing_input_fails_its_batch(running) -> None:
    routes = Routes()
    async with running(routes) as batches:
        file_id = await upload(batches, lines(range(2)))
        batches.files.path(file_id).unlink()
        fields = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "completion_window": "24h"}
        batch = await batches.create(BatchRequest(**fields), "me")
        batch = await until(batches, batch, BatchStatus.FAILED)
        assert [error.code for error in batch.errors] == ["file_not_found"]


async def test_a_fault_of_our_own_fails_the_batch_alone(running, monkeypatch) -> None:
    routes = Routes()
    async with running(routes) as batches:
        check = BatchInput.check
        monkeypatch.setattr(BatchInput, "check", lambda self: 1 / 0)
        broken = await until(batches, await begin(batches, lines(range(2))), BatchStatus.FAILED)
        assert "ZeroDivisionError" in broken.errors[0].message
        monkeypatch.setattr(BatchInput, "check", check)
        await until(batches, await begin(batches, lines(range(2))), BatchStatus.COMPLETED)


async def test_short_disk_failure_fails_no_batch(running, monkeypatch) -> None:
    """Too many open files while the input is read, once in each place, and a database that is busy at a restart."""
    routes, numbers = Routes(), {("_places", 1), ("_places", 2), ("_places", 150), ("_text", 1)}

    def fail_once(method: str, number: int) -> None:
        if (method, number) in numbers:
            numbers.remove((method, number))
            raise OSError(errno.EMFILE, "Too many open files")

    places, text = BatchInput._places, BatchInput._text

    def some_places(file: BatchInput, *arguments: LinePlace):
        for place in places(file, *arguments):
            fail_once("_places", place.number)
            yield place

    def some_text(file: BatchInput, place: LinePlace, stream: BinaryIO) -> bytes:
        fail_once("_text", place.number)
        return text(file, place, stream)

    monkeypatch.setattr(BatchInput, "_places", some_places)
    monkeypatch.setattr(BatchInput, "_text", some_text)
    async with running(routes) as batches:
        routes.gate.clear()
        batch = await begin(batches, lines(range(250)))
        await until(batches, batch, BatchStatus.IN_PROGRESS)
    routes.gate.set()
    numbers |= {("_places", 20), ("_places", 240), ("_text", 241)}
    answered, refusals = Store.answered, iter([True])

    async def answered_in_the_end(store: Store, batch_id: str) -> set[int]:
        if next(refusals, False):
            raise StorageError("disk I/O error")
        return await answered(store, batch_id)

    monkeypatch.setattr(Store, "answered", answered_in_the_end)
    async with running(routes) as batches:
        batch = await until(batches, batch, BatchStatus.COMPLETED)
        assert sorted(written(batches, batch)[0], key=int) == [str(i) for i in range(250)]
        assert (batch.num_completed, numbers, next(refusals, None)) == (250, set(), None)


async def test_unreadable_input_does_not_block_other_batches(running, monkeypatch) -> None:
    """An input on a damaged part of the disk: first its check fails, then its lines, then its custom ids."""
    bad, failing = set(), {"check": True, "_text": False}

    def fail(name: str):
        original = getattr(BatchInput, name)

        def method(file: BatchInput, *arguments: object) -> object:
            if failing[name] and file._path.name in bad:
                failed.add(name)
                raise OSError(errno.EIO, "Input/output error")
            return original(file, *arguments)

        return method

    async def until_failed(name: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while name not in failed:
                await asyncio.sleep(0.005)

    failed: set[str] = set()
    for name in failing:
        monkeypatch.setattr(BatchInput, name, fail(name))
    async with running(Routes()) as batches:
        bad.add(await upload(batches, lines(range(40))))
        batch = await create(batches, *bad)
        await until_failed("check")
        await until(batches, await begin(batches, lines(range(100, 120))), BatchStatus.COMPLETED)
        failing.update(_text=True, check=False)
        await until_failed("_text")
        await until(batches, await begin(batches, lines(range(100, 120))), BatchStatus.COMPLETED)
        await batches.cancel(batch.id, "me")
        await until(batches, await begin(batches, lines(range(100, 120))), BatchStatus.COMPLETED)
        failing.update(_text=False)
        assert (await until(batches, batch, BatchStatus.CANCELLED)).num_failed == 40


async def test_failed_batch_lists_every_line(running, monkeypatch) -> None:
    routes = Routes(lambda number: 200 if number < 20 else 1 // 0)
    async with running(routes) as batches:
        batch = await until(batches, await begin(batches, lines(range(250))), BatchStatus.FAILED)
        output, errors = written(batches, batch)
        assert sorted(output + errors, key=int) == [str(i) for i in range(250)]
        assert (batch.num_completed + batch.num_failed, "ZeroDivisionError" in batch.errors[0].message) == (250, True)
        (line,) = batches.files.path(batch.error_id).read_text().splitlines()[-1:]
        assert json.loads(line)["error"]["code"] == "batch_failed"


async def test_input_removed_during_the_run_fails_its_batch(running) -> None:
    routes = Routes()
    async with running(routes) as batches:
        routes.gate.clear()
        batch = await begin(batches, lines(range(10)))
        await until(batches, batch, BatchStatus.IN_PROGRESS)
        batches.files.path(batch.input_file_id).unlink()
    async with running(routes) as batches:
        batch = await until(batches, batch, BatchStatus.FAILED)
        assert [error.code for error in batch.errors] == ["file_not_found"]


async def test_an_owner_has_so_many_bytes_of_files_and_no_more(running, monkeypatch) -> None:
    monkeypatch.setattr("penstock.server.batches.file_store.MOST_LARGE_FILES", 3)
    async with running(Routes(), max_file_bytes=1024) as batches:
        files = [await upload(batches, bytes(1000)) for _ in range(3)]
        with pytest.raises(HTTPException, match=r"would take 3100 bytes; the limit is 3072.*delete some") as refused:
            await upload(batches, bytes(100))
        assert refused.value.status_code == 413
        await upload(batches, bytes(1000), owner="other")
        await upload(batches, bytes(72))
        left = len(list(batches.files.path("x").parent.iterdir()))
        with pytest.raises(HTTPException, match="3073 bytes; the limit is 3072"):
            await upload(batches, b"")
        await batches.remove_file(files[0], "me")
        both = await asyncio.gather(*(upload(batches, bytes(600)) for _ in range(2)), return_exceptions=True)
        assert {type(each) for each in both} == {str, LimitError}
        assert len(list(batches.files.path("x").parent.iterdir())) == left


async def test_uploads_leave_room_for_answers_on_the_disk(running, monkeypatch) -> None:
    disk = SimpleNamespace(total=100 * 2**30, free=2**31)
    monkeypatch.setattr("penstock.server.batches.file_store.shutil.disk_usage", lambda folder: disk)
    async with running(Routes()) as batches:
        await upload(batches, bytes(10))
        batch = await begin(batches, lines(range(3)))
        disk.free = 2**30 - 1
        with pytest.raises(StorageError, match=r"reserved for the output of batches.*Delete files"):
            await upload(batches, bytes(10))
        disk.total = 2**30  # a small one, which keeps a twentieth
        await upload(batches, bytes(10))
        await until(batches, batch, BatchStatus.COMPLETED)


async def test_an_upload_ends_where_the_disk_fills_beside_it(running, monkeypatch) -> None:
    monkeypatch.setattr("penstock.server.batches.file_store._CHECK_EVERY_BYTES", 10_000)
    free = iter([2**40] * 3)
    monkeypatch.setattr(
        "penstock.server.batches.file_store.shutil.disk_usage",
        lambda folder: SimpleNamespace(total=2**40, free=next(free, 0)),
    )
    async with running(Routes()) as batches:
        with pytest.raises(StorageError, match="almost full"):
            await upload(batches, bytes(100_000))
        assert not list(batches.files.path("x").parent.iterdir())


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    settings = ServerSettings(data_dir=tmp_path / "data")
    (tmp_path / "data").mkdir()
    with closing(sqlite3.connect(tmp_path / "data" / "penstock.db", isolation_level=None)) as database:
        database.execute("PRAGMA user_version = 9")
    for _ in range(2):  # the lock has been given back
        with pytest.raises(UsageError, match="format 9"):
            Batches(settings)
    (tmp_path / "data" / "penstock.db").write_bytes(b"no database" * 100)
    with pytest.raises(UsageError, match="not a database"):
        Batches(settings)


def test_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        Batches(ServerSettings(data_dir=tmp_path / "file" / "data"))


async def test_waiting_batches_hold_no_lines(running) -> None:
    routes = Routes()
    routes.gate.clear()
    async with running(routes, batch_memory=1_000_000) as batches:
        file_id = await upload(batches, lines(range(3), text="x" * 400_000))
        gc.collect()
        tracemalloc.start()
        try:
            made = [await create(batches, file_id) for _ in range(24)]
            for batch in made:
                await until(batches, batch, BatchStatus.IN_PROGRESS)
            await until_asked(routes, 0)
            waiting, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            for batch in made:
                await batches.cancel(batch.id, "me")
            for batch in made:
                await until(batches, batch, BatchStatus.CANCELLED)
            _, cancelled = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # orjson reserves eight times the length of the line that runs.
        assert waiting < 6_000_000, "24 batches wait, and more than one of them has read a line"
        assert cancelled < 22_000_000, "24 batches read their lines at once"
        assert (await batches.find(made[0].id, "me")).num_failed == 3


async def test_bytes_of_lines_are_bounded_over_all_batches(running) -> None:
    routes = Routes()
    async with running(routes, batch_memory=35_000) as batches:
        file_ids = [await upload(batches, lines(range(i, i + 30), text="x" * 10_000)) for i in (0, 30, 60)]
        large = await upload(batches, lines(range(90, 92), text="x" * 100_000))
        made = [await create(batches, file_id) for file_id in [*file_ids, large]]
        for batch in made:
            assert (await until(batches, batch, BatchStatus.COMPLETED)).num_failed == 0
        assert 100_000 < routes.most_bytes_at_once < 101_000, "a line above the bound runs alone"
        routes.most_bytes_at_once = 0
        for batch in [await create(batches, file_id) for file_id in file_ids]:
            await until(batches, batch, BatchStatus.COMPLETED)
        assert 0 < routes.most_bytes_at_once < 35_000


@pytest.mark.parametrize("how", ["a line", "the journal", "the check", "the key", "the file"])
async def test_failed_batch_is_freed_without_garbage_collector(running, monkeypatch, caplog, how: str) -> None:
    caplog.set_level(logging.CRITICAL, "penstock.server.batches")  # pytest keeps the frames of logged errors

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError

    def answer(number: int) -> int:
        if number == 2 and how == "a line":
            fail()
        return 401 if number == 2 and how == "the key" else 200

    if how == "the check":
        monkeypatch.setattr(BatchInput, "check", fail)
    if how == "the journal":
        monkeypatch.setattr(OutputWriter, "_append", fail)
    async with running(Routes(answer)) as batches:
        gc.collect()
        gc.disable()
        try:
            batch = await begin(batches, lines(range(4)))
            run = weakref.ref(batches._runs[batch.id][0])
            if how == "the file":
                batches.files.path(batch.input_file_id).unlink()
            await until(batches, batch, BatchStatus.CANCELLED if how == "the key" else BatchStatus.FAILED)
            async with asyncio.timeout(TIMEOUT_S):
                while run() is not None:
                    await asyncio.sleep(0.005)
        finally:
            gc.enable()


@pytest.mark.parametrize("how", ["completed", "cancelled", "failed"])
async def test_ended_batches_leave_no_line_in_memory(running, caplog, how: str) -> None:
    """Nothing waits for the garbage collector: it may come late."""
    caplog.set_level(logging.CRITICAL, "penstock.server.batches")  # pytest keeps the frames of logged errors
    routes = Routes(lambda number: 1 // 0 if how == "failed" and number == 2 else 200)
    if how == "cancelled":
        routes.gate.clear()
    async with running(routes) as batches:
        file_id = await upload(batches, lines(range(4), text="x" * 1_000_000))
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(3):
                batch = await create(batches, file_id)
                if how == "cancelled":
                    await until(batches, batch, BatchStatus.IN_PROGRESS)
                    await until_asked(routes, 0)
                    routes.asked.clear()
                    await batches.cancel(batch.id, "me")
                await until(batches, batch, BatchStatus(how))
            async with asyncio.timeout(TIMEOUT_S):
                while tracemalloc.get_traced_memory()[0] > 900_000:  # a thread may still drop its last line
                    await asyncio.sleep(0.01)
        finally:
            tracemalloc.stop()
            gc.enable()


async def test_120_requests_at_once_make_32_batches(running) -> None:
    routes = Routes()
    routes.gate.clear()
    async with running(routes) as batches:
        file_id = await upload(batches, lines(range(1)))
        made = await asyncio.gather(*(create(batches, file_id) for _ in range(120)), return_exceptions=True)
        assert Counter(type(each) for each in made) == {BatchRecord: MOST_UNFINISHED, EngineOverloadedError: 88}
        other = await upload(batches, lines(range(1)), owner="other")
        assert isinstance(await create(batches, other, owner="other"), BatchRecord)
        await batches.cancel(next(each.id for each in made if isinstance(each, BatchRecord)), "me")
        async with asyncio.timeout(TIMEOUT_S):
            while sum(batches.num_unfinished().values()) > MOST_UNFINISHED:
                await asyncio.sleep(0.005)
        assert isinstance(await create(batches, file_id), BatchRecord)


async def test_file_is_not_removed_while_a_batch_is_made_of_it(running) -> None:
    async with running(Routes()) as batches:
        for _ in range(20):
            file_id = await upload(batches, lines(range(1)))
            made, removed = await asyncio.gather(
                create(batches, file_id), batches.remove_file(file_id, "me"), return_exceptions=True
            )
            assert {type(made), type(removed)} in ({BatchRecord, ConflictError}, {UnknownObjectError, type(None)})
            if isinstance(made, BatchRecord):
                await until(batches, made, BatchStatus.COMPLETED)


async def test_parallel_uploads_stay_within_the_limits(running, monkeypatch) -> None:
    monkeypatch.setattr("penstock.server.batches.file_store.MOST_LARGE_FILES", 2)
    async with running(Routes(), max_file_bytes=1000, max_files=5) as batches:
        sent = await asyncio.gather(*(upload(batches, b"") for _ in range(30)), return_exceptions=True)
        assert Counter(type(each) for each in sent) == {str: 5, LimitError: 25}
        refusal = next(each for each in sent if isinstance(each, HTTPException))
        assert (refusal.status_code, "--max-files" in refusal.detail) == (413, True)
        sent = await asyncio.gather(*(upload(batches, b"", owner="other") for _ in range(2)))
        await asyncio.gather(*(batches.remove_file(file_id, "other") for file_id in sent))
        sent = await asyncio.gather(
            *(upload(batches, bytes(900), owner="other") for _ in range(5)), return_exceptions=True
        )
        assert Counter(type(each) for each in sent) == {str: 2, LimitError: 3}
        assert len(list(batches.files.path("x").parent.iterdir())) == 7


async def test_batches_leave_room_for_the_files_they_make(running) -> None:
    routes = Routes()
    routes.gate.clear()
    async with running(routes, max_files=5) as batches:
        file_id = await upload(batches, lines(range(1)))
        made = await asyncio.gather(*(create(batches, file_id) for _ in range(5)), return_exceptions=True)
        assert Counter(type(each) for each in made) == {BatchRecord: 2, LimitError: 3}


async def test_ended_batch_expires_with_its_files(running, clock) -> None:
    routes = Routes(lambda number: 400 if number == 1 else 200)
    async with running(routes, batch_retention_s=5 * DAY_S) as batches:
        shared = await upload(batches, lines(range(3)), seconds=30 * DAY_S)
        first = await until(batches, await create(batches, shared), BatchStatus.COMPLETED)
        unused = await upload(batches, b"x", seconds=30 * DAY_S)
        clock.now_s += 4 * DAY_S
        routes.holds = lambda number: number == 2
        routes.gate.clear()
        second = await create(batches, shared, hours=168)
        await until(batches, second, BatchStatus.IN_PROGRESS)
        assert (await batches.files.find(first.output_id, "me")).expires_at == first.completed_at + 5 * DAY_S
    clock.now_s += DAY_S
    async with running(routes, batch_retention_s=5 * DAY_S) as batches:
        await batches.sweep()
        with pytest.raises(UnknownObjectError, match=first.id):
            await batches.find(first.id, "me")
        for file_id in (first.output_id, first.error_id):
            with pytest.raises(UnknownObjectError, match=file_id):
                await batches.files.find(file_id, "me")
            assert not batches.files.path(file_id).exists()
        assert batches.files.path(shared).exists(), "the second batch reads it"
        clock.now_s += 0.5 * DAY_S
        await batches.sweep()
        routes.gate.set()
        second = await until(batches, second, BatchStatus.COMPLETED)
        assert batches.files.path(second.output_id).exists()
        clock.now_s += 5 * DAY_S
        await batches.sweep()
        assert await batches.page("me", Page(None, 100)) == []
        assert [path.name for path in batches.files.path("x").parent.iterdir()] == [unused], "it has its own expiry"


async def test_batches_beyond_the_limit_are_forgotten(running, clock) -> None:
    async with running(Routes(), max_files=4) as batches:
        made = []
        for _ in range(7):
            batch = await begin(batches, b"")
            made.append(await until(batches, batch, BatchStatus.FAILED))
            await batches.remove_file(batch.input_file_id, "me")
            async with asyncio.timeout(TIMEOUT_S):
                while batches.num_unfinished():
                    await asyncio.sleep(0.005)
        kept = [batch.id for batch in await batches.page("me", Page(None, 100))]
        assert kept == [batch.id for batch in made[:1:-1]]


def killed(folder: Path, copy: Path) -> Path:
    """Return the data folder as a killed server would leave it."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("lock"))
    return copy


async def test_line_that_ran_alone_in_two_kills_fails(running, tmp_path: Path) -> None:
    routes = Routes()
    routes.holds = lambda number: number == 7
    routes.gate.clear()
    folder = tmp_path / "data"
    for num_kills in range(1, 4):
        async with running(routes, folder) as batches:
            if num_kills == 1:
                batch = await begin(batches, lines(range(40)))
            await until_asked(routes, 7)
            if num_kills == 1:
                await until_done(batches, batch, 7)
            folder = killed(folder, tmp_path / f"kill {num_kills}")
        assert routes.asked[7] == 1
        routes.asked.clear()
    async with running(routes, folder) as batches:
        batch = await until(batches, batch, BatchStatus.COMPLETED)
        output, errors = written(batches, batch)
        assert (sorted(output, key=int), errors) == ([str(i) for i in range(40) if i != 7], ["7"])
        assert not routes.asked[7]
        (line,) = batches.files.path(batch.error_id).read_text().splitlines()
        assert json.loads(line)["error"]["code"] == "server_crashed"


async def test_suspects_run_one_at_a_time_after_a_kill(running, tmp_path: Path) -> None:
    routes = Routes()
    routes.holds = lambda number: number % 100 in (30, 31)
    routes.gate.clear()
    async with running(routes) as batches:
        made = [await begin(batches, lines(range(i, i + 60))) for i in (0, 100)]
        for number in (30, 31, 130, 131):
            await until_asked(routes, number)
        folder = killed(tmp_path / "data", tmp_path / "killed")
    routes.gate.set()
    routes.most_at_once = 0
    async with running(routes, folder) as batches:
        for batch in made:
            batch = await until(batches, batch, BatchStatus.COMPLETED)
            assert (batch.num_completed, batch.num_failed) == (60, 0)
    assert routes.most_at_once == 1


async def test_clean_stop_raises_no_suspicion(running, tmp_path: Path) -> None:
    routes = Routes()
    async with running(routes) as batches:
        routes.gate.clear()
        batch = await begin(batches, lines(range(200)))
        await until_asked(routes, 0)
    with closing(sqlite3.connect(tmp_path / "data" / "penstock.db")) as database:
        counts = "SELECT (SELECT count(*) FROM begun), (SELECT count(*) FROM suspects)"
        assert database.execute(counts).fetchone() == (0, 0)
    routes.gate.set()
    async with running(routes) as batches:
        await until(batches, batch, BatchStatus.COMPLETED)
    assert routes.most_at_once > 1


async def test_file_whose_check_kills_the_server_fails(running, tmp_path: Path, monkeypatch) -> None:
    folder, checking, gate = tmp_path / "data", threading.Event(), threading.Event()
    check = BatchInput.check

    def check_behind_gate(file: BatchInput) -> object:
        checking.set()
        gate.wait(TIMEOUT_S)
        return check(file)

    monkeypatch.setattr(BatchInput, "check", check_behind_gate)
    for num_kills in range(1, 3):
        async with running(Routes(), folder) as batches:
            if num_kills == 1:
                batch = await begin(batches, lines(range(3)))
            assert await asyncio.to_thread(checking.wait, TIMEOUT_S)
            folder = killed(folder, tmp_path / f"kill {num_kills}")
            gate.set()
        checking.clear()
        gate.clear()
    async with running(Routes(), folder) as batches:
        batch = await until(batches, batch, BatchStatus.FAILED)
        assert [error.code for error in batch.errors] == ["server_crashed"]
        assert not checking.is_set()


async def test_suspect_check_waits_for_suspect_lines(running, tmp_path: Path, monkeypatch) -> None:
    """A line that kills the server while the file of another batch is checked fails alone."""
    checking, gate = threading.Event(), threading.Event()
    check = BatchInput.check

    def check_behind_gate(file: BatchInput) -> object:
        checking.set()
        gate.wait(TIMEOUT_S)
        return check(file)

    monkeypatch.setattr(BatchInput, "check", check_behind_gate)
    async with running(Routes()) as batches:
        batch = await begin(batches, lines(range(3)))
        assert await asyncio.to_thread(checking.wait, TIMEOUT_S)
        folder = killed(tmp_path / "data", tmp_path / "killed")
        gate.set()
    checking.clear()
    async with running(Routes(), folder) as batches:
        suspect = batches._context.suspect
        async with suspect, asyncio.timeout(TIMEOUT_S):
            while not suspect._waiters and not checking.is_set():
                await asyncio.sleep(0.005)
            assert not checking.is_set()
        await until(batches, batch, BatchStatus.COMPLETED)


async def test_database_of_the_first_version_is_taken_over(running, tmp_path: Path, clock) -> None:
    async with running(Routes()) as batches:
        batch = await until(batches, await begin(batches, lines(range(2))), BatchStatus.COMPLETED)
    with closing(sqlite3.connect(tmp_path / "data" / "penstock.db")) as database:
        database.executescript(
            "DROP INDEX batches_of_files; DROP INDEX ended_batches; DROP TABLE begun; DROP TABLE suspects;"
            "ALTER TABLE batches DROP COLUMN input_file_id; ALTER TABLE batches DROP COLUMN ended_at;"
            "PRAGMA user_version = 1"
        )
    async with running(Routes()) as batches:
        assert (await batches.find(batch.id, "me")).output_id == batch.output_id
        await until(batches, await begin(batches, lines(range(2))), BatchStatus.COMPLETED)
        clock.now_s += 31 * DAY_S
        await batches.sweep()
        assert await batches.page("me", Page(None, 100)) == []
        assert not list(batches.files.path("x").parent.iterdir())
