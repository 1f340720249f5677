"""Raw HTTP clients, and the measurement of a server beside them."""

import asyncio
import http.client
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..servers import MIB, Server

MAX_WORK_S = 0.25
"""Limit of the event loop's processor time during one probe, on two cores."""


def head(*lines: str, method: str = "POST", path: str = "/v1/embeddings") -> bytes:
    """The head of a request with some header lines."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def request(body: object, *lines: str, path: str = "/v1/embeddings") -> bytes:
    """A POST request. `body` is encoded as JSON unless it is bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(*lines, f"Content-Length: {len(content)}", path=path) + content


async def read_response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Read one response and return its status and headers.

    Raises:
        ConnectionResetError: The server closed the connection without a response.
    """
    received = b""
    try:
        received = await reader.readuntil(b"\r\n\r\n")
        lines = received.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        await reader.readexactly(int(headers["content-length"]))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        if received or getattr(error, "partial", b""):
            raise AssertionError("half a response") from error
        raise ConnectionResetError from error
    return int(lines[0].split()[1]), headers


class Load:
    """Clients of one server that repeat one request.

    Attributes:
        seconds: Duration of each response by status.
        retry_after_s: Retry-After of each 429.
    """

    def __init__(self, server: Server, request: bytes) -> None:
        self.seconds: defaultdict[int, list[float]] = defaultdict(list)
        self.retry_after_s: list[int] = []
        self._port, self._request = server.port, request
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self) -> None:
        """Send one request and read the response."""
        connection = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        began_s = time.monotonic()
        connection[1].write(self._request)
        status, headers = await read_response(connection[0])
        self.seconds[status].append(time.monotonic() - began_s)
        if status == 429:
            self.retry_after_s.append(int(headers["retry-after"]))
        self._idle.append(connection)

    async def closed_loop(self, num_clients: int, for_s: float) -> None:
        """Each client sends again after each response."""
        end_s = time.monotonic() + for_s

        async def client() -> None:
            while time.monotonic() < end_s:
                await self.send()

        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(client())
        while self._idle:
            self._idle.pop()[1].close()


@dataclass
class Seen:
    """Measurements of a server.

    Attributes:
        longest_s: The longest response to a probe.
        busiest_s: The most processor time of the event loop's thread during one probe. Other processes have no effect.
        grown: Largest growth of the server process's memory in bytes.
    """

    longest_s: float = 0.0
    busiest_s: float = 0.0
    grown: int = 0

    def __str__(self) -> str:
        times = f"longest wait {1000 * self.longest_s:.0f} ms ({1000 * self.busiest_s:.0f} ms of work)"
        return f"{times}, memory {self.grown / MIB:+.0f} MiB"


@contextmanager
def watching(server: Server, what: str, text: str | None = None) -> Iterator[Seen]:
    """Probe a server from a thread: GET /health/live, or the embedding of a text. Print the measurements at the end."""
    seen, stop, process = Seen(), threading.Event(), Path(f"/proc/{server.process.pid}")
    before = server.resident_bytes()
    (process / "clear_refs").write_text("5")  # resets VmHWM
    probe = ("GET", "/health/live", None) if text is None else ("POST", "/v1/embeddings", json.dumps({"input": text}))
    failures: list[str] = []

    def worked_s() -> float:
        return int((process / "task" / process.name / "schedstat").read_text().split()[0]) / 1e9

    def watch() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=240)
        while not stop.is_set():
            began_s, began_work_s = time.monotonic(), worked_s()
            connection.request(*probe)
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                failures.append(f"{response.status} {body[:200]!r}")
            seen.longest_s = max(seen.longest_s, time.monotonic() - began_s)
            seen.busiest_s = max(seen.busiest_s, worked_s() - began_work_s)
            time.sleep(0.005 if text is None else 0.02)
        connection.close()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        time.sleep(0.2)
        yield seen
        time.sleep(0.3)
    finally:
        stop.set()
        thread.join()
    lines = (process / "status").read_text().splitlines()
    seen.grown = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) - before
    print(f"\n{what}: {seen}")
    assert seen.longest_s, "no probe was answered"
    assert not failures
