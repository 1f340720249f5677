"""Busy servers: clients that leave, ten times too much load, SIGTERM.

`pytest -s tests/faults/test_under_load.py` prints the measurements.
"""

import asyncio
import random
import signal
import socket
import struct
import time
from collections import Counter

import numpy as np
import pytest

from penstock.server.middleware.rejection_queue import MAX_DELAY_S, REJECTIONS_PER_TICK, TICK_S

from ..servers import MIB, Launch, Server
from ..waiting import until
from .load import Load, read_response, request

NUM_HANG_UPS = 400
MAX_GROWTH_MIB = 400
"""1 MiB for each hang-up. Growth is not 0 because the allocator keeps memory of the largest forwards."""
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST and not FIN
REQUEST = request({"input": ["word " * 60] * 16})
QUEUED_TOKENS = 16_384
NUM_CLIENTS = 12
"""Enough to fill the queue without rejections."""
PEAK_S = 20.0


async def test_clients_that_hang_up_leave_nothing_behind(server: Server) -> None:
    chance = random.Random(0)
    num_files, memory = server.num_files(), server.resident_bytes()

    async def hang_up(limit: asyncio.Semaphore) -> None:
        async with limit:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            whole = request({"input": ["word " * chance.randint(1, 200)] * chance.randint(1, 32)})
            writer.write(whole if chance.random() < 0.7 else whole[: chance.randrange(1, len(whole))])
            await asyncio.sleep(chance.choice((0.0, 0.01, 0.05, 0.2)))
            if chance.random() < 0.5:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.close()

    limit = asyncio.Semaphore(50)
    await asyncio.gather(*(hang_up(limit) for _ in range(NUM_HANG_UPS)))
    names = ("penstock_engine_requests", "penstock_engine_queued_tokens")
    await until(lambda: not any(map(server.metric, names)), 240)
    await until(lambda: server.num_files() <= num_files + 5, 240)
    grown = (server.resident_bytes() - memory) / MIB
    print(f"{NUM_HANG_UPS} hang-ups: {grown:+.0f} MiB")
    assert grown < MAX_GROWTH_MIB
    assert server.process.poll() is None
    assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("keep_alive", [True, False])
async def test_sigterm_under_load_loses_no_request(launch: Launch, keep_alive: bool) -> None:
    server = launch("--drain-timeout-s", "25")
    outcomes: Counter[str] = Counter()
    signalled_s = float("inf")

    async def client() -> None:
        """Send requests until the server has ended."""
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            except ConnectionError:
                outcomes["no connection"] += 1
                return
            is_open = True
            while is_open:
                sent_s = time.monotonic()
                try:
                    writer.write(REQUEST)
                    status, headers = await read_response(reader)
                except ConnectionError:
                    # The server may close an idle connection while a request arrives, but not an earlier one.
                    if sent_s < signalled_s - 0.2:
                        pytest.fail(f"a request of {signalled_s - sent_s:.2f} s before SIGTERM was lost")
                    break
                assert status == 200 or (status == 503 and headers["retry-after"])
                outcomes[str(status)] += 1
                is_open = keep_alive and headers.get("connection") != "close"
            writer.close()

    async with asyncio.TaskGroup() as clients:
        for _ in range(24):
            clients.create_task(client())
        await until(lambda: outcomes["200"] > 20)
        server.process.send_signal(signal.SIGTERM)
        signalled_s = time.monotonic()
    assert await asyncio.to_thread(server.process.wait, 60) == 0
    print(f"{dict(outcomes)}; ended {time.monotonic() - signalled_s:.1f} s after SIGTERM")
    assert outcomes["no connection"] == 24
    assert "Traceback" not in server.log.read_text()


@pytest.fixture(scope="module")
def small_queue(launch: Launch) -> Server:
    return launch("--max-queued-tokens", str(QUEUED_TOKENS))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_clients", [24, 256])
async def test_overload_is_rejected_in_bounded_memory(small_queue: Server, num_clients: int) -> None:
    """Clients ignore Retry-After."""
    server = small_queue
    await Load(server, REQUEST).closed_loop(NUM_CLIENTS, PEAK_S / 4)
    memory, num_rejected = server.resident_bytes(), server.metric("penstock_rejected_requests_total")
    load = Load(server, REQUEST)
    await load.closed_loop(num_clients, PEAK_S)
    answered, rejected = load.seconds[200], load.seconds[429]
    print(
        f"{len(answered)} responses after up to {max(answered):.1f} s; {len(rejected)} rejected after "
        f"{1000 * np.median(rejected):.1f} ms, up to {max(rejected):.1f} s"
    )
    # The limit of rejections per tick, and clients with the longest delay.
    assert len(answered) < len(rejected) < PEAK_S * (REJECTIONS_PER_TICK / TICK_S + num_clients / MAX_DELAY_S) * 1.1
    assert load.seconds.keys() <= {200, 429}
    assert min(load.retry_after_s) >= 1
    assert server.metric("penstock_engine_requests") == 0
    assert server.metric("penstock_rejected_requests_total") - num_rejected == len(rejected)
    assert server.resident_bytes() < 1.2 * memory
