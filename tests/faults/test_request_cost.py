"""What a short request costs the process that speaks HTTP: under load that is its capacity."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

NUM_REQUESTS = 3_000
NUM_CONNECTIONS = 16
CONTENT = json.dumps({"input": "a short text"}).encode()
SENT = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(CONTENT), CONTENT)


def processor_s(pid: int) -> float:
    """Seconds that all threads of a process have run, in user and in system mode."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


async def closed_loop(port: int, num_connections: int) -> None:
    """Ask again as soon as an answer has come, on each connection."""
    num_left = NUM_REQUESTS

    async def ask() -> None:
        nonlocal num_left
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while num_left > 0:
            num_left -= 1
            writer.write(SENT)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
        writer.close()

    await asyncio.gather(*(ask() for _ in range(num_connections)))


@pytest.mark.slow
@pytest.mark.parametrize("num_connections", [NUM_CONNECTIONS, 20 * NUM_CONNECTIONS])
async def test_what_a_short_request_costs(server, num_connections: int) -> None:
    costs_us: list[float] = []
    for _ in range(3):
        before_s = processor_s(server.process.pid)
        await closed_loop(server.port, num_connections)
        costs_us.append((processor_s(server.process.pid) - before_s) / NUM_REQUESTS * 1e6)
    print(f"{num_connections} connections: {min(costs_us):.0f} us of the server process per short request at least")
    print("each run:", ", ".join(f"{cost:.0f}" for cost in costs_us))
