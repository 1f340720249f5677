"""The vector cache of real servers: API keys, shared folders, restarts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ..servers import Launch, Server
from ..waiting import wait_until

pytestmark = pytest.mark.slow
MISSES = "penstock_vector_cache_misses_total"
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
