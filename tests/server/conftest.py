"""A fake engine behind the real application. The process that starts a parallel run needs no import of the server."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from .fake_server import Serve, serving as serving_fakes


@pytest.fixture(autouse=True)
def _no_key_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a small HTTP server: `serve(answer, certificate)` returns its URL."""
    with serving_fakes() as start:
        yield start


@pytest.fixture
def make_engine() -> type[Any]:
    from .fake_engine import FakeEngine

    return FakeEngine


@pytest.fixture
def engine(make_engine: type[Any]) -> Any:
    return make_engine()


@pytest.fixture
def serving() -> Any:
    from .fake_engine import serving

    return serving


@pytest.fixture
async def client(serving: Any, engine: Any) -> AsyncIterator[Any]:
    async with serving(engine) as client:
        yield client
