"""A server over HTTP: short requests with one HTTP process and with several, and long texts beside the engine's rate.

    python -m gpu.over_http PORT CONNECTIONS SECONDS WORDS TEXTS

is one of the processes that ask. There are several, as one of them can ask less than the server can answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Final, NamedTuple

from loads import WORDS
from servers import Server

from .made_models import model_folder
from .phases import Bench, Row, attempt
from .shapes import LARGE, MINILM, TINY_SHAPES, Shape

_WARM_UP_S: Final = 2.0
_NUM_BODIES: Final = 128


class Case(NamedTuple):
    """One load on one server.

    Attributes:
        name: What the goals call it.
        shape: Of the model.
        workers: HTTP processes.
        clients: Processes that ask.
        connections: Of each.
        words: Of a text.
        texts: Of a request.
    """

    name: str
    shape: Shape
    workers: int
    clients: int
    connections: int
    words: int
    texts: int


CASES: Final = (
    Case("short", MINILM, 6, 4, 96, 10, 1),
    Case("short", MINILM, 1, 4, 32, 10, 1),
    Case("long", LARGE, 2, 2, 32, 510, 16),
)
TINY_CASES: Final = (
    Case("short", TINY_SHAPES[0], 2, 2, 2, 10, 1),
    Case("long", TINY_SHAPES[2], 1, 1, 2, 60, 4),
)


def measure(bench: Bench) -> Iterator[Row]:
    """Yields the rate of each case, and what the processes of the server took of the processors."""
    for case in bench.pick(CASES, TINY_CASES):
        row: Row = {
            "name": case.name,
            "shape": case.shape.name,
            "workers": case.workers,
            "clients": case.clients,
            "cores": len(os.sched_getaffinity(0)),
            "tokens_a_text": case.words + 2,
            "texts_a_request": case.texts,
        }
        yield attempt(row, partial(rate, case, bench))


def rate(case: Case, bench: Bench) -> Row:
    """Starts the server, asks it for a while and ends it."""
    port = free_port()
    device = ["--device", bench.device.type, "--dtype", "bfloat16", "--max-queue-s", "0", "--log-level", "warning"]
    flags = ["--host", "127.0.0.1", "--port", str(port), "--api-workers", str(case.workers), *device]
    if bench.is_tiny:
        flags += ["--num-threads", "1"]
    command = [sys.executable, "-P", "-m", "penstock.server", "serve", str(model_folder(case.shape, bench)), *flags]
    # Threads of one list of texts: all processes together have no more than there are cores.
    threads = max(len(os.sched_getaffinity(0)) // case.workers, 1)
    words = " ".join([f"RAYON_NUM_THREADS={threads}", *command])
    server = Server(case.name, words, f"http://127.0.0.1:{port}", bench.folder / f"{case.name}-{case.workers}.log")
    try:
        server.start(60.0)
        told = ask(case, port, bench.pick(6.0, 0.5))
    finally:
        server.stop()
    requests = sum(count / seconds for count, seconds in told)
    texts = requests * case.texts
    return {
        "requests_per_s": requests,
        "texts_per_s": texts,
        "tokens_per_s": texts * (case.words + 2),
        "ready_s": server.ready_s,
    }


def ask(case: Case, port: int, seconds: float) -> list[tuple[int, float]]:
    """Lets the processes ask at once; returns how many requests each had answered, and in how many seconds."""
    numbers = [str(n) for n in (port, case.connections, seconds, case.words, case.texts)]
    clients = [
        subprocess.Popen([sys.executable, "-P", "-m", "gpu.over_http", *numbers], stdout=subprocess.PIPE)
        for _ in range(case.clients)
    ]
    told = []
    try:
        for client in clients:
            out, _ = client.communicate(timeout=_WARM_UP_S + seconds + 60)
            if client.returncode:
                raise RuntimeError(f"a process that asks ended with {client.returncode}")
            found = json.loads(out)
            told.append((found["requests"], found["seconds"]))
    finally:
        for client in clients:
            client.kill()
            client.wait()
    return told


def free_port() -> int:
    """Returns a port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def client(port: int, num_connections: int, seconds: float, words: int, texts: int) -> None:
    """Asks over connections of which each always has a request under way; prints what was answered after a while."""
    from api_workers.measure import Client  # its protocol costs a tenth of a client library

    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    inputs = [[" ".join(random.choices(WORDS, k=words)) for _ in range(texts)] for _ in range(_NUM_BODIES)]
    bodies = [json.dumps({"input": each, "encoding_format": "base64"}).encode() for each in inputs]
    requests, counts = [head % (len(body), body) for body in bodies], [0]
    loop = asyncio.get_running_loop()
    for _ in range(num_connections):
        await loop.create_connection(lambda: Client(requests, counts), "127.0.0.1", port)
    await asyncio.sleep(_WARM_UP_S)
    began_s, before = loop.time(), counts[0]
    await asyncio.sleep(seconds)
    print(json.dumps({"requests": counts[0] - before, "seconds": loop.time() - began_s}))


if __name__ == "__main__":
    import uvloop

    _port, _connections, _seconds, _words, _texts = sys.argv[1:]
    uvloop.run(client(int(_port), int(_connections), float(_seconds), int(_words), int(_texts)))
