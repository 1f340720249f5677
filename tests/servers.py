"""Real `penstock serve` processes for tests."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from .ports import free_port
from .waiting import wait_until

COMMAND = (sys.executable, "-P", "-m", "penstock.server")
START_TIMEOUT_S = 240
MIB = 2**20


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def exists(pid: int) -> bool:
    """Returns whether a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Server:
    """A running `penstock serve`.

    Attributes:
        port: Of 127.0.0.1.
        process: The server process; its children are engine processes.
        log: File of its stderr.
        metrics_port: Port of /metrics.
    """

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    metrics_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def children(self) -> list[int]:
        return children_of(self.process.pid)

    def resident_bytes(self) -> int:
        """Memory of the server process."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def num_files(self) -> int:
        """Open files of the server process, connections included."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels, or the value of `name{label="value"}`."""
        rows = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=120).text.splitlines()
        return sum(float(row.rpartition(" ")[2]) for row in rows if row.startswith((name + "{", name + " ")))

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=headers, timeout=120)

    def embed(self, texts: object, **headers: str) -> httpx.Response:
        return self.post("/v1/embeddings", {"input": texts}, **headers)

    def wait_for(self, path: str, status: int) -> float:
        """Wait until a GET of `path` returns `status`. Returns seconds."""

        def has_status() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(httpx.TransportError):
                return client.get(self.url + path).status_code == status
            return False

        began_s = time.monotonic()
        with httpx.Client(timeout=60) as client:
            wait_until(has_status, START_TIMEOUT_S)
        return time.monotonic() - began_s

    def wait_for_log(self, text: str) -> None:
        wait_until(lambda: text in self.log.read_text(), START_TIMEOUT_S)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(120)


Launch = Callable[..., Server]


def launching(tmp_path_factory: pytest.TempPathFactory | None = None) -> Iterator[Launch]:
    """Yield a function that starts servers: `launch("--dtype", "float32", TMPDIR="/t")`. Stops them at the end.

    Without a factory of folders, each call needs `log`.
    """
    servers: list[Server] = []

    def launch(
        *flags: str, command: tuple[str, ...] = COMMAND, log: Path | None = None, ready: bool = True, **variables: str
    ) -> Server:
        if log is None:
            assert tmp_path_factory is not None
            log = tmp_path_factory.mktemp("server") / "log.txt"
        port = free_port()
        address = ("--host", "127.0.0.1", "--port", str(port), "--device", "cpu")
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [*command, "serve", *address, *flags],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, **variables},
            )
        has_metrics_port = "--metrics-port" in flags
        metrics_port = int(flags[flags.index("--metrics-port") + 1]) if has_metrics_port else port
        server = Server(port, process, log, metrics_port)
        servers.append(server)
        if ready:
            server.wait_for("/health/ready", 200)
        return server

    yield launch
    running = [server for server in servers if server.process.poll() is None]
    for server in running:
        server.process.terminate()
    for server in running:
        server.process.wait(120)
