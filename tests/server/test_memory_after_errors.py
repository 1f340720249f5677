"""A request is freed after its error response without the garbage collector."""

import asyncio
import gc
import logging
import weakref
from collections.abc import Awaitable, Iterator
from typing import Any

import orjson
import pytest

from penstock.engine.protocol.errors import (
    DeadlineExceededError,
    EngineOverloadedError,
    EngineUnavailableError,
    ModelExecutionError,
)
from penstock.server.request_state import state_of

from .bodies import FORWARDS, http_scope

KEY = "a-key"
MAX_BODY = 20_000
EMBED = "/v1/embeddings"
FORM = {"content-type": "multipart/form-data; boundary=B"}
PART = b'--B\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\na\r\n--B'
LONG = {"input": "word " * 100}
TEI_LONG = {"inputs": "word " * 100, "truncate": False}
BODIES = {path: FORWARDS[path] for path in (EMBED, "/v2/embed", "/api/embed", "/embed")}
BODIES["/invocations"] = {"inputs": "a"}
Engine = Any


@pytest.fixture(autouse=True)
def _no_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("penstock.server.middleware.rejection_queue.TICK_S", 0.001)
    logging.disable()  # pytest keeps log records and their tracebacks
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    logging.disable(logging.NOTSET)


async def answer(
    app: Any, path: str, body: bytes, headers: dict[str, str], *, leaves: bool = False
) -> tuple[int, weakref.ref[Any]]:
    """Returns the status of a request and a reference to its `receive` function.

    Every frame of the request refers to that function. With `leaves` the client disconnects while the engine runs.
    """
    status = 0
    messages = [{"type": "http.request", "body": body}]
    lost = asyncio.get_running_loop().create_future()

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)

    names = {"authorization": f"Bearer {KEY}", "content-type": "application/json", **headers}
    scope = http_scope(path, names)
    state_of(scope).connection_lost = lost
    if leaves:
        asyncio.get_running_loop().call_later(0.05, lost.set_result, None)
    await asyncio.create_task(app(scope, receive, send))
    return status, weakref.ref(receive)


async def check(status: int, answering: Awaitable[tuple[int, weakref.ref[Any]]]) -> None:
    seen, body = await answering
    assert seen == status
    for _ in range(3):  # callbacks that are due soon
        await asyncio.sleep(0)
    assert body() is None


CASES: list[tuple[int, str, bytes, dict[str, str]]] = [
    (200, EMBED, b'{"input": "a"}', {}),
    (400, EMBED, b'{"input": "a"', {}),
    (400, EMBED, b'{"input": {"a": 1}}', {}),
    (400, EMBED, b'{"input": "a"}', {"x-request-timeout": "soon"}),
    (401, EMBED, b'{"input": "a"}', {"authorization": "Bearer none"}),
    (404, EMBED, b'{"input": "a", "model": "none"}', {}),
    (404, "/none", b'{"input": "a"}', {}),
    (413, EMBED, b"a" * (MAX_BODY + 1), {}),
    (413, EMBED, b'{"input": [' + b"[1]," * 1000 + b"[1]]}", {}),
    (415, EMBED, b'{"input": "a"}', {"content-type": "text/plain"}),
    (422, "/embed", orjson.dumps(TEI_LONG), {}),
    (400, "/api/embed", orjson.dumps({"model": "fake-model", **LONG, "truncate": False}), {}),
    (400, "/v1/files", PART, FORM),
]


async def test_rejected_request_is_freed(serving: Any, engine: Engine, tmp_path: Any) -> None:
    limits = {"max_body_bytes": MAX_BODY, "max_inputs_per_request": 3, "max_json_values": 1000}
    async with serving(engine, api_key=(KEY,), data_dir=tmp_path / "data", **limits) as client:
        app = client._transport.app
        for status, path, body, headers in CASES:
            await answer(app, path, body, headers)  # the first request fills caches
            await check(status, answer(app, path, body, headers))


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (429, lambda: EngineOverloadedError("full", retry_after_s=1, reason="queue")),
        (500, lambda: ModelExecutionError("the model failed")),
        (500, lambda: RuntimeError("a bug")),
        (503, lambda: EngineUnavailableError("the engine died")),
        (504, lambda: DeadlineExceededError("too late")),
    ],
)
async def test_failed_request_is_freed(serving: Any, engine: Engine, status: int, error) -> None:
    engine.failure = error()  # the error outlives the request
    async with serving(engine) as client:
        for path, body in BODIES.items():
            await check(status, answer(client._transport.app, path, orjson.dumps(body), {}))


@pytest.mark.parametrize(
    ("status", "settings", "headers", "leaves"),
    [(408, {}, {"x-request-timeout": "0.1"}, False), (504, {"request_timeout_s": 0.1}, {}, False), (499, {}, {}, True)],
)
async def test_expired_or_disconnected_request_is_freed(serving, engine, status, settings, headers, leaves) -> None:
    engine.gate = asyncio.Event()
    async with serving(engine, **settings) as client:
        await check(status, answer(client._transport.app, EMBED, b'{"input": "a"}', headers, leaves=leaves))
