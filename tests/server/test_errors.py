"""Error responses: status, body and length of the message."""

import asyncio
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from penstock.engine.protocol import errors
from penstock.engine.protocol.errors import (
    DeadlineExceededError,
    EngineError,
    EngineOverloadedError,
    RequestTooLongError,
)
from penstock.server.errors import ERROR_KINDS, quote, quote_names, status_kind
from penstock.server.routes import models

from ..tables import table
from .http.sockets import ask, request, served

LONG = "z" * 10_000


def tree(cls: type[EngineError]) -> list[type[EngineError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in tree(child))]


def check_envelope(response: httpx.Response) -> dict:
    """Checks the fields that OpenAI, Cohere and Jina clients read. Returns the error."""
    body = response.json()
    assert set(body) == {"error", "message", "detail"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["message"] == body["detail"] == body["error"]["message"]
    assert isinstance(body["message"], str)
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return body["error"]


def made(cls: type[EngineError]) -> EngineError:
    if cls is EngineOverloadedError:
        return cls("secret detail", retry_after_s=2.5, reason="queue_tokens")
    if cls is RequestTooLongError:
        return cls("secret detail", num_tokens=9, max_num_tokens=8)
    return cls("secret detail")


def test_every_engine_error_has_a_kind_and_is_documented() -> None:
    assert set(ERROR_KINDS) == set(tree(EngineError))
    assert all(cls.__name__ in (errors.__doc__ or "") for cls in tree(EngineError))


@pytest.mark.parametrize("cls", tree(EngineError), ids=lambda cls: cls.__name__)
async def test_every_engine_error_has_its_status_and_body(client, engine, cls: type[EngineError]) -> None:
    engine.failure = made(cls)
    response = await client.post("/v1/embeddings", json={"input": "a"}, headers={"x-request-id": "id-7"})
    status, *expected = table(__file__, "test_every_engine_error_has_its_status_and_body")[cls.__name__]
    assert response.status_code == status
    error = check_envelope(response)
    assert [error["type"], error["code"]] == expected
    # The server names its own deadline, not the time that it left to the engine.
    shown = "deadline of 600 s" if cls is DeadlineExceededError else "secret detail"
    is_hidden = status == 500
    assert (shown in error["message"]) is not is_hidden
    assert "secret detail" not in error["message"] or shown == "secret detail"
    assert ("id-7" in error["message"]) is is_hidden


def test_status_without_an_engine_error_has_its_type_and_code() -> None:
    for status, *expected in table(__file__, "test_status_without_an_engine_error_has_its_type_and_code"):
        kind = status_kind(status)
        assert [kind.status, kind.type, kind.code] == [status, *expected]


@pytest.mark.parametrize(("retry_after_s", "header"), [(0.01, "1"), (2.5, "3"), (1e9, "60")])
async def test_overload_has_retry_after_in_whole_seconds(client, engine, retry_after_s: float, header: str) -> None:
    engine.failure = EngineOverloadedError("full", retry_after_s=retry_after_s, reason="queue_tokens")
    response = await client.post("/v1/embeddings", json={"input": "a"})
    assert response.status_code == 429
    assert response.headers["retry-after"] == header


async def test_unexpected_error_is_hidden_and_logged(client, engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.failure = RuntimeError("secret detail")
    response = await client.post("/v1/embeddings", json={"input": "a"}, headers={"x-request-id": "id-8"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "id-8" in check_envelope(response)["message"]
    assert "id-8" in caplog.text
    assert "secret detail" in caplog.text
    engine.failure = None
    assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200


async def test_unexpected_error_of_a_get_route_is_hidden(client, caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_card", Mock(side_effect=RuntimeError("secret detail")))
    response = await client.get("/v1/models", headers={"x-request-id": "id-9"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "id-9"
    assert "id-9" in check_envelope(response)["message"]
    assert caplog.text.count("request id-9 failed unexpectedly") == 1


# (method, path, arguments of the request, status, parts of the message)
NO_ENGINE: list[tuple[str, str, dict[str, Any], int, list[str]]] = [
    *table(__file__, "rejected_before_the_engine"),
    ("POST", "/v1/embeddings" + "s" * 5000, {"json": {}}, 404, ["on this server; /docs"]),
    *(
        ("POST", "/v1/embeddings", {"content": content}, 400, [f"not valid JSON: {reason}; send the body in UTF-8"])
        for content, reason in (
            (b'{"input": "\xff"}', "byte 0xff is not UTF-8"),
            ('{"input": "a"}'.encode("utf-16"), "byte 0xff is not UTF-8"),
            ('{"input": "a"}'.encode("utf-16-le"), "it has NUL bytes, as UTF-16 and UTF-32 have"),
        )
    ),
]


async def test_request_is_rejected_before_the_engine(client: httpx.AsyncClient, engine) -> None:
    for method, path, arguments, status, parts in NO_ENGINE:
        response = await client.request(method, path, **arguments)
        assert response.status_code == status, (path, arguments)
        message = check_envelope(response)["message"]
        assert all(part in message for part in parts), message
    assert not engine.calls


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"text": ', "}")])
async def test_deep_nesting_is_rejected(client: httpx.AsyncClient, opening: str, closing: str) -> None:
    value = opening * 100_000 + "1" + closing * 100_000
    for path, body in table(__file__, "test_deep_nesting_is_rejected"):
        response = await client.post(path, content=body % value)
        assert response.status_code in (400, 422), (path, body)
        assert len(response.json()["message"]) < 400


async def test_request_cancelled_by_shutdown_is_a_503(engine) -> None:
    engine.gate = asyncio.Event()
    async with served(engine, options={"timeout_graceful_shutdown": 0}) as (server, port):
        asking = asyncio.create_task(ask(port, request("/v1/embeddings", {"input": "a"})))
        await engine.entered.wait()
        server.should_exit = True
        (answer,) = await asking
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert b'"code":"engine_unavailable"' in answer.body
    assert engine.was_cancelled


async def test_request_that_another_server_cancels_has_no_response(client, engine, caplog) -> None:
    engine.gate = asyncio.Event()
    asking = asyncio.create_task(client.post("/v1/embeddings", json={"input": "a"}))
    await engine.entered.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (engine.was_cancelled, caplog.messages) == (True, [])


async def test_many_wrong_fields_make_a_short_message(client: httpx.AsyncClient) -> None:
    body = {"input": 5, "model": 1, "dimensions": "x", "normalize": "perhaps", "encoding_format": "z"}
    message = check_envelope(await client.post("/v1/embeddings", json=body))["message"]
    assert message.endswith("and 2 more.")
    assert len(message) < 400


async def test_long_values_and_names_are_cut_in_messages(client: httpx.AsyncClient) -> None:
    for path, body in (
        *(
            ("/v1/embeddings", {"input": "a", name: LONG})
            for name in ("model", "dimensions", "task", "encoding_format")
        ),
        ("/tokenize", {"inputs": "a", "prompt_name": LONG}),
        ("/rerank", {"query": "a", "documents": [{LONG: 1}]}),
        ("/rerank", {"query": "a", "documents": [{"z": 1}], "rank_fields": ["y"] * 10_000}),
        ("/invocations", {LONG: 1}),
        ("/" + LONG, {}),
    ):
        response = await client.post(path, json=body)
        assert 400 <= response.status_code < 500
        assert len(response.json()["message"]) < 400


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("br", 415), ("identity", 400)])
async def test_compressed_body_is_rejected_with_its_coding(client, path: str, coding: str, status: int) -> None:
    headers = {"content-encoding": coding}
    response = await client.post(path, content=b"\x1f\x8b\x08\x00 no JSON", headers=headers)
    assert response.status_code == status
    assert status == 400 or f"Content-Encoding is '{coding}'" in response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": [1] * 100_000}}),
        ("/v1/encode", {"input": "a", "outputs": [1] * 100_000}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": [1] * 100_000}),
        ("/detokenize", {"tokens": ["a"] * 100_000}),
    ],
)
async def test_only_the_first_wrong_entry_of_a_list_is_named(client, path: str, body: dict[str, object]) -> None:
    response = await client.post(path, json=body)
    assert response.status_code in (400, 422)
    assert " more." not in response.text  # errors for all entries of a large body would take gigabytes


def test_shown_names_and_values_have_60_characters() -> None:
    assert quote_names([]) == "nothing"
    assert quote_names(["n" * 60, "m" * 61]) == "n" * 60 + ", " + "m" * 60 + "..."
    assert quote_names([str(i) for i in range(20)]).endswith(", 18, 19")
    assert quote_names([str(i) for i in range(21)]).endswith(", 18, 19, ...")
    assert [quote(value) for value in (None, True, False, "a" * 58)] == ["null", "true", "false", repr("a" * 58)]
    assert [len(quote(value)) for value in ("a" * 59, 10**99, ["b" * 30] * 3, {"a": "b" * 99})] == [60] * 4


async def test_openai_client_sends_a_request_past_its_deadline_once(client: httpx.AsyncClient, engine) -> None:
    openai = pytest.importorskip("openai")
    engine.gate, sent = asyncio.Event(), []

    async def count(request: httpx.Request) -> None:
        sent.append(request)

    client.event_hooks = {"request": [count]}
    sdk = openai.AsyncOpenAI(base_url="http://test/v1", api_key="any", http_client=client, max_retries=2)
    with pytest.raises(openai.APIStatusError) as caught:
        await sdk.embeddings.create(model="fake-model", input="a", extra_headers={"x-request-timeout": "0.05"})
    assert caught.value.status_code == 408
    assert len(sent) == 1
