"""One body for every error, one table from engine errors to statuses."""

import asyncio
from unittest.mock import Mock

import httpx
import openai as openai_sdk
import orjson
import pytest

from penstock.engine.protocol import errors
from penstock.engine.protocol.errors import (
    DeadlineExceededError,
    EngineError,
    EngineOverloadedError,
    RequestTooLongError,
)
from penstock.server.errors import ERROR_KINDS
from penstock.server.routes import models


def tree(cls: type[EngineError]) -> list[type[EngineError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in tree(child))]


def check_envelope(response: httpx.Response) -> dict:
    """What OpenAI, Cohere and Jina clients read."""
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


def test_the_table_holds_every_engine_error() -> None:
    assert set(ERROR_KINDS) == set(tree(EngineError))


@pytest.mark.parametrize("cls", tree(EngineError), ids=lambda cls: cls.__name__)
async def test_every_engine_error_has_its_status_and_body(client, engine, cls: type[EngineError]) -> None:
    engine.failure = made(cls)
    response = await client.post("/v1/embeddings", json={"input": "a"}, headers={"x-request-id": "id-7"})
    kind = ERROR_KINDS[cls]
    assert response.status_code == kind.status
    error = check_envelope(response)
    assert (error["type"], error["code"]) == (kind.type, kind.code)
    # How long the engine was given is not what the client has asked for: the server words its deadline itself.
    shown = "deadline of 600 s" if cls is DeadlineExceededError else "secret detail"
    assert (shown in error["message"]) is not kind.is_hidden
    assert "secret detail" not in error["message"] or shown == "secret detail"
    assert ("id-7" in error["message"]) is kind.is_hidden


@pytest.mark.parametrize(("retry_after_s", "header"), [(0.01, "1"), (2.5, "3"), (1e9, "60")])
async def test_overload_says_when_to_come_back(client, engine, retry_after_s: float, header: str) -> None:
    engine.failure = EngineOverloadedError("full", retry_after_s=retry_after_s, reason="queue_tokens")
    response = await client.post("/v1/embeddings", json={"input": "a"})
    assert response.status_code == 429
    assert response.headers["retry-after"] == header


