"""The vector cache of real servers: full disks, API keys, restarts."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ..servers import MIB, Launch, Server
from ..waiting import wait_until

pytestmark = pytest.mark.slow
MISSES = "penstock_vector_cache_misses_total"
MEMORY_HITS = "penstock_vector_cache_memory_hits_total"
DISK_HITS = "penstock_vector_cache_disk_hits_total"


@pytest.fixture
def launch_cached(launch: Launch, small_bert: Path) -> Launch:
    """Start a server and wait for its cache."""

    def start(*flags: str, model: Path = small_bert) -> Server:
        server = launch(*flags, model=model)
        wait_until(lambda: server.metric("penstock_vector_cache_open"))
        return server

    return start


def vectors(server: Server, texts: list[str], key: str = "") -> list[list[float]]:
    response = server.embed(texts, **{"authorization": f"Bearer {key}"} if key else {})
    assert response.status_code == 200, response.text
    return [entry["embedding"] for entry in response.json()["data"]]


def tier(server: Server, name: str, metric: str) -> float:
    return server.metric(f'penstock_vector_cache_{metric}{{tier="{name}"}}')


def errors(server: Server) -> list[str]:
    return [line for line in server.log.read_text().splitlines() if "--cache-dir" in line]


def embed_until(server: Server, condition: Callable[[], object], num_texts: int = 100) -> None:
    """Embed new texts until a condition holds."""
    number = iter(range(10**9))

    def embed() -> object:
        vectors(server, [f"new {condition} {next(number)}" for _ in range(num_texts)])
        return condition()

    wait_until(embed)


def check_works_without_disk(server: Server, reason: str) -> None:
    """Requests succeed; one log line and one metric report the failed disk tier."""
    texts = [f"text {number}" for number in range(40)]
    assert vectors(server, texts) == vectors(server, texts)
    assert tier(server, "disk", "working") == 0
    assert tier(server, "memory", "working") == 1
    (line,) = errors(server)
    assert reason in line
    assert "Traceback" not in server.log.read_text()


def test_cache_starts_on_a_full_disk(launch_cached: Launch, small_disk) -> None:
    disk = small_disk(4 * MIB)
    disk.fill()
    server = launch_cached("--cache", "1MiB", "--cache-dir", str(disk.folder / "cache"))
    check_works_without_disk(server, "No space left on device")


@pytest.mark.parametrize("is_filled_by_others", [True, False])
def test_cache_that_fills_the_disk_serves_its_rows(
    launch_cached: Launch, small_disk, is_filled_by_others: bool
) -> None:
    disk = small_disk(4 * MIB)
    server = launch_cached("--cache", "64KiB", "--cache-dir", str(disk.folder / "cache"))
    first = vectors(server, ["before"])
    embed_until(server, lambda: server.metric("penstock_vector_cache_bytes") > 65_536)
    if is_filled_by_others:
        disk.fill()
    embed_until(server, lambda: errors(server), 500)
    check_works_without_disk(server, "No space left on device")
    assert server.metric("penstock_vector_cache_dropped_total") > 0
    num_hits = server.metric(DISK_HITS)
    assert vectors(server, ["before"]) == first
    assert server.metric(DISK_HITS) == num_hits + 1


def test_cache_folder_is_shared_by_servers_and_not_by_keys(
    launch_cached: Launch, small_bert: Path, tmp_path: Path
) -> None:
    flags = ("--cache-dir", str(tmp_path / "cache"), "--cache-dir-size", "8MiB")

    def start(*keys: str, **options: Path) -> Server:
        return launch_cached(*flags, "--api-key", ",".join(keys), **options)

    one, other = start("one", "two"), start("one", "two")
    first = vectors(one, ["a"], "one")
    assert vectors(one, ["a"], "two") == first
    assert one.metric(MISSES) == 2
    assert one.stop() == 0  # it writes the remaining rows
    for key in ("one", "two"):
        assert vectors(other, ["a"], key) == first
    assert (other.metric(MISSES), other.metric(DISK_HITS)) == (0, 2)
    other.process.kill()
    other.process.wait()
    copy = shutil.copytree(small_bert, tmp_path / "copy")
    for server, key, num_hits in (
        (start("two"), "two", 1),  # a single key has the same rows
        (start("three"), "three", 0),
        (start("one", "three", model=copy), "one", 1),
    ):
        assert vectors(server, ["a"], key) == first
        assert (server.metric(MISSES), server.metric(DISK_HITS)) == (1 - num_hits, num_hits)


def test_new_engine_uses_the_cache_of_the_last_one(launch_cached: Launch) -> None:
    server = launch_cached("--cache", "1MiB")
    first = vectors(server, ["a"])
    (worker,) = server.children()
    os.kill(worker, signal.SIGKILL)
    server.wait_for("/health/ready", 503)
    assert server.embed("b").status_code == 503
    server.wait_for("/health/ready", 200)
    wait_until(lambda: server.metric("penstock_vector_cache_open"))
    assert vectors(server, ["a"]) == first
    assert server.metric(MEMORY_HITS) == 1
