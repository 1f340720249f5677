"""A fake engine behind the real application. The process that starts a parallel run needs no import of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest

from .fake_server import Serve, serving as serving_fakes

if TYPE_CHECKING:
    import httpx

    from .fake_engine import FakeEngine, Serving


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a small HTTP server: `serve(answer, certificate)` returns its URL."""
    with serving_fakes() as start:
        yield start


@pytest.fixture
def make_engine() -> type[FakeEngine]:
    from .fake_engine import FakeEngine

    return FakeEngine


@pytest.fixture
def engine(make_engine: type[FakeEngine]) -> FakeEngine:
    return make_engine()


@pytest.fixture
def serving() -> Serving:
    from .fake_engine import serving

    return serving


@pytest.fixture
async def client(serving: Serving, engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(engine) as client:
        yield client
