"""What befalls the processes of a busy server: clients that leave, an engine that dies, ten times too much work.

`pytest -s tests/faults` prints the figures.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import struct
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

MIB = 2**20
NUM_HANG_UPS = 1_000
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST and not FIN


def request(body: dict[str, Any], length: int | None = None) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {length or len(content)}\r\n\r\n"
    return head.encode() + content


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Read one answer: its status and its headers."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    await reader.readexactly(int(headers["content-length"]))
    return int(lines[0].split()[1]), headers


def test_clients_that_hang_up_leave_nothing_behind(server) -> None:
    chance = random.Random(0)
    texts = ["word " * chance.randint(1, 200) for _ in range(64)]
    files, memory = server.num_files(), server.resident_bytes()

    async def hang_up(gate: asyncio.Semaphore) -> None:
        async with gate:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            body = {"input": chance.choices(texts, k=chance.randint(1, 32))}
            whole = request(body)
            writer.write(whole if chance.random() < 0.7 else whole[: chance.randrange(1, len(whole))])
            await asyncio.sleep(chance.choice((0.0, 0.01, 0.05, 0.2)))
            if chance.random() < 0.5:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.close()

    async def run() -> None:
        gate = asyncio.Semaphore(50)
        await asyncio.gather(*(hang_up(gate) for _ in range(NUM_HANG_UPS)))

    began_s = time.monotonic()
    asyncio.run(run())
    left_s = time.monotonic()
    while server.metric("penstock_engine_requests") or server.metric("penstock_engine_queued_tokens"):
        assert time.monotonic() < left_s + 60, "abandoned work went on"
        time.sleep(0.05)
    idle_s = time.monotonic()
    while server.num_files() > files + 5:
        assert time.monotonic() < idle_s + 30, "connections stayed open"
        time.sleep(0.05)
    grown = (server.resident_bytes() - memory) / MIB
    print(
        f"{NUM_HANG_UPS} hang-ups in {left_s - began_s:.1f} s, idle {idle_s - left_s:.2f} s later, "
        f"{server.num_files() - files:+d} files, {grown:+.0f} MiB"
    )
    assert grown < 400
    assert server.process.poll() is None
    assert "Traceback" not in server.log.read_text()


def test_an_engine_that_is_killed_is_replaced_while_the_server_stays_alive(server) -> None:
    statuses: Counter[int] = Counter()
    lives: Counter[int] = Counter()
    num_restarts = server.metric("penstock_engine_restarts_total")
    stop = asyncio.Event()
    body = request({"input": ["word " * 150] * 16})

    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        while not stop.is_set():
            writer.write(body)
            status, headers = await answer_of(reader)
            statuses[status] += 1
            if status != 200:
                assert headers["retry-after"] == "1"
                await asyncio.sleep(0.1)  # sooner than it was told
        writer.close()

    async def look(path: str, seen: Counter[int]) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        status, _ = await answer_of(reader)
        writer.close()
        seen[status] += 1
        return status

    async def run() -> float:
        asking = [asyncio.create_task(ask()) for _ in range(8)]
        await asyncio.sleep(0.5)
        (worker,) = server.children()
        os.kill(worker, signal.SIGKILL)
        killed_s = time.monotonic()
        readies: Counter[int] = Counter()
        while await look("/health/ready", readies) != 200 or 503 not in readies:
            await look("/health/live", lives)
            assert time.monotonic() < killed_s + 90
            await asyncio.sleep(0.02)
        ready_s = time.monotonic()
        before = statuses[200]
        while statuses[200] == before:
            assert time.monotonic() < ready_s + 60
            await asyncio.sleep(0.05)
        stop.set()
        await asyncio.gather(*asking)
        return ready_s - killed_s

    recovery_s = asyncio.run(run())
    print(f"ready {recovery_s:.1f} s after the engine was killed under load; answers {dict(statuses)}")
    assert set(statuses) == {200, 503}
    assert set(lives) == {200}
    assert server.metric("penstock_engine_restarts_total") == num_restarts + 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_times_the_capacity_for_a_minute(launch) -> None:
    """A server with as many clients as keep it busy, and then with ten times the requests that it answered them.

    The goodput that it costs is printed and not asserted: clients and refusals share the cores with the model.
    """
    max_queued_tokens, num_tokens = 16_384, 16 * 62
    server = launch("--max-queued-tokens", str(max_queued_tokens))
    body = request({"input": ["word " * 60] * 16})
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    seconds: dict[int, list[float]] = {200: [], 429: []}
    waits_s: list[int] = []

    async def ask() -> None:
        began_s = time.monotonic()
        reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(body)
        status, headers = await asyncio.wait_for(answer_of(reader), 60)
        idle.append((reader, writer))
        seconds[status].append(time.monotonic() - began_s)
        if status == 429:
            waits_s.append(int(headers["retry-after"]))

    async def peak(for_s: float) -> float:
        """Requests answered per second where enough clients ask one after the other to keep the queue filled."""
        began_s, num_before = time.monotonic(), len(seconds[200])

        async def again() -> None:
            while time.monotonic() < began_s + for_s:
                await ask()

        await asyncio.gather(*(again() for _ in range(12)))
        return (len(seconds[200]) - num_before) / (time.monotonic() - began_s)

    async def goodput(per_s: float, for_s: float) -> float:
        """Requests answered per second where so many come, whatever becomes of them; the queue begins full."""
        tasks = [asyncio.create_task(ask()) for _ in range(2 * max_queued_tokens // num_tokens)]
        await asyncio.sleep(1.0)
        began_s, num_before, num_sent = time.monotonic(), len(seconds[200]), 0
        while (now_s := time.monotonic()) < began_s + for_s:
            tasks.append(asyncio.create_task(ask()))
            num_sent += 1
            await asyncio.sleep(max(began_s + num_sent / per_s - now_s, 0.0))
        answered = (len(seconds[200]) - num_before) / (time.monotonic() - began_s)
        print(f"{num_sent} requests sent in {for_s:g} s", end="; ")
        await asyncio.gather(*tasks)
        return answered

    async def run() -> None:
        before = await peak(10)
        memory = server.resident_bytes()
        during = await goodput(10 * before, 60)
        grown = (server.resident_bytes() - memory) / MIB
        after = await peak(10)
        share = during / ((before + after) / 2)
        print(
            f"goodput {during:.1f} requests/s, {share:.1%} of a peak of {before:.1f} before and {after:.1f} after; "
            f"answered after up to {max(seconds[200]):.1f} s, refused after {1000 * np.median(seconds[429]):.1f} ms, "
            f"up to {max(seconds[429]):.1f} s; Retry-After {min(waits_s)} to {max(waits_s)} s; "
            f"{grown:+.0f} MiB on {memory / MIB:.0f} MiB"
        )
        assert grown < 0.2 * memory / MIB
        for _, writer in idle:
            writer.close()

    asyncio.run(run())
    assert min(waits_s) >= 1
    assert len(seconds[429]) > len(seconds[200])
    assert server.metric("penstock_engine_refused_requests_total") == len(seconds[429])
    assert server.metric("penstock_engine_requests") == 0