async def test_an_unforeseen_error_is_hidden_and_logged(client, engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.failure = RuntimeError("secret detail")
    response = await client.post("/v1/embeddings", json={"input": "a"}, headers={"x-request-id": "id-8"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "id-8" in check_envelope(response)["message"]
    assert "id-8" in caplog.text
    assert "secret detail" in caplog.text
    engine.failure = None
    assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200


async def test_an_unforeseen_error_of_a_route_without_a_body_is_answered_alike(
    client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_card", Mock(side_effect=RuntimeError("secret detail")))
    response = await client.get("/v1/models", headers={"x-request-id": "id-9"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "id-9"
    assert "id-9" in check_envelope(response)["message"]
    assert caplog.text.count("request id-9 failed unexpectedly") == 1


# (what, arguments of the request, status, parts of the message)
NO_ENGINE = [
    ("unknown path", ("GET", "/nowhere", {}), 404, ["/nowhere", "/docs"]),
    ("unknown path posted to", ("POST", "/v3/embeddings", {"json": {}}), 404, ["/v3/embeddings"]),
    ("wrong method", ("GET", "/v1/embeddings", {}), 405, ["POST", "GET"]),
    (
        "unknown model",
        ("POST", "/rerank", {"json": {"model": "x", "query": "a", "documents": ["b"]}}),
        404,
        ["'x'", "fake-model"],
    ),
    ("empty body", ("POST", "/v1/embeddings", {"content": b""}), 400, ["empty"]),
    ("invalid JSON", ("POST", "/v1/embeddings", {"content": b'{"input": '}), 400, ["not valid JSON", "byte"]),
    ("invalid UTF-8", ("POST", "/v1/embeddings", {"content": b'{"input": "\xff"}'}), 400, ["not valid JSON"]),
    ("a list", ("POST", "/v1/embeddings", {"content": b"[1]"}), 400, ["JSON object", "[1]"]),
    ("a text", ("POST", "/v1/embeddings", {"content": b'"a"'}), 400, ["JSON object"]),
    ("null", ("POST", "/v1/embeddings", {"content": b"null"}), 400, ["JSON object, not null"]),
    (
        "a form",
        ("POST", "/v1/embeddings", {"data": {"input": "a"}}),
        415,
        ["application/x-www-form-urlencoded", "application/json"],
    ),
    (
        "plain text",
        ("POST", "/v1/embeddings", {"content": b"{}", "headers": {"content-type": "text/plain"}}),
        415,
        ["text/plain"],
    ),
]


@pytest.mark.parametrize(("request_", "status", "parts"), [c[1:] for c in NO_ENGINE], ids=[c[0] for c in NO_ENGINE])
async def test_errors_before_the_engine(client: httpx.AsyncClient, request_, status: int, parts: list[str]) -> None:
    method, path, options = request_
    response = await client.request(method, path, **options)
    assert response.status_code == status
    message = check_envelope(response)["message"]
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", '{"input": %s}'),
        ("/v1/embeddings", '{"input": "a", "model": %s}'),
        ("/v1/embeddings", '{"input": "a", "dimensions": %s}'),
        ("/v1/embeddings", "%s"),
        ("/rerank", '{"query": "a", "documents": [%s]}'),
        ("/rerank", '{"query": %s, "documents": ["a"]}'),
        ("/score", '{"text_1": "a", "text_2": %s}'),
        ("/classify", '{"input": "a", "labels": [%s]}'),
        ("/classify", '{"input": "a", "examples": %s}'),
    ],
)
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"text": ', "}")])
@pytest.mark.parametrize("depth", [1000, 100_000])
async def test_deep_nesting_is_refused(client, path: str, body: str, opening: str, closing: str, depth: int) -> None:
    value = opening * depth + "1" + closing * depth
    response = await client.post(path, content=body % value)
    assert response.status_code == 400
    assert len(check_envelope(response)["message"]) < 400


async def test_a_request_that_the_shutdown_cuts_off_is_a_503(client, engine) -> None:
    engine.gate = asyncio.Event()
    asking = asyncio.create_task(client.post("/v1/embeddings", json={"input": "a"}))
    await engine.entered.wait()
    asking.cancel()
    response = await asking
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert check_envelope(response)["code"] == "engine_unavailable"
    assert engine.was_cancelled


@pytest.mark.parametrize(
    "content_type", [None, "application/json", "application/json; charset=utf-8", "application/x+json"]
)
async def test_json_media_types(client: httpx.AsyncClient, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = await client.post("/v1/embeddings", content=orjson.dumps({"input": "a"}), headers=headers)
    assert response.status_code == 200


async def test_many_wrong_fields_make_one_short_message(client: httpx.AsyncClient) -> None:
    body = {"input": 5, "model": 1, "dimensions": "x", "normalize": "perhaps", "encoding_format": "z"}
    message = check_envelope(await client.post("/v1/embeddings", json=body))["message"]
    assert message.endswith("and 2 more.")
    assert len(message) < 400


async def test_long_values_are_cut_in_messages(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/embeddings", json={"input": "a", "encoding_format": "z" * 10_000})
    assert len(response.json()["message"]) < 300


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a", "model": "z" * 10_000}),
        ("/v1/embeddings", {"input": "a", "dimensions": "z" * 10_000}),
        ("/v1/embeddings", {"input": "a", "task": "z" * 10_000}),
        ("/tokenize", {"inputs": "a", "prompt_name": "z" * 10_000}),
        ("/rerank", {"query": "a", "documents": [{"z" * 10_000: 1}]}),
        ("/rerank", {"query": "a", "documents": [{"z": 1}], "rank_fields": ["y"] * 10_000}),
        ("/invocations", {"z" * 10_000: 1}),
        ("/" + "z" * 10_000, {}),
    ],
)
async def test_names_from_clients_are_cut_in_messages(client: httpx.AsyncClient, path: str, body: dict) -> None:
    response = await client.post(path, json=body)
    assert 400 <= response.status_code < 500
    assert len(response.json()["message"]) < 400


def test_the_module_docstring_tree_is_whole() -> None:
    assert all(cls.__name__ in (errors.__doc__ or "") for cls in tree(EngineError))


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("br", 415), ("identity", 400)])
async def test_a_compressed_body_is_called_so(client: httpx.AsyncClient, path: str, coding: str, status: int) -> None:
    headers = {"content-encoding": coding}
    response = await client.post(path, content=b"\x1f\x8b\x08\x00 no JSON", headers=headers)
    assert response.status_code == status
    assert status == 400 or f"Content-Encoding is '{coding}'" in response.text


async def test_an_error_is_short_however_long_the_body_is(client: httpx.AsyncClient) -> None:
    for body in ({f"field {i}": 1 for i in range(20_000)}, {"k" * 100_000: 1}):
        response = await client.post("/v1/embeddings", json=body)
        assert response.status_code == 400
        assert len(response.content) < 5_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": [1] * 100_000}}),
        ("/v1/classify", {"input": "a", "labels": [1] * 100_000}),
        ("/v1/classify", {"input": "a", "examples": [1] * 100_000}),
        ("/v1/encode", {"input": "a", "outputs": [1] * 100_000}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": [1] * 100_000}),
        ("/detokenize", {"tokens": ["a"] * 100_000}),
    ],
)
async def test_a_list_is_wrong_at_its_first_wrong_entry(
    client: httpx.AsyncClient, path: str, body: dict[str, object]
) -> None:
    response = await client.post(path, json=body)
    assert response.status_code in (400, 422)
    assert " more." not in response.text  # one error, and not one for each entry: of a large body, gigabytes


async def test_nulls_are_not_listed_as_given(client: httpx.AsyncClient) -> None:
    message = (await client.post("/", json={"query": None, "parameters": {}})).json()["message"]
    assert "query is missing; the body has parameters." in message


@pytest.mark.parametrize("number", ["1" + "0" * 30, "-1" + "0" * 30])
async def test_a_number_that_no_integer_holds_is_out_of_range(client: httpx.AsyncClient, number: str) -> None:
    body = f'{{"input": [{number}]}}'
    answer = await client.post("/v1/embeddings", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["message"] == "input holds a number that is out of range: no model has such a token id."


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/embeddings", "dimensions", {"input": "a"}),
        ("/v1/embeddings", "output_dimension", {"input": "a", "encoding_format": "base64", "output_dtype": "binary"}),
        ("/v1/encode", "dimensions", {"input": "a"}),
        ("/pooling", "dimensions", {"input": "a"}),
        ("/v2/embed", "output_dimension", {"texts": ["a"], "embedding_types": ["ubinary"]}),
        ("/embed", "dimensions", {"inputs": "a"}),
        ("/api/embed", "dimensions", {"input": "a"}),
    ],
)
async def test_a_width_beyond_all_answers_is_refused_by_its_name(client, path: str, field: str, body: dict) -> None:
    message = (await client.post(path, json={**body, field: 2**53 - 1})).json()["message"]
    assert message.startswith(f"{field} is {2**53 - 1}; ")


