"""What becomes of the disk's troubles: nothing is lost but time, and the log says it once."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.client.vector_cache.disk import DiskError, DiskTier, NoRoomError, SharedTier

from ....waiting import wait_until
from .sharing import key_of, row_of

MIB = 2**20


async def test_what_was_put_is_there_after_the_end(tmp_path: Path) -> None:
    shared = SharedTier(tmp_path, 16 * MIB)
    for number in range(500):
        shared.put(key_of(number), row_of(number))
    shared.close()
    again = SharedTier(tmp_path, 0)
    keys = [key_of(number) for number in range(600)]
    found = await again.find(keys)  # so many that a thread reads them
    assert found == [row_of(number) for number in range(500)] + [None] * 100
    assert await again.find(keys[:100]) == found[:100]
    assert await again.find([]) == []
    again.close()


async def test_more_than_can_wait_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_writing, gate = threading.Event(), threading.Event()

    def write(*_: object) -> None:
        is_writing.set()
        gate.wait(280)

    monkeypatch.setattr(DiskTier, "write", write)
    shared = SharedTier(tmp_path, MIB)
    shared.put(key_of(100), b"row")
    assert is_writing.wait(120)
    for number in range(100):
        shared.put(key_of(number), bytes(MIB))
    assert shared.num_dropped == 36
    gate.set()
    shared.close()


async def test_a_full_disk_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now_s, num_tries, has_room = 0.0, 0, False
    write = DiskTier.write

    def fail(tier: DiskTier, rows: Any) -> None:
        nonlocal num_tries
        num_tries += 1
        if not has_room:
            raise NoRoomError("No space left on device")
        write(tier, rows)

    monkeypatch.setattr(DiskTier, "write", fail)
    shared = SharedTier(tmp_path, MIB, clock_s=lambda: now_s)
    for number in range(3):
        shared.put(key_of(number), row_of(number))
        wait_until(lambda number=number: shared.num_dropped == number + 1)
    assert (num_tries, shared.is_working) == (1, False)
    assert await shared.find([key_of(1)]) == [None]
    has_room, now_s = True, 1_000.0
    shared.put(key_of(5), row_of(5))
    wait_until(lambda: shared.is_working)
    assert await shared.find([key_of(5)]) == [row_of(5)]
    shared.close()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, messages
    assert "No space left" in messages[0]
    assert "written again" in messages[1]


async def test_a_damaged_file_is_not_touched_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared = SharedTier(tmp_path, MIB)
    os.truncate(tmp_path / "vectors-1" / "data.mdb", 8192)
    for _ in range(3):
        assert await shared.find([key_of(1)] * 2) == [None, None]
        shared.put(key_of(1), row_of(1))
    assert (shared.is_working, shared.num_dropped) == (False, 3)
    shared.close()
    (record,) = caplog.records
    assert "remove the folder" in record.getMessage()
    with pytest.raises(DiskError, match="a part of it is missing"):
        SharedTier(tmp_path, MIB)
