"""A failing part fails one request; neither the response nor the log shows the text of the request."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.model_files.model_folder import locate_model
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import ModelLoadError
from penstock.server.app import create_app
from penstock.server.models.served_model import ServedModel
from penstock.server.settings import ServerSettings

from .conftest import POISONED_ID

Serving = Callable[[Path], AbstractAsyncContextManager[tuple[httpx.AsyncClient, AsyncEngine]]]
SECRET = "a private sentence"


@pytest.fixture
def serving() -> Serving:
    """Serve a model in this process: `async with serving(folder) as (client, engine)`."""

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


async def test_weights_with_nan_fail_their_own_inputs(
    small_bert: Path, serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(small_bert) as (client, _):

        async def embed(*inputs: list[int]) -> httpx.Response:
            return await client.post("/v1/embeddings", json={"input": list(inputs)})

        good = ([101, 7592, 102], [101, 2088, 102])
        before = await embed(*good)
        bad, beside = await asyncio.gather(embed(good[0], [101, POISONED_ID, 102]), embed(*good))
        assert bad.status_code == 500
        assert bad.json()["error"]["code"] == "model_execution_failed"
        assert bad.headers["x-request-id"] in bad.json()["message"]
        for response in (beside, await embed(*good)):
            for row, expected in zip(response.json()["data"], before.json()["data"], strict=True):
                assert row["embedding"] == pytest.approx(expected["embedding"], abs=1e-6)
        assert (await client.get("/health/ready")).status_code == 200
    assert "NaN or infinite" in caplog.text


class Panic(BaseException):
    """Like a panic of a Rust library: no Exception, and its message has the input."""


@pytest.mark.parametrize("failure", [RuntimeError("boom"), Panic(f"byte 3 is inside a character of {SECRET!r}")])
async def test_failing_tokenizer_fails_one_request(
    failure: BaseException,
    default_model: Path,
    serving: Serving,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(default_model) as (client, engine):
        encoder = engine._tokenizer._tokenizer
        encode = encoder.encode

        def fail_on_secret(inputs: Any, *arguments: Any) -> Any:
            if SECRET in inputs:
                raise failure
            return encode(inputs, *arguments)

        monkeypatch.setattr(encoder, "encode", fail_on_secret)
        texts = ("one", SECRET, "two", SECRET, "three")
        answers = await asyncio.gather(*(client.post("/v1/embeddings", json={"input": text}) for text in texts))
        assert [answer.status_code for answer in answers] == [200, 500, 200, 500, 200]
        assert "boom" not in answers[1].text
        assert SECRET not in answers[1].text
        for wrong in ([30_522], [-1], [2**31], [2**63]):
            assert (await client.post("/v1/embeddings", json={"input": wrong})).status_code == 400
        assert (await client.post("/v1/embeddings", json={"input": "at the end"})).status_code == 200
        assert engine.stats().num_tokens == 0
    assert answers[1].headers["x-request-id"] in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        *(
            (OSError(code, os.strerror(code), "/cache/models--owner--name"), os.strerror(code))
            for code in (errno.ENOSPC, errno.EROFS)
        ),
        (OSError("Got: ConnectError: no route to host\nAn error happened"), ": ConnectError: no route to host"),
    ],
)
def test_failed_download_states_model_and_reason(error: OSError, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelLoadError, match=reason) as failed:
        locate_model("owner/name")
    assert "owner/name" in failed.value.message
    assert (error.filename or "") in failed.value.message
    assert "Got:" not in failed.value.message
    assert "\n" not in failed.value.message
