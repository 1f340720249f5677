"""One client beside another: a slow client leaves half of the memory, and a busy one lends and returns the queue.

`pytest tests/faults/test_client_shares.py -m slow -s` prints the statuses that the other client got, and how long the
slow client held memory. Settings come from the environment, so that an older server can be measured too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from .conftest import MIB, Launch, Server

pytestmark = pytest.mark.slow
SLOW, OTHER = "slow-client", "other-client"
KEYS = {"PENSTOCK_API_KEY": f"{SLOW},{OTHER}"}
RATES = {"PENSTOCK_MIN_TRANSFER_RATE": "16KiB", "PENSTOCK_TRANSFER_GRACE_S": "2"}
LONGEST_S = 15
"""Seconds after which a slow client is not waited for any more."""
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def head(path: str, key: str, num_bytes: int) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", f"Content-Length: {num_bytes}"]
    return "\r\n".join([*lines, "", ""]).encode()


def reason(server: Server, name: str) -> float:
    rows = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    start = f'penstock_refused_requests_total{{reason="{name}"}}'
    return sum(float(row.rpartition(" ")[2]) for row in rows if row.startswith(start))


@contextlib.asynccontextmanager
async def asking(server: Server, path: str, body: object, key: str) -> AsyncIterator[Counter[int]]:
    """Send a request again and again, one at a time; count the statuses."""
    statuses: Counter[int] = Counter()

    async def ask() -> None:
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=server.url, timeout=60, headers=headers) as client:
            while True:
                statuses[(await client.post(path, json=body)).status_code] += 1
                await asyncio.sleep(0.1)

    task = asyncio.create_task(ask())
    try:
        while not statuses and not task.done():
            await asyncio.sleep(0.02)
        statuses.clear()
        yield statuses
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


NUM_SLOW = 40


async def test_client_that_sends_slowly_leaves_half_of_the_memory(launch: Launch, small_bert: Path) -> None:
    server = launch("--max-body-bytes", str(MIB), model=small_bert, **KEYS, **RATES)
    answers: Counter[str] = Counter()

    async def send() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        with contextlib.suppress(ConnectionError):
            writer.write(head("/v1/embeddings", SLOW, MIB) + b" " * (MIB - 1_000))
            for _ in range(LONGEST_S):
                with contextlib.suppress(TimeoutError):
                    answers[(await asyncio.wait_for(reader.read(1_000), 1))[9:12].decode()] += 1
                    break
                writer.write(b" ")
        writer.transport.abort()

    async with asking(server, "/v1/embeddings", {"input": ["word " * 400] * 50}, OTHER) as statuses:
        began_s = time.monotonic()
        await asyncio.gather(*(send() for _ in range(NUM_SLOW)))
        held_s = time.monotonic() - began_s
        seen = dict(statuses)
    print(
        f"\n{NUM_SLOW} bodies of 1 MiB without their last bytes: the slow client got {dict(answers)} and held "
        f"memory for {held_s:.0f} s (at most {LONGEST_S} s were measured); the other client got {seen}"
    )
    assert set(seen) == {200}
    assert answers["408"] >= 1
    assert answers["408"] + answers["503"] == NUM_SLOW
    assert reason(server, "body_memory_share") == answers["503"]
    assert reason(server, "slow_transfer") == answers["408"]
    assert server.log.read_text().count("request bodies too slowly") >= 1


async def test_client_that_reads_slowly_leaves_half_of_the_memory(launch: Launch, small_bert: Path) -> None:
    server = launch("--answer-memory", "40MB", model=small_bert, **KEYS, **RATES)
    body = {"inputs": ["a " * 500] * 60}  # 8 MB of numbers, 24 MB of JSON
    content = json.dumps(body).encode()
    statuses_of_slow: Counter[int] = Counter()

    ended = asyncio.Event()

    async def read() -> None:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", server.port))
        with client, contextlib.suppress(ConnectionError):
            await loop.sock_sendall(client, head("/embed_all", SLOW, len(content)) + content)
            status = int((await loop.sock_recv(client, 12))[9:])
            statuses_of_slow[status] += 1
            while status == 200 and not ended.is_set():
                await loop.sock_recv(client, 256)
                await asyncio.sleep(1)

    async with asking(server, "/embed_all", {"inputs": ["a " * 500] * 20}, OTHER) as statuses:
        num_files, began_s = server.num_files(), time.monotonic()
        reading = [asyncio.create_task(read()) for _ in range(6)]
        while statuses_of_slow.total() < 6:
            await asyncio.sleep(0.1)
        while server.num_files() > num_files and time.monotonic() < began_s + LONGEST_S:
            await asyncio.sleep(0.1)
        held_s = time.monotonic() - began_s
        seen = dict(statuses)
        ended.set()
        await asyncio.gather(*reading)
    print(
        f"\n6 answers of 8 MB read at 256 bytes/s: the slow client got {dict(statuses_of_slow)} and held memory for "
        f"{held_s:.0f} s (at most {LONGEST_S} s were measured); the other client got {seen}"
    )
    assert set(seen) == {200}
    assert statuses_of_slow[200] >= 1
    assert reason(server, "response_memory_share") == statuses_of_slow[429]
    assert reason(server, "slow_transfer") == statuses_of_slow[200]
    assert "responses too slowly" in server.log.read_text()


async def load(server: Server, key: str, num_clients: int, for_s: float) -> tuple[Counter[int], list[float]]:
    """Ask with so many clients, each again as soon as it is answered; return statuses and seconds of answers."""
    statuses: Counter[int] = Counter()
    seconds: list[float] = []
    end_s = time.monotonic() + for_s
    body = {"input": ["word " * 198] * 3}  # 600 tokens

    async def ask() -> None:
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=server.url, timeout=120, headers=headers) as client:
            while time.monotonic() < end_s:
                began_s = time.monotonic()
                response = await client.post("/v1/embeddings", json=body)
                statuses[response.status_code] += 1
                if response.status_code == 200:
                    seconds.append(time.monotonic() - began_s)
                else:
                    await asyncio.sleep(0.2)

    await asyncio.gather(*(ask() for _ in range(num_clients)))
    return statuses, sorted(seconds)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_one_key_of_two_borrows_the_queue_and_returns_it(launch: Launch, workers: str) -> None:
    server = launch("--max-queued-tokens", "16384", "--num-threads", "1", "--api-workers", workers, **KEYS)
    alone, _ = await load(server, SLOW, 24, 6)
    print(f"\n{workers} HTTP processes; one key of two, 24 clients of 600 tokens: {dict(alone)}")
    busy = asyncio.create_task(load(server, SLOW, 48, 10))
    await asyncio.sleep(2)
    second, seconds = await load(server, OTHER, 4, 6)
    first, first_seconds = await busy
    print(
        f"the key with 48 clients: {dict(first)}, median {first_seconds[len(first_seconds) // 2]:.2f} s; the second "
        f"key with 4 clients: {dict(second)}, median {seconds[len(seconds) // 2]:.2f} s, worst {seconds[-1]:.2f} s"
    )
    assert set(alone) == {200}
    assert set(second) == {200}
    assert first[429]
    assert reason(server, "queue_tokens") + reason(server, "client_share") == first[429]