async def test_empty_object_is_called_empty(client) -> None:
    response = await client.post("/rerank", json={})
    assert response.json()["error"]["message"].startswith("query is missing; the body is empty.")


@pytest.mark.parametrize("width", [-1, 0])
@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("/v1/embeddings", "dimensions", {"input": "a"}),
        ("/v1/embeddings", "output_dimension", {"input": "a"}),
        ("/v1/encode", "dimensions", {"input": "a", "outputs": ["dense"]}),
        ("/pooling", "dimensions", {"input": "a"}),
        ("/v1/embed", "output_dimension", {"texts": ["a"], "input_type": "clustering"}),
        ("/v2/embed", "output_dimension", {"texts": ["a"], "input_type": "clustering"}),
        ("/embed", "dimensions", {"inputs": "a"}),
        ("/api/embed", "dimensions", {"model": "alias", "input": "a"}),
    ],
)
async def test_width_below_1_has_one_message(width: int, path: str, name: str, body: dict, client) -> None:
    response = await client.post(path, json={**body, name: width})
    assert response.status_code in (400, 413, 422)
    assert f"{name} must be at least 1, not {width}." in response.text


async def test_openai_client_sends_a_request_past_its_deadline_once(client: httpx.AsyncClient, engine) -> None:
    engine.gate, sent = asyncio.Event(), []

    async def count(request: httpx.Request) -> None:
        sent.append(request)

    client.event_hooks = {"request": [count]}
    sdk = openai_sdk.AsyncOpenAI(base_url="http://test/v1", api_key="any", http_client=client, max_retries=2)
    with pytest.raises(openai_sdk.APIStatusError) as caught:
        await sdk.embeddings.create(model="fake-model", input="a", extra_headers={"x-request-timeout": "0.05"})
    assert caught.value.status_code == 408
    assert len(sent) == 1
