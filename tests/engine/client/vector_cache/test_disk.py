"""Rows on disk: shared by processes, of a bounded size, and never a wrong one, whatever has happened to the file."""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.engine.client.vector_cache.disk import DiskError, DiskTier

from ....waiting import wait_until
from .sharing import key_of, row_of

MIB = 2**20
SHARING = str(Path(__file__).with_name("sharing.py"))


def rows(first: int, last: int) -> list[tuple[bytes, bytes]]:
    return [(key_of(number), row_of(number)) for number in range(first, last)]


def numbers_in(tier: DiskTier, last: int) -> list[int]:
    """The rows that are there, all of them right."""
    found = tier.read([key_of(number) for number in range(last)])
    assert all(row in (None, row_of(number)) for number, row in enumerate(found))
    return [number for number, row in enumerate(found) if row is not None]


def test_what_one_has_written_another_reads(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "cache", 8 * MIB)
    tier.write(rows(0, 100))
    tier.write(rows(50, 120))
    tier.close()
    again = DiskTier(tmp_path / "cache", 99 * MIB)
    assert numbers_in(again, 200) == list(range(120))
    assert again.max_bytes == 8 * MIB  # that of the file
    assert again.secret == tier.secret
    again.close()


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "a" / "cache", MIB)
    tier.close()
    paths = [tmp_path / "a" / "cache", *(tmp_path / "a" / "cache").rglob("*")]
    assert {path.name for path in paths} == {"cache", "lock", "secret", "vectors-1", "data.mdb", "lock.mdb"}
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_what_others_may_have_made_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    folder.chmod(0o770)  # for a group
    DiskTier(folder, MIB).close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(DiskError, match="belongs to another user"):
        DiskTier(folder, MIB)


def test_half_a_secret_is_replaced(tmp_path: Path) -> None:
    DiskTier(tmp_path, MIB).close()
    (tmp_path / "secret").write_bytes(b"half")
    tier = DiskTier(tmp_path, MIB)
    assert len(tier.secret) == 32
    tier.close()
    assert (tmp_path / "secret").read_bytes() == tier.secret


def test_the_rows_that_came_first_leave_when_it_is_full(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    for first in range(0, 6_000, 100):
        tier.write(rows(first, first + 100))
        assert tier.num_bytes() <= tier.max_bytes
    left = numbers_in(tier, 6_000)
    assert left == list(range(left[0], 6_000))
    assert tier.num_evicted == left[0]
    held = sum(len(row_of(number)) for number in left) / (4 * MIB)
    on_disk = sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*"))
    print(f"{len(left)} rows, {held:.0%} of the file; {on_disk / MIB:.1f} MiB on disk")
    assert held > 0.4
    assert on_disk < 4.2 * MIB
    tier.close()


def test_rows_stay_right_while_others_write(tmp_path: Path) -> None:
    command = [sys.executable, "-P", SHARING, str(tmp_path)]
    workers = [
        subprocess.Popen([*command, str(seed), "10", str(4 * MIB)], stdout=subprocess.PIPE, text=True)
        for seed in range(8)
    ]
    ends = [worker.communicate(timeout=280)[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 8
    found, wrong, evicted = (sum(map(int, column)) for column in zip(*ends, strict=True))
    print(f"8 processes, {8 * 10 * 100} look-ups: {found} found, {wrong} wrong, {evicted} rows evicted")
    assert wrong == 0
    assert min(found, evicted) > 0


def test_a_process_that_is_killed_leaves_no_lock_and_no_wrong_row(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    for seed in range(4):
        before = numbers_in(tier, 6_000)
        victim = subprocess.Popen([sys.executable, "-P", SHARING, str(tmp_path), str(seed), "100000", "0"])
        wait_until(lambda before=before: numbers_in(tier, 6_000) != before)
        time.sleep(0.05 * seed)
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
        tier.write(rows(6_000, 6_010))
        assert numbers_in(tier, 6_000)
        assert 0 < tier.num_bytes() <= 4 * MIB
    tier.close()


def read_in_another_process(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", SHARING, str(folder), "1", "20", str(4 * MIB)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    tier = DiskTier(tmp_path / "filled", 4 * MIB)
    tier.write(rows(0, 500))
    tier.close()
    return tmp_path / "filled"


@pytest.mark.parametrize("num_bytes", [1, 4_000, 8_192, 10_000, MIB // 2])
def test_a_file_that_has_lost_its_end_is_refused_and_not_touched(filled: Path, num_bytes: int) -> None:
    os.truncate(filled / "vectors-1" / "data.mdb", num_bytes)
    with pytest.raises(DiskError, match=r"a part of it is missing|MDB_INVALID|not an LMDB file"):
        DiskTier(filled, 4 * MIB)


def test_a_file_that_loses_its_end_while_it_is_open_is_not_touched(filled: Path) -> None:
    tier = DiskTier(filled, 4 * MIB)
    os.truncate(filled / "vectors-1" / "data.mdb", 8_192)
    for use in (lambda: tier.read([key_of(1)]), lambda: tier.write(rows(0, 1))):
        with pytest.raises(DiskError, match="a part of the file is missing"):
            use()
    tier.close()


@pytest.mark.parametrize("seed", range(6))
def test_random_damage_gives_an_error_or_misses(filled: Path, seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    file = shutil.copytree(filled, tmp_path / "damaged") / "vectors-1" / "data.mdb"
    content = bytearray(file.read_bytes())
    used = 2 * MIB
    if seed % 2:
        for _ in range(2_000):
            content[chance.randrange(used)] = chance.randrange(256)
    else:
        first = chance.randrange(0 if seed else 1, used // 4096) * 4096
        content[first : first + 100 * 4096] = os.urandom(100 * 4096)
    file.write_bytes(content)
    done = read_in_another_process(tmp_path / "damaged")
    if done.returncode:
        assert "DiskError" in done.stderr, (done.returncode, done.stderr)
    print((done.stdout or done.stderr).splitlines()[-1])


def test_a_damaged_row_is_replaced(filled: Path) -> None:
    file = filled / "vectors-1" / "data.mdb"
    row = row_of(7)
    file.write_bytes(file.read_bytes().replace(row, b"\1" + row[1:]))
    tier = DiskTier(filled, 0)
    assert tier.read([key_of(6), key_of(7)]) == [row_of(6), None]
    assert tier.num_damaged == 1
    tier.write(rows(7, 8))
    assert tier.read([key_of(7)]) == [row_of(7)]
    tier.close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"Not a directory|File exists"):
        DiskTier(tmp_path / "file", MIB)


def test_size_counts_rows_of_other_processes(tmp_path: Path) -> None:
    reader = DiskTier(tmp_path / "cache", 8 * MIB)
    before = reader.num_bytes()
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from penstock.engine.client.vector_cache.disk import DiskTier\n"
        "DiskTier(Path(sys.argv[1]), 1).write([(bytes([i]) * 32, bytes(1000)) for i in range(200)])"
    )
    subprocess.run([sys.executable, "-P", "-c", code, str(tmp_path / "cache")], check=True)
    assert reader.num_bytes() > before
    reader.close()
