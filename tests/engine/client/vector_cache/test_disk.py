"""Rows on disk: shared by processes, bounded in size, and never wrong, even if the file is damaged."""

import contextlib
import errno
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lmdb
import pytest

from penstock.engine.client.vector_cache.disk import DiskError, DiskFullError, DiskTier, SharedTier, seal, unseal

from ....clock import Clock
from ....waiting import wait_until
from .sharing import key_of, row_of

MIB = 2**20
SHARING = str(Path(__file__).with_name("sharing.py"))


def rows(first: int, last: int) -> list[tuple[bytes, bytes]]:
    return [(key_of(number), row_of(number)) for number in range(first, last)]


def numbers_in(tier: DiskTier, last: int) -> list[int]:
    """Returns the numbers of the rows below `last` that the tier has, and checks the rows."""
    found = tier.read([key_of(number) for number in range(last)])
    assert all(row in (None, row_of(number)) for number, row in enumerate(found))
    return [number for number, row in enumerate(found) if row is not None]


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    tier = DiskTier(tmp_path / "filled", 4 * MIB)
    tier.write(rows(0, 500))
    tier.close()
    return tmp_path / "filled"


def test_only_the_sealed_row_is_unsealed() -> None:
    key, row = key_of(1), row_of(1)[:50]
    sealed = seal(key, row)
    assert unseal(key, sealed) == row
    for place in range(len(sealed)):
        damaged = bytearray(sealed)
        damaged[place] ^= 1
        assert unseal(key, bytes(damaged)) is None
        assert unseal(key, sealed[:place]) is None
    assert unseal(key, sealed + b"\0") is None
    assert unseal(key_of(2), sealed) is None


# One process


def test_rows_are_found_after_a_restart(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 8 * MIB)
    tier.write(rows(0, 100))
    tier.write(rows(50, 120))
    tier.close()
    again = DiskTier(tmp_path / "cache", 99 * MIB)
    assert numbers_in(again, 200) == list(range(120))
    assert again.max_bytes == 8 * MIB  # the size of the existing file
    assert again.secret == tier.secret
    again.close()


def test_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "cache"
    DiskTier(folder, MIB).close()
    paths = [folder, *folder.rglob("*")]
    assert {path.name for path in paths} == {"cache", "lock", "secret", "vectors-1", "data.mdb", "lock.mdb"}
    assert (folder / "vectors-1" / "lock.mdb").stat().st_size == 64 * 1024  # allocated, for 1,000 threads
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_files_that_others_may_have_made_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    DiskTier(folder, MIB).close()
    for name, mode in (("", 0o777), ("secret", 0o644), ("lock", 0o666), ("vectors-1", 0o777)):
        before = (folder / name).stat().st_mode
        (folder / name).chmod(mode)
        with pytest.raises(DiskError, match="every user"):
            DiskTier(folder, MIB)
        (folder / name).chmod(before)
    for name in ("vectors-1/data.mdb", "vectors-1/lock.mdb", "secret"):
        (folder / name).rename(tmp_path / "elsewhere")
        (folder / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(DiskError, match="is a link"):
            DiskTier(folder, MIB)
        (tmp_path / "elsewhere").replace(folder / name)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(DiskError, match="belongs to another user"):
        DiskTier(folder, MIB)
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"Not a directory|File exists"):
        DiskTier(tmp_path / "file", MIB)


