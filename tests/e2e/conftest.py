"""Server processes for each model and set of flags, and a browser."""

import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from ..servers import COMMAND, Launch, Server, launching
from .browser import NAMES, Chromium, Page

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
    """Start a server: `launch("--dtype", "float32", PENSTOCK_PORT="1")`. It is stopped at the end."""
    yield from launching(tmp_path_factory)


@pytest.fixture(scope="session")
def server(launch: Launch, default_model: Path) -> Server:
    """The default model in float32: `penstock serve` without a model."""
    return launch("--dtype", "float32")


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def truth(default_model: Path) -> Callable[[list[str]], object]:
    """Embed with sentence-transformers in float32; skip the test if it is not installed."""
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
    """A browser for the tests of one file. It is never idle and would slow down later tests."""
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
