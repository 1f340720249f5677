"""Limits and expiry of files and batches."""

import asyncio
import os
import sqlite3
import stat
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from fastapi import HTTPException

from penstock.engine.protocol.errors import EngineOverloadedError, StorageError, UnknownObjectError
from penstock.server.admission import LimitError
from penstock.server.batches.batch_run import BatchRun
from penstock.server.batches.database import BatchDatabase, Page
from penstock.server.batches.records import BatchRecord, BatchStatus
from penstock.server.batches.service import MAX_UNFINISHED, BatchMetrics, BatchService

from ...waiting import until
from .helpers import DAY_S, Routes, begin, create, lines, until_status, upload


def num_files(batches) -> int:
    return len(list(batches.files.path("x").parent.iterdir()))


async def test_bytes_of_an_owner_are_limited(running, monkeypatch) -> None:
    monkeypatch.setattr("penstock.server.batches.file_store.MAX_LARGE_FILES", 3)
    async with running(Routes(), max_file_bytes=1024) as batches:
        files = [await upload(batches, bytes(1000)) for _ in range(3)]
        with pytest.raises(HTTPException, match=r"would take 3100 bytes; the limit is 3072.*delete some") as rejected:
            await upload(batches, bytes(100))
        assert rejected.value.status_code == 413
        await upload(batches, bytes(1000), owner="other")
        await upload(batches, bytes(72))
        num_before = num_files(batches)
        with pytest.raises(HTTPException, match="3073 bytes; the limit is 3072"):
            await upload(batches, b"")
        await batches.remove_file(files[0], "me")
        both = await asyncio.gather(*(upload(batches, bytes(600)) for _ in range(2)), return_exceptions=True)
        assert {type(each) for each in both} == {str, LimitError}
        assert num_files(batches) == num_before


async def test_number_of_files_is_limited_for_parallel_uploads(running) -> None:
    routes = Routes()
    routes.gate.clear()
    async with running(routes, max_files=5) as batches:
        sent = await asyncio.gather(*(upload(batches, b"") for _ in range(30)), return_exceptions=True)
        assert Counter(type(each) for each in sent) == {str: 5, LimitError: 25}
        rejection = next(each for each in sent if isinstance(each, HTTPException))
        assert (rejection.status_code, "--max-files" in rejection.detail) == (413, True)
        file_id = await upload(batches, lines(range(1)), owner="other")
        created = await asyncio.gather(
            *(create(batches, file_id, owner="other") for _ in range(5)), return_exceptions=True
        )
        # Each batch reserves two output files.
        assert Counter(type(each) for each in created) == {BatchRecord: 2, LimitError: 3}
        file_id = await upload(batches, lines(range(1)), owner="third")
        batches.files._running_uploads["third"] = [Mock()] * 3  # running uploads
        with pytest.raises(LimitError, match="would be 6; the limit is 5"):
            await create(batches, file_id, owner="third")


async def test_uploads_leave_disk_space_for_outputs(running, monkeypatch) -> None:
    disk = SimpleNamespace(total=100 * 2**30, free=2**30)
    monkeypatch.setattr("penstock.server.batches.file_store.shutil.disk_usage", lambda folder: disk)
    async with running(Routes()) as batches:
        await upload(batches, bytes(10))
        disk.free = 2**30 - 1
        with pytest.raises(StorageError, match=r"reserved for the output of batches.*Delete files"):
            await upload(batches, bytes(10))
        disk.total, disk.free = 2**30, 2**30 // 20  # a small disk reserves a twentieth
        await upload(batches, bytes(10))
        disk.free -= 1
        with pytest.raises(StorageError):
            await upload(batches, bytes(10))


