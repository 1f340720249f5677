"""Two clients (API keys): a slow one may hold half of a memory budget."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from ..servers import MIB, Launch, Server
from .load import head

pytestmark = pytest.mark.slow
SLOW, OTHER = "slow-client", "other-client"
KEYS = {"PENSTOCK_API_KEY": f"{SLOW},{OTHER}"}
RATES = {"PENSTOCK_MIN_TRANSFER_RATE": "16KiB", "PENSTOCK_TRANSFER_GRACE_S": "2"}
LONGEST_S = 15
"""Seconds after which the test stops a slow client."""
NUM_SLOW = 40


def rejected(server: Server, reason: str) -> float:
    return server.metric(f'penstock_rejected_requests_total{{reason="{reason}"}}')


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
            writer.write(head(f"Authorization: Bearer {SLOW}", f"Content-Length: {MIB}") + b" " * (MIB - 1_000))
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
    assert rejected(server, "body_memory_share") == slow["503"]
    assert rejected(server, "slow_transfer") == slow["408"]
    assert "request bodies too slowly" in server.log.read_text()
