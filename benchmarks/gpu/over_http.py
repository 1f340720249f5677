"""A server over HTTP: short requests with one HTTP process and with several, and long texts beside the engine's rate.

Several processes send requests, because one process sends fewer than the server can answer.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Final, NamedTuple

from servers import Server

from .made_models import model_folder
from .phases import Bench, Row, attempt
from .run import PROGRAM
from .shapes import LARGE, MINILM, TINY_SHAPES, Shape

_WARM_UP_S: Final = 2.0
"""Of the processes that ask; see client.py."""


class Case(NamedTuple):
    """One load on one server.

    Attributes:
        name: Name in the goals.
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
    """Yields the rate of each case and the CPU time of the server's processes."""
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
        subprocess.Popen([sys.executable, "-P", str(PROGRAM), "client", *numbers], stdout=subprocess.PIPE)
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
    """Returns a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