async def test_disk_space_is_checked_again_during_an_upload(running, monkeypatch) -> None:
    monkeypatch.setattr("penstock.server.batches.file_store._CHECK_EVERY_BYTES", 4000)
    usage = Mock(return_value=SimpleNamespace(total=2**40, free=2**40))
    monkeypatch.setattr("penstock.server.batches.file_store.shutil.disk_usage", usage)
    async with running(Routes()) as batches:
        await upload(batches, bytes(9_000))  # arrives in 10 parts of 1,000 bytes
        assert usage.call_count == 3
        usage.side_effect = [usage.return_value, SimpleNamespace(total=2**40, free=0)]
        with pytest.raises(StorageError):
            await upload(batches, bytes(10_000))
        assert num_files(batches) == 1


async def test_file_is_on_the_disk_before_it_counts(running, monkeypatch) -> None:
    synced, fsync = Counter(), os.fsync

    def record(descriptor: int) -> None:
        status = os.fstat(descriptor)
        size = status.st_size if stat.S_ISREG(status.st_mode) else 0
        synced[Path(f"/proc/self/fd/{descriptor}").readlink().name, size] += 1
        fsync(descriptor)

    async with running(Routes(lambda number: 400 if number == 1 else 200)) as batches:
        monkeypatch.setattr(os, "fsync", record)
        batch = await until_status(batches, await begin(batches, lines(range(2))), BatchStatus.COMPLETED)
    files = [(file_id, num_bytes) for _, file_id, num_bytes in batch.output_files]
    modes = [batches.files.path(file_id).stat().st_mode & 0o777 for file_id, _ in files]
    files.append((f"{batch.input_file_id}.part", len(lines(range(2)))))
    assert (synced, modes) == ({**dict.fromkeys(files, 1), ("files", 0): 3}, [0o600] * 2)


async def test_number_of_unfinished_batches_is_limited(running) -> None:
    routes = Routes()
    routes.gate.clear()
    async with running(routes) as batches:
        file_id = await upload(batches, lines(range(1)))
        created = await asyncio.gather(*(create(batches, file_id) for _ in range(40)), return_exceptions=True)
        assert Counter(type(each) for each in created) == {BatchRecord: MAX_UNFINISHED, EngineOverloadedError: 8}
        assert {each.retry_after_s for each in created if isinstance(each, EngineOverloadedError)} == {60}
        other = await upload(batches, lines(range(1)), owner="other")
        assert isinstance(await create(batches, other, owner="other"), BatchRecord)
        await batches.cancel(next(each.id for each in created if isinstance(each, BatchRecord)), "me")
        await until(lambda: sum(batches.num_unfinished().values()) == MAX_UNFINISHED)
        assert isinstance(await create(batches, file_id), BatchRecord)


async def test_expired_file_is_removed_unless_a_batch_reads_it(running, clock) -> None:
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


async def test_ended_batch_expires_with_its_files(running, clock) -> None:
    routes = Routes(lambda number: 400 if number == 1 else 200)
    async with running(routes, batch_retention_s=5 * DAY_S) as batches:
        shared = await upload(batches, lines(range(3)), seconds=30 * DAY_S)
        first = await until_status(batches, await create(batches, shared), BatchStatus.COMPLETED)
        unused = await upload(batches, b"x", seconds=30 * DAY_S)
        clock.now_s += 4 * DAY_S
        routes.holds = lambda number: number == 2
        routes.gate.clear()
        second = await create(batches, shared, hours=168)
        await until_status(batches, second, BatchStatus.IN_PROGRESS)
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
        routes.gate.set()
        second = await until_status(batches, second, BatchStatus.COMPLETED)
        await batches.sweep()
        assert batches.files.path(second.output_id).exists()
        clock.now_s += 5 * DAY_S
        await batches.sweep()
        assert await batches.page("me", Page(None, 100)) == []
        assert [path.name for path in batches.files.path("x").parent.iterdir()] == [unused], "it has its own expiry"


async def test_oldest_batches_beyond_the_limit_are_removed(running) -> None:
    async with running(Routes(), max_files=4) as batches:
        created = []
        for _ in range(7):
            batch = await begin(batches, b"")
            created.append(await until_status(batches, batch, BatchStatus.FAILED))
            await batches.remove_file(batch.input_file_id, "me")
            await until(lambda: not batches.num_unfinished())
        left = [batch.id for batch in await batches.page("me", Page(None, 100))]
        assert left == [batch.id for batch in created[:1:-1]]


