"""What befalls the processes of a busy server: clients that leave, an engine that dies, ten times too much work.

`pytest -s tests/faults` prints the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.server.middleware.load_shedding import LONGEST_S, PER_TICK, TICK_S

from .load import Load

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
        assert time.monotonic() < left_s + 240, "abandoned work went on"
        time.sleep(0.05)
    idle_s = time.monotonic()
    while server.num_files() > files + 5:
        assert time.monotonic() < idle_s + 240, "connections stayed open"
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
            assert time.monotonic() < killed_s + 240
            await asyncio.sleep(0.02)
        ready_s = time.monotonic()
        before = statuses[200]
        while statuses[200] == before:
            assert time.monotonic() < ready_s + 240
            await asyncio.sleep(0.05)
        stop.set()
        await asyncio.gather(*asking)
        return ready_s - killed_s

    recovery_s = asyncio.run(run())
    print(f"ready {recovery_s:.1f} s after the engine was killed under load; answers {dict(statuses)}")
    assert set(statuses) == {200, 503}
    assert set(lives) == {200}
    assert server.metric("penstock_engine_restarts_total") == num_restarts + 1


QUEUED_TOKENS = 16_384
TEXTS, TOKENS = 16, 16 * 62
"""Of one request of the overload tests."""
BODY = request({"input": ["word " * 60] * TEXTS})
ENOUGH_CLIENTS = 12
"""Keep the queue filled without a refusal."""
PEAK_S = 20.0
SLOWEST_S = 12.0
"""Slowest answer under overload with --max-queue-s 6."""


@pytest.fixture(scope="module")
def small_queue(launch):
    return launch("--max-queued-tokens", str(QUEUED_TOKENS))


@contextlib.contextmanager
def sink() -> Iterator[int]:
    """Run sink.py, and return its port."""
    command = [sys.executable, str(Path(__file__).with_name("sink.py")), str(len(BODY))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def check(server, load: Load, num_refused_before: float, memory: int) -> str:
    """Check what came back from an overloaded server, and return its figures."""
    seen = load.seen
    answered, refused = seen.seconds[200], seen.seconds[429]
    assert seen.seconds.keys() <= {200, 429}
    grown = (server.resident_bytes() - memory) / MIB
    assert grown < 0.2 * memory / MIB
    assert len(refused) > len(answered)
    assert server.metric("penstock_refused_requests_total") - num_refused_before == len(refused)
    assert server.metric("penstock_engine_requests") == 0
    assert min(seen.waits_s) >= 1
    assert max(refused) < LONGEST_S + 2  # the rest is scheduling
    return (
        f"{len(refused)} refused; answered after up to {max(answered):.1f} s, refused after "
        f"{1000 * np.median(refused):.1f} ms, up to {max(refused):.1f} s; Retry-After {min(seen.waits_s)} to "
        f"{max(seen.waits_s)} s; {grown:+.0f} MiB on {memory / MIB:.0f} MiB"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_times_the_capacity_for_a_minute(small_queue) -> None:
    """Ten times the requests that the server answers at its peak, whatever becomes of them; the queue begins full.

    Clients share the cores with the model. What they cost is measured too: at the peak, with what is more than the
    capacity sent to a server that does nothing. The shares are printed and not asserted: machines are noisy.
    """
    server = small_queue

    async def run() -> None:
        async def peak() -> float:
            load = Load(server.port, BODY)
            rate = await load.closed_loop(ENOUGH_CLIENTS, PEAK_S)
            assert not load.seen.seconds[429]
            load.close()
            return rate

        async def peak_beside_clients(per_s: float, port: int) -> float:
            others = Load(port, BODY)
            rate, _ = await asyncio.gather(peak(), others.open_loop(per_s, PEAK_S, num_first=0))
            others.close()
            return rate

        with sink() as port:
            peaks = [await peak()]
            controls = [await peak_beside_clients(9 * peaks[0], port)]
            memory, num_refused = server.resident_bytes(), server.metric("penstock_refused_requests_total")
            load = Load(server.port, BODY)
            goodput = await load.open_loop(10 * peaks[0], 60, num_first=2 * QUEUED_TOKENS // TOKENS)
            figures = check(server, load, num_refused, memory)
            load.close()
            controls.append(await peak_beside_clients(9 * peaks[0], port))
            peaks.append(await peak())
        print(
            f"goodput {goodput:.1f} requests/s: {goodput / np.mean(peaks):.1%} of the peak ({peaks[0]:.1f} before, "
            f"{peaks[1]:.1f} after), {goodput / np.mean(controls):.1%} of the peak beside as many clients of another "
            f"server ({controls[0]:.1f}, {controls[1]:.1f}); {figures}"
        )

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_clients", [24, 256])
def test_clients_that_come_back_at_once(small_queue, num_clients: int) -> None:
    """Clients that take a refusal for an invitation: before refusals were paced, they took most of the processor."""
    server = small_queue

    async def run() -> None:
        load, after = Load(server.port, BODY), Load(server.port, BODY)
        memory, num_refused = server.resident_bytes(), server.metric("penstock_refused_requests_total")
        goodput = await load.closed_loop(num_clients, PEAK_S)
        figures = check(server, load, num_refused, memory)
        peak = await after.closed_loop(ENOUGH_CLIENTS, PEAK_S)
        print(f"{num_clients} clients: goodput {goodput / peak:.1%} of the peak; {figures}")
        # A full tick of refusals, or as many as wait for the longest time that one may.
        assert len(load.seen.seconds[429]) < PEAK_S * (PER_TICK / TICK_S + num_clients / LONGEST_S) * 1.1
        for each in (load, after):
            each.close()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_admitted_requests_are_answered_soon(launch) -> None:
    """Three times the requests that the server answers at its peak, with --max-queue-s 6; the queue begins full."""
    server = launch("--num-threads", "1", "--max-queue-s", "6")

    async def run() -> None:
        before, load, after = (Load(server.port, BODY) for _ in range(3))
        peaks = [await before.closed_loop(ENOUGH_CLIENTS, PEAK_S)]
        goodput = await load.open_loop(3 * peaks[0], 40, num_first=round(20 * peaks[0]))
        peaks.append(await after.closed_loop(ENOUGH_CLIENTS, PEAK_S))
        answered, refused = load.seen.seconds[200], load.seen.seconds[429]
        print(
            f"goodput {goodput:.1f} requests/s: {goodput / np.mean(peaks):.1%} of the peak ({peaks[0]:.1f} before, "
            f"{peaks[1]:.1f} after); answered after {np.median(answered):.1f} s, up to {max(answered):.1f} s; "
            f"{len(refused)} refused; Retry-After up to {max(load.seen.waits_s, default=0)} s"
        )
        for each in (before, load, after):
            each.close()
        assert load.seen.seconds.keys() == {200, 429}
        assert max(answered) <= SLOWEST_S

    asyncio.run(run())
