"""A failing part fails one request; neither the response nor the log shows the text of the request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.protocol.config import EngineConfig
from penstock.server.app import create_app
from penstock.server.models.served_model import ServedModel
from penstock.server.settings import ServerSettings

SECRET = "a private sentence"


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, AsyncEngine]]:
    """Serve a model in this process."""
    config = EngineConfig(model=str(folder), in_process=True, num_threads=1, dtype="float32")
    app = create_app([ServedModel(("m",), partial(AsyncEngine.start, config))], ServerSettings())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client,
    ):
        await app.state.startup.wait()
        yield client, app.state.context.models.entry(None).engine


class Panic(BaseException):
    """Like a panic of a Rust library: no Exception, and its message has the input."""


async def test_failing_tokenizer_fails_one_request(
    default_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(default_model) as (client, engine):
        encoder = engine._tokenizer._tokenizer
        encode = encoder.encode

        def fail_on_secret(inputs: Any, *arguments: Any) -> Any:
            if SECRET in inputs:
                raise Panic(f"byte 3 is inside a character of {SECRET!r}")
            return encode(inputs, *arguments)

        monkeypatch.setattr(encoder, "encode", fail_on_secret)
        texts = ("one", SECRET, "two", SECRET, "three")
        answers = await asyncio.gather(*(client.post("/v1/embeddings", json={"input": text}) for text in texts))
        assert [answer.status_code for answer in answers] == [200, 500, 200, 500, 200]
        assert SECRET not in answers[1].text
        assert engine.stats().num_tokens == 0
    assert answers[1].headers["x-request-id"] in caplog.text
    assert SECRET not in caplog.text