def test_oldest_rows_are_evicted(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    tier.write([(bytes(32), bytes(MIB))])  # too large
    assert tier.read([bytes(32)]) == [None]
    for first in range(0, 6_000, 100):
        tier.write(rows(first, first + 100))
        assert tier.num_bytes() <= tier.max_bytes
        assert tier._used_bytes() <= 0.77 * tier.max_bytes
    left = numbers_in(tier, 6_000)
    assert left == list(range(left[0], 6_000))
    assert tier.num_evicted == left[0]
    assert sum(len(row_of(number)) for number in left) > 0.4 * 4 * MIB
    assert sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*")) < 4.2 * MIB
    tier.close()


def test_transaction_is_limited_and_waits_for_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, pauses_s = DiskTier(tmp_path, 4 * MIB), list[float]()
    lengths = (32_760, 32_760, 32_760, 65_528, 65_529)
    batches = tier._batches([(key_of(number), bytes(length)) for number, length in enumerate(lengths)])
    assert [[len(sealed) for _, sealed in batch] for batch in batches] == [[32_768] * 2, [32_768], [65_536]]
    monkeypatch.setattr(time, "sleep", pauses_s.append)
    for num_failures in (5, 6):
        put = Mock(side_effect=[lmdb.MapFullError()] * num_failures + [None])
        monkeypatch.setattr(tier, "_put", put)
        with pytest.raises(DiskFullError) if num_failures == 6 else contextlib.nullcontext():
            tier.write(rows(0, 1))
        assert (put.call_count, pauses_s) == (6, [0.01, 0.03, 0.1, 0.3, 1.0] * (num_failures - 4))
    tier.close()


# Several processes


def test_rows_stay_right_while_others_write(tmp_path: Path) -> None:
    command = [sys.executable, "-P", SHARING, str(tmp_path)]
    workers = [
        subprocess.Popen([*command, str(seed), "14", str(4 * MIB)], stdout=subprocess.PIPE, text=True)
        for seed in range(3)
    ]
    ends = [worker.communicate(timeout=280)[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 3
    found, wrong, evicted = (sum(map(int, column)) for column in zip(*ends, strict=True))
    assert wrong == 0
    assert min(found, evicted) > 0


def test_killed_process_leaves_no_lock_and_no_wrong_row(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    for seed in range(3):
        before, num_bytes = numbers_in(tier, 6_000), tier.num_bytes()
        victim = subprocess.Popen([sys.executable, "-P", SHARING, str(tmp_path), str(seed), "100000", "0"])
        wait_until(lambda before=before: numbers_in(tier, 6_000) != before)
        assert seed or tier.num_bytes() > num_bytes
        time.sleep(0.05 * seed)
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
        tier.write(rows(6_000, 6_010))
        assert numbers_in(tier, 6_000)
        assert 0 < tier.num_bytes() <= 4 * MIB
    tier.close()


# Damage


@pytest.mark.parametrize("num_bytes", [1, 10_000])
def test_truncated_file_is_rejected(filled: Path, num_bytes: int) -> None:
    os.truncate(filled / "vectors-1" / "data.mdb", num_bytes)
    with pytest.raises(DiskError, match=r"a part of it is missing|MDB_INVALID|not an LMDB file"):
        DiskTier(filled, 4 * MIB)


def test_damaged_row_is_replaced(filled: Path) -> None:
    file = filled / "vectors-1" / "data.mdb"
    row = row_of(7)
    file.write_bytes(file.read_bytes().replace(row, b"\1" + row[1:]))
    tier = DiskTier(filled, 0)
    assert tier.read([key_of(6), key_of(7)]) == [row_of(6), None]
    assert tier.num_damaged == 1
    tier.write(rows(7, 8))
    assert tier.read([key_of(7)]) == [row_of(7)]
    tier.close()


# SharedTier


async def test_queued_rows_are_written_before_the_end(tmp_path: Path) -> None:
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
    assert again.num_bytes() == again.tier.num_bytes() > 500 * 1_500
    again.close()


async def test_full_disk_is_written_again_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock, num_writes, has_room = Clock(), 0, False
    write = DiskTier.write

    def fail(tier: DiskTier, rows: Any) -> None:
        nonlocal num_writes
        num_writes += 1
        if not has_room:
            raise DiskFullError("No space left on device")
        write(tier, rows)

    monkeypatch.setattr(DiskTier, "write", fail)
    shared = SharedTier(tmp_path, MIB, clock_s=clock)
    for number, clock.now_s in enumerate((0.0, 1.0, 29.0)):
        shared.put(key_of(number), row_of(number))
        wait_until(lambda number=number: shared.num_dropped == number + 1)
    assert (num_writes, shared.is_working) == (1, False)
    assert await shared.find([key_of(1)]) == [None]
    has_room, clock.now_s = True, 30.0
    shared.put(key_of(5), row_of(5))
    wait_until(lambda: shared.is_working)
    assert await shared.find([key_of(5)]) == [row_of(5)]
    shared.close()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, messages
    assert "No space left" in messages[0]
    assert "writing vectors again" in messages[1]


@pytest.mark.parametrize(("num_free", "error"), [(MIB // 16, DiskError), (MIB // 16 - 1, DiskFullError)])
def test_io_error_is_a_full_disk_if_a_transaction_does_not_fit(tmp_path, monkeypatch, num_free: int, error) -> None:
    """LMDB reports EIO after a partial write. One transaction takes a 64th of the file."""

    def allocate(_: int, start: int, num_bytes: int) -> None:
        if start + num_bytes > num_free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tier = DiskTier(tmp_path, 4 * MIB)
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    monkeypatch.setattr(tier, "_put", Mock(side_effect=lmdb.Error(os.strerror(errno.EIO))))
    with pytest.raises(DiskError) as failed:
        tier.write(rows(0, 1))
    assert type(failed.value) is error
    tier.close()


async def test_at_most_64_mib_of_rows_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(DiskTier, "write", lambda tier, rows: written.extend(key for key, _ in rows))
    shared = SharedTier(tmp_path, MIB)
    with shared._wake:  # the thread takes no rows meanwhile
        shared.put(key_of(0), bytes(64 * MIB))
        shared.put(key_of(1), b"a")
        assert shared.num_dropped == 1
    wait_until(lambda: written == [key_of(0)])
    shared.put(key_of(2), b"a")
    shared.close()
    assert written == [key_of(0), key_of(2)]


async def test_damaged_file_is_not_used_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared = SharedTier(tmp_path, MIB)
    num_bytes = shared.num_bytes()
    os.truncate(tmp_path / "vectors-1" / "data.mdb", 8192)
    for _ in range(3):
        assert await shared.find([key_of(1)] * 2) == [None, None]
        shared.put(key_of(1), row_of(1))
    assert (shared.is_working, shared.num_dropped, shared.num_bytes()) == (False, 3, num_bytes)
    shared.close()
    (record,) = caplog.records
    assert "remove it and restart" in record.getMessage()
