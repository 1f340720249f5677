"""How the requests per second grow with --api-workers, over an engine that does not compute.

    python benchmarks/api_workers/measure.py --api-workers 1 2 4 --output results.json

The server needs a core for each worker, one for the engine, and the client some: with fewer the requests per second
say little. The processor time of each process per request does not depend on that. It says how far more workers could
carry: time in the engine process and the supervisor is serial, time in a worker is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx
import uvloop

SERVER: Final = Path(__file__).with_name("idle_server.py")
WORDS: Final = (Path(__file__).parents[2] / "server" / "bench" / "words.txt").read_text().split()
_END: Final = b"\r\n\r\n"


class Client(asyncio.Protocol):
    """One connection that always has a request under way. `counts` gets the number of answers."""

    def __init__(self, requests: list[bytes], counts: list[int]) -> None:
        self._requests, self._counts = requests, counts
        self._next = random.randrange(len(requests))
        self._received = bytearray()
        self._end = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the first request."""
        self._transport: Any = transport
        self._ask()

    def data_received(self, data: bytes) -> None:
        """Sends the next request when the answer is whole."""
        self._received += data
        if not self._end:
            head = self._received.find(_END)
            if head < 0:
                return
            if not self._received.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(bytes(self._received[:200]))
            lines = bytes(self._received[:head]).lower().split(b"\r\n")
            length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
            self._end = head + len(_END) + length
        if len(self._received) >= self._end:
            self._counts[0] += 1
            self._received.clear()
            self._ask()

    def _ask(self) -> None:
        self._end = 0
        self._next = (self._next + 1) % len(self._requests)
        self._transport.write(self._requests[self._next])


async def client(port: int, num_connections: int, warm_up_s: float, seconds: float) -> None:
    """Asks for so long; prints how many requests were answered, and when it began and ended, as JSON."""
    bodies = [
        json.dumps({"input": " ".join(random.choices(WORDS, k=10)), "encoding_format": "base64"}).encode()
        for _ in range(256)
    ]
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    requests, counts = [head % (len(body), body) for body in bodies], [0]
    loop = asyncio.get_running_loop()
    for _ in range(num_connections):
        await loop.create_connection(lambda: Client(requests, counts), "127.0.0.1", port)
    await asyncio.sleep(warm_up_s)
    print(flush=True)
    began_s, before = time.monotonic(), counts[0]
    await asyncio.sleep(seconds)
    print(json.dumps({"requests": counts[0] - before, "seconds": time.monotonic() - began_s}), flush=True)


def processor_seconds(pid: int) -> float:
    """Seconds of the processor that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    tasks = Path(f"/proc/{pid}/task").iterdir()
    precise = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    return precise or (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def processes_of(server: int) -> dict[str, list[int]]:
    """The processes of a server by role. With one worker, the server process is the worker."""
    found: dict[str, list[int]] = {"supervisor": [server], "engine": [], "worker": []}
    for child in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        command = Path(f"/proc/{child}/cmdline").read_text()
        found["worker" if "workers.worker" in command else "engine"].append(int(child))
    if not found["worker"]:
        found["worker"], found["supervisor"] = found["supervisor"], []
    return found


def measure(num_workers: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs a server and its clients; returns the figures."""
    port = 8700 + num_workers
    command = [sys.executable, "-P", str(SERVER), "serve", *([arguments.model] if arguments.model else [])]
    flags = ["--port", str(port), "--host", "127.0.0.1", "--api-workers", str(num_workers)]
    server = subprocess.Popen([*command, *flags, "--log-level", "warning"])
    try:
        wait_for(lambda: httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200)
        time.sleep(5.0)  # every worker is up
        asked = [
            "client",
            str(port),
            str(num_workers * arguments.connections // arguments.clients),
            str(arguments.seconds),
        ]
        clients = [
            subprocess.Popen([sys.executable, "-P", __file__, *asked], stdout=subprocess.PIPE)
            for _ in range(arguments.clients)
        ]
        for each in clients:
            each.stdout.readline()  # type: ignore[union-attr]
        processes = processes_of(server.pid)
        before = {pid: processor_seconds(pid) for pids in processes.values() for pid in pids}
        told = [json.loads(each.communicate()[0]) for each in clients]
        taken = {pid: processor_seconds(pid) - seconds for pid, seconds in before.items()}
    finally:
        server.terminate()
        server.wait(60)
    num_requests = sum(each["requests"] for each in told)
    micros = {name: [1e6 * taken[pid] / num_requests for pid in pids] for name, pids in processes.items()}
    serial = sum(micros["engine"]) + sum(micros["supervisor"])
    return {
        "workers": num_workers,
        "requests_per_s": num_requests / max(each["seconds"] for each in told),
        "microseconds_per_request": micros,
        "serial_microseconds": serial,
        "parallel_microseconds": sum(micros["worker"]),
        # With a core for each process: whichever is the busiest is the bound.
        "bound_requests_per_s": 1e6 / max(max(each) for each in micros.values() if each),
    }


def wait_for(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Waits until something holds; until then it may fail to connect."""
    ends_s = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except httpx.TransportError:
            if time.monotonic() > ends_s:
                raise
        time.sleep(0.1)


def main() -> None:
    """Measures, prints a table and writes the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="Default: that of the command.")
    parser.add_argument("--api-workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--connections", type=int, default=64, help="For each worker.")
    parser.add_argument("--clients", type=int, default=1, help="Processes that ask.")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rounds = [measure(number, arguments) for _ in range(arguments.rounds) for number in arguments.api_workers]
    print("workers  requests/s  us a request: workers, engine, supervisor  requests/s with a core for each")
    for each in rounds:
        micros = each["microseconds_per_request"]
        sums = ", ".join(f"{sum(micros[name]):.0f}" for name in ("worker", "engine", "supervisor"))
        print(f"{each['workers']:7}  {each['requests_per_s']:10.0f}  {sums:43}  {each['bound_requests_per_s']:.0f}")
    if arguments.output:
        machine = {"processor": platform.processor(), "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()}
        arguments.output.write_text(json.dumps({"machine": machine, "rounds": rounds}, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        uvloop.run(client(int(sys.argv[2]), int(sys.argv[3]), 1.0, float(sys.argv[4])))
    else:
        main()
