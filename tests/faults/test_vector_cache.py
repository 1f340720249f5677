"""The cache of embeddings behind real servers: full and damaged disks, a full queue, two keys, an engine that dies."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

MIB = 2**20
HIT = {"input": ["What is a penstock?"], "encoding_format": "base64"}
HITS = ("penstock_vector_cache_memory_hits_total", "penstock_vector_cache_disk_hits_total")


def ask(server: Any, body: object = HIT, key: str = "") -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/embeddings", json=body, headers={"authorization": f"Bearer {key}"} if key else {}, timeout=60
    )


def vectors(server: Any, texts: list[str], key: str = "") -> list[str]:
    response = ask(server, {"input": texts, "encoding_format": "base64"}, key)
    assert response.status_code == 200, response.text
    return [entry["embedding"] for entry in response.json()["data"]]


def wait_until_open(server: Any) -> None:
    deadline_s = time.monotonic() + 30
    while not server.metric("penstock_vector_cache_open"):
        assert time.monotonic() < deadline_s, server.log.read_text()
        time.sleep(0.05)


def complaints(server: Any) -> list[str]:
    return [line for line in server.log.read_text().splitlines() if "--cache-dir" in line]


def tier(server: Any, name: str, figure: str) -> float:
    return server.metric(f'penstock_vector_cache_{figure}{{tier="{name}"}}')


def check_goes_without(server: Any) -> None:
    """Every request is answered; the log says what is wrong in one line, and so does a metric."""
    texts = [f"text {number}" for number in range(40)]
    first = vectors(server, texts)
    assert vectors(server, texts) == first
    rows = httpx.get(f"{server.url}/metrics", timeout=30).text
    assert 'penstock_vector_cache_working{tier="disk"} 0.0' in rows
    assert 'penstock_vector_cache_working{tier="memory"} 1.0' in rows
    (line,) = complaints(server)
    print(line)
    assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
def test_a_start_on_a_full_disk(launch, small_bert: Path, small_disk) -> None:
    disk = small_disk(4 * MIB)
    disk.fill()
    server = launch("--cache", "1MiB", "--cache-dir", str(disk.folder / "cache"), model=small_bert)
    wait_until_open(server)
    check_goes_without(server)
    assert "No space left on device" in complaints(server)[0]


@pytest.mark.slow
@pytest.mark.parametrize("is_filled_by_others", [True, False])
def test_a_disk_that_fills_up(launch, small_bert: Path, small_disk, is_filled_by_others: bool) -> None:
    disk = small_disk(4 * MIB)
    server = launch("--cache", "64KiB", "--cache-dir", str(disk.folder / "cache"), model=small_bert)
    wait_until_open(server)
    first = vectors(server, ["before"])
    deadline_s = time.monotonic() + 20
    while not server.metric("penstock_vector_cache_bytes") > 65_536:
        vectors(server, [f"{time.monotonic()} {number}" for number in range(100)])
        assert time.monotonic() < deadline_s
    if is_filled_by_others:
        disk.fill()
    deadline_s = time.monotonic() + 60
    while not complaints(server):
        vectors(server, [f"after {time.monotonic()} {number}" for number in range(500)])
        assert time.monotonic() < deadline_s
    check_goes_without(server)
    assert "No space left on device" in complaints(server)[0]
    assert server.metric("penstock_vector_cache_dropped_total") > 0
    hits = server.metric(HITS[1])
    assert vectors(server, ["before"]) == first  # what is there is read
    assert server.metric(HITS[1]) == hits + 1


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["noise", "short", "short under the server"])
def test_a_damaged_file(launch, small_bert: Path, tmp_path: Path, damage: str) -> None:
    flags = ("--cache", "1MiB", "--cache-dir", str(tmp_path / "cache"), "--cache-dir-size", "16MiB")
    server = launch(*flags, model=small_bert)
    wait_until_open(server)
    texts = [f"text {number}" for number in range(2_000)]
    first = vectors(server, texts)
    file = tmp_path / "cache" / "vectors-1" / "data.mdb"
    if damage != "short under the server":
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    if damage == "noise":
        chance, content = random.Random(0), bytearray(file.read_bytes())
        for _ in range(5_000):
            content[chance.randrange(2 * 4096, 2 * MIB)] = chance.randrange(256)
        file.write_bytes(content)
    else:
        os.truncate(file, 5 * 4096)
    if damage != "short under the server":
        server = launch(*flags, model=small_bert)
        wait_until_open(server)
    again = vectors(server, texts)
    assert again == first
    deadline_s = time.monotonic() + 20
    while not complaints(server):
        vectors(server, [f"{time.monotonic()}"])
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    check_goes_without(server)


@pytest.mark.slow
def test_hits_are_answered_while_the_queue_is_full(launch) -> None:
    limit = 16_000
    server = launch("--cache", "16MiB", "--max-queued-tokens", str(limit), "--num-threads", "1")
    wait_until_open(server)
    first = ask(server).json()
    chance, words = random.Random(0), [f"word{number}" for number in range(1_000)]

    def fill() -> None:
        texts = [" ".join(chance.choices(words, k=80)) for _ in range(60)]
        ask(server, {"input": texts, "truncate_prompt_tokens": -1})

    threads = [threading.Thread(target=fill) for _ in range(3)]
    for thread in threads:
        thread.start()
    seconds: list[float] = []
    num_refused = 0
    with httpx.Client(base_url=server.url, timeout=60) as client:
        while any(thread.is_alive() for thread in threads):
            if server.metric("penstock_engine_queued_tokens") < limit:
                time.sleep(0.01)
                continue
            began_s = time.perf_counter()
            hit = client.post("/v1/embeddings", json=HIT)
            took_s = time.perf_counter() - began_s
            miss = client.post("/v1/embeddings", json={"input": [f"new {time.monotonic()}"]})
            both = client.post("/v1/embeddings", json={"input": [*HIT["input"], f"new {time.monotonic()}"]})
            if server.metric("penstock_engine_queued_tokens") < limit:
                continue  # there was room meanwhile
            assert (hit.status_code, miss.status_code, both.status_code) == (200, 429, 429)
            assert hit.json()["data"] == first["data"]
            assert hit.json()["usage"] == first["usage"]
            assert int(miss.headers["retry-after"]) > 0
            seconds.append(took_s)
            num_refused += 2
    for thread in threads:
        thread.join()
    print(f"{len(seconds)} hits in {1000 * max(seconds):.0f} ms at most, while {num_refused} requests were refused")
    assert seconds


@pytest.mark.slow
def test_keys_servers_and_restarts(launch, small_bert: Path, tmp_path: Path) -> None:
    """One text under two keys is two rows; a server that names the same folder finds them, before and after."""
    flags = ("--cache-dir", str(tmp_path / "cache"), "--cache-dir-size", "8MiB")
    servers = [launch(*flags, "--api-key", "one,two", model=small_bert) for _ in range(2)]
    for server in servers:
        wait_until_open(server)
    misses = "penstock_vector_cache_misses_total"
    first = vectors(servers[0], ["a"], "one")
    assert vectors(servers[0], ["a"], "two") == first
    assert servers[0].metric(misses) == 2
    deadline_s = time.monotonic() + 20
    while tier(servers[0], "disk", "bytes") == 0:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    time.sleep(0.2)
    for key in ("one", "two"):
        assert vectors(servers[1], ["a"], key) == first
    assert (servers[1].metric(misses), servers[1].metric(HITS[1])) == (0, 2)
    os.kill(servers[0].process.pid, signal.SIGKILL)
    servers[0].process.wait()
    alone = launch(*flags, "--api-key", "two", model=small_bert)  # the only key, and still the same one
    wait_until_open(alone)
    assert vectors(alone, ["a"], "two") == first
    assert (alone.metric(misses), alone.metric(HITS[1])) == (0, 1)
    stranger = launch(*flags, "--api-key", "three", model=small_bert)
    wait_until_open(stranger)
    assert vectors(stranger, ["a"], "three") == first
    assert (stranger.metric(misses), stranger.metric(HITS[1])) == (1, 0)
    copy = shutil.copytree(small_bert, tmp_path / "copy")
    renamed = launch(*flags, "--api-key", "one,three", "--served-model-name", "other", model=copy)
    wait_until_open(renamed)
    assert vectors(renamed, ["a"], "one") == first
    assert renamed.metric(HITS[1]) == 1


@pytest.mark.slow
def test_a_new_engine_finds_what_the_last_one_computed(launch, small_bert: Path) -> None:
    server = launch("--cache", "1MiB", model=small_bert)
    wait_until_open(server)
    first = vectors(server, ["a"])
    (worker,) = server.children()
    os.kill(worker, signal.SIGKILL)
    server.wait_until("/health/ready", 503)
    assert ask(server).status_code == 503
    server.wait_until("/health/ready", 200)
    wait_until_open(server)
    assert vectors(server, ["a"]) == first
    assert server.metric(HITS[0]) == 1
