"""Two clients (API keys): a slow one may hold half of a memory budget, and a busy one gives the queue back.

`pytest tests/faults/test_client_shares.py -m slow -s` prints the statuses of both clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from ..servers import MIB, Launch, Server
from .load import Load, head, request

pytestmark = pytest.mark.slow
SLOW, OTHER = "slow-client", "other-client"
KEYS = {"PENSTOCK_API_KEY": f"{SLOW},{OTHER}"}
RATES = {"PENSTOCK_MIN_TRANSFER_RATE": "16KiB", "PENSTOCK_TRANSFER_GRACE_S": "2"}
LONGEST_S = 15
"""Seconds after which the test stops a slow client."""
NUM_SLOW = 40


def key(name: str) -> str:
    return f"Authorization: Bearer {name}"


def refused(server: Server, *reasons: str) -> float:
    return sum(server.metric(f'penstock_refused_requests_total{{reason="{reason}"}}') for reason in reasons)


@contextlib.asynccontextmanager
async def sending(server: Server, path: str, body: object) -> AsyncIterator[Counter[int]]:
    """Send a request of the other client again and again, one at a time. Counts the statuses."""
    statuses: Counter[int] = Counter()

    async def send() -> None:
        headers = {"authorization": f"Bearer {OTHER}"}
        async with httpx.AsyncClient(base_url=server.url, timeout=60, headers=headers) as client:
            while True:
                statuses[(await client.post(path, json=body)).status_code] += 1
                await asyncio.sleep(0.1)

    task = asyncio.create_task(send())
    try:
        while not statuses and not task.done():
            await asyncio.sleep(0.02)
        yield statuses
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_slow_sender_leaves_half_of_the_body_memory(launch: Launch, small_bert: Path) -> None:
    server = launch("--max-body-bytes", str(MIB), model=small_bert, **KEYS, **RATES)
    slow: Counter[str] = Counter()

    async def send() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        with contextlib.suppress(ConnectionError):
            writer.write(head(key(SLOW), f"Content-Length: {MIB}") + b" " * (MIB - 1_000))
            for _ in range(LONGEST_S):
                with contextlib.suppress(TimeoutError):
                    slow[(await asyncio.wait_for(reader.read(1_000), 1))[9:12].decode()] += 1
                    break
                writer.write(b" ")
        writer.transport.abort()

    async with sending(server, "/v1/embeddings", {"input": ["word " * 400] * 50}) as other:
        await asyncio.gather(*(send() for _ in range(NUM_SLOW)))
    print(f"\n{NUM_SLOW} bodies of 1 MiB without an end: slow client {dict(slow)}, other client {dict(other)}")
    assert set(other) == {200}
    assert slow["408"] >= 1
    assert slow["408"] + slow["503"] == NUM_SLOW
    assert refused(server, "body_memory_share") == slow["503"]
    assert refused(server, "slow_transfer") == slow["408"]
    assert "request bodies too slowly" in server.log.read_text()


async def test_slow_reader_leaves_half_of_the_response_memory(launch: Launch, small_bert: Path) -> None:
    server = launch("--answer-memory", "40MB", model=small_bert, **KEYS, **RATES)
    content = request({"inputs": ["a " * 500] * 60}, key(SLOW), path="/embed_all")  # 8 MB of numbers, 24 MB of JSON
    slow: Counter[int] = Counter()
    ended = asyncio.Event()

    async def read() -> None:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", server.port))
        with client, contextlib.suppress(ConnectionError):
            await loop.sock_sendall(client, content)
            status = int((await loop.sock_recv(client, 12))[9:])
            slow[status] += 1
            while status == 200 and not ended.is_set():
                await loop.sock_recv(client, 256)
                await asyncio.sleep(1)

    async with sending(server, "/embed_all", {"inputs": ["a " * 500] * 20}) as other:
        num_files, began_s = server.num_files(), time.monotonic()
        async with asyncio.TaskGroup() as readers:
            for _ in range(6):
                readers.create_task(read())
            while slow.total() < 6:
                await asyncio.sleep(0.1)
            while server.num_files() > num_files and time.monotonic() < began_s + LONGEST_S:
                await asyncio.sleep(0.1)
            ended.set()
    print(f"\n6 responses of 8 MB at 256 bytes/s: slow client {dict(slow)}, other client {dict(other)}")
    assert set(other) == {200}
    assert slow[200] >= 1
    assert refused(server, "response_memory_share") == slow[429]
    assert refused(server, "slow_transfer") == slow[200]
    assert "responses too slowly" in server.log.read_text()


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_busy_client_gives_the_queue_back(launch: Launch, workers: str) -> None:
    server = launch("--max-queued-tokens", "16384", "--num-threads", "1", "--api-workers", workers, **KEYS)
    body = {"input": ["word " * 198] * 3}  # 600 tokens
    alone, busy, second = (Load(server, request(body, key(name))) for name in (SLOW, SLOW, OTHER))
    await alone.closed_loop(24, 6)
    async with asyncio.TaskGroup() as group:
        group.create_task(busy.closed_loop(48, 10))
        await asyncio.sleep(2)
        await second.closed_loop(4, 6)
    for name, load in {"alone": alone, "busy": busy, "second": second}.items():
        print(f"{name}: { ({status: len(seconds) for status, seconds in load.seconds.items()}) }")
    assert set(alone.seconds) == {200}
    assert set(second.seconds) == {200}
    assert busy.seconds[429]
    assert refused(server, "queue_tokens", "client_share") == len(busy.seconds[429])