async def test_input_of_a_new_batch_is_not_removed_with_an_old_one(running) -> None:
    async with running(Routes(), max_files=4) as batches:
        shared, *others = [await upload(batches, b"") for _ in range(2)]
        for file_id in [shared, *others * 4, shared]:
            await until_status(batches, await create(batches, file_id), BatchStatus.FAILED)
            await until(lambda: not batches.num_unfinished())
        assert (await batches.files.find(shared, "me")).id == shared


async def test_failed_disk_stops_neither_the_expiry_nor_the_shutdown(running, monkeypatch, caplog) -> None:
    sweeps: list[int] = []

    async def sweep(_: object) -> None:
        sweeps.append(1)
        raise StorageError("full")

    monkeypatch.setattr("penstock.server.batches.service.SWEEP_EVERY_S", 0.001)
    monkeypatch.setattr(BatchService, "sweep", sweep)
    monkeypatch.setattr(BatchRun, "record_clean_stop", AsyncMock(side_effect=StorageError("full")))
    routes = Routes()
    routes.gate.clear()
    async with running(routes) as batches:
        await begin(batches, lines(range(1)))
        await until(lambda: len(sweeps) > 1)
    assert caplog.messages[0] == "expired files and batches could not be removed: full"
    assert caplog.messages[-1] == "running lines will run one at a time after the next start: full"


async def test_batch_that_cannot_be_completed_continues_after_the_next_start(running, monkeypatch, caplog) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(BatchDatabase, "end", AsyncMock(side_effect=RuntimeError("odd")))
        async with running(Routes()) as batches:
            batch = await begin(batches, lines(range(2)))
            await until(lambda: not batches._runs)
            assert f"{batch.id} cannot be completed; the next start tries again" in caplog.messages
            assert not batches.num_ended.total()
    async with running(Routes()) as batches:
        assert (await until_status(batches, batch, BatchStatus.COMPLETED)).num_completed == 2


async def test_metrics_count_batches_and_lines(running) -> None:
    routes = Routes(lambda number: 400 if number == 1 else 200)
    async with running(routes) as batches:
        await until_status(batches, await begin(batches, lines(range(3))), BatchStatus.COMPLETED)
        await until(lambda: not batches.num_unfinished())
        routes.gate.clear()
        batch = await begin(batches, lines(range(2)))
        await until_status(batches, batch, BatchStatus.IN_PROGRESS)
        samples = [sample for metric in BatchMetrics(batches).collect() for sample in metric.samples]
        found = {(sample.name, *sample.labels.values()): sample.value for sample in samples if sample.value}
        assert found == {
            ("penstock_batches", "in_progress"): 1,
            ("penstock_batches_ended_total", "completed"): 1,
            ("penstock_batch_lines_total", "completed"): 2,
            ("penstock_batch_lines_total", "failed"): 1,
        }
        routes.gate.set()


async def test_database_of_version_1_is_migrated(running, tmp_path: Path, clock) -> None:
    async with running(Routes()) as batches:
        batch = await until_status(batches, await begin(batches, lines(range(2))), BatchStatus.COMPLETED)
    with closing(sqlite3.connect(tmp_path / "data" / "penstock.db")) as database:
        database.executescript(
            "DROP INDEX batches_of_files; DROP INDEX ended_batches;"
            "ALTER TABLE batches DROP COLUMN input_file_id; ALTER TABLE batches DROP COLUMN ended_at;"
            "PRAGMA user_version = 1"
        )
    async with running(Routes()) as batches:
        assert (await batches.find(batch.id, "me")).output_id == batch.output_id
        await until_status(batches, await begin(batches, lines(range(2))), BatchStatus.COMPLETED)
        clock.now_s += 31 * DAY_S
        await batches.sweep()
        assert await batches.page("me", Page(None, 100)) == []
        assert num_files(batches) == 0
