"""Large responses are sent in parts with the bytes of small ones, and use response memory."""

import asyncio
import base64
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from fastapi import Request

from penstock.server.admission import AdmissionController
from penstock.server.http.json_responses import (
    PART_BYTES,
    IncrementalResponse,
    iter_json,
    json_array,
    json_bytes,
    json_response,
)
from penstock.server.http.quantization import EmbedDtype
from penstock.server.http.vectors import Encoding, EncodingFormat, lazy_rows, vectors_response
from penstock.server.response_size import LARGE_RESPONSE_BYTES, ResponseSize
from penstock.server.settings import ServerSettings

from ...tables import cases, table

HEAD = {"id": "i", "object": "list", "created": 1, "model": "m", "usage": {"prompt_tokens": 1, "total_tokens": 1}}
FORMATS = [EncodingFormat.FLOAT, EncodingFormat.BASE64, EncodingFormat.BYTES, EncodingFormat.BYTES_ONLY]


def request_for(written: int) -> Request:
    """Returns a request with reserved memory for `written` bytes."""
    request = Request({"type": "http"})
    AdmissionController(ServerSettings()).reserve_response(
        request.scope, ResponseSize(written, 1), param="input", remedy=""
    )
    return request


async def sent(
    response: Any, *, version: str = "1.1", gone_after: int | None = None
) -> tuple[dict[str, str], list[bytes]]:
    """Returns the headers and the parts of a response. The client disconnects after `gone_after` parts."""
    headers: dict[str, str] = {}
    parts: list[bytes] = []
    gone = asyncio.Event()

    async def send(message: dict[str, Any]) -> None:
        headers.update({name.decode(): value.decode() for name, value in message.get("headers", ())})
        if message.get("body"):
            parts.append(bytes(message["body"]))
        if len(parts) == gone_after:
            gone.set()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    await response({"type": "http", "http_version": version}, receive, send)
    return headers, parts


@pytest.mark.parametrize(
    "value",
    [
        *('é"\n\x01😀' * 20_000, ["x" * 40_000, "é" * 700, "z"] * 40, ["x" * 40_000] * 70),
        {"a": "😀" * 40_000, "b": [{"c": "x" * 40_000}]},
        *({}, [], {"a": []}, [[]], {"a": {}, "b": [1, "x", None, {"c": [True]}]}, "text", 1.5, None),
        *(list(range(1000)), ["x"] * 1000, [{"a": 1}] * 1000, [None, 1], [[1, 2], [3]], {"": [{"b": {"c": [1]}}]}),
    ],
)
def test_parts_join_to_the_json_of_a_value(value: Any) -> None:
    parts = list(iter_json(value))
    assert b"".join(parts) == json_bytes(value) == orjson.dumps(value)
    assert max(map(len, parts)) <= 4 * PART_BYTES


def test_array_with_gaps_is_written_as_its_copy() -> None:
    rows = np.arange(12.0).reshape(3, 4)[:, ::2]
    assert orjson.loads(json_bytes({"a": rows})) == {"a": rows.tolist()}
    with pytest.raises(TypeError, match="object"):
        json_bytes({"a": object()})


def test_iterators_are_written_as_lists() -> None:
    def value() -> dict[str, Any]:
        return {"data": ({"i": i, "tokens": iter([{"t": 1}] * i)} for i in range(3)), "none": iter(())}

    expected = {"data": [{"i": i, "tokens": [{"t": 1}] * i} for i in range(3)], "none": []}
    assert orjson.loads(b"".join(iter_json(value()))) == orjson.loads(json_response(value()).body) == expected


@pytest.mark.parametrize("shape", [(0, 4), (1, 4), (5_000, 7), (3, 20_000), (9_000,), (0,)])
def test_arrays_are_written_row_by_row(shape: tuple[int, ...]) -> None:
    rows = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    whole = orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)
    assert b"".join(json_array(rows).parts()) == whole
    assert b"".join(iter_json(rows)) == whole


@pytest.mark.parametrize("width", [1, 7])
def test_parts_of_base64_have_whole_groups(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.http.json_responses._PART_VALUES", 12)
    rows = np.random.default_rng(2).normal(size=(40, width)).astype(np.float32)
    (lazy,) = lazy_rows([rows], Encoding(format=EncodingFormat.BASE64))
    parts = list(lazy.parts())
    assert max(map(len, parts)) == 16 * max(12, 3 * width) // 3, "12 numbers, or 3 rows if they are longer"
    assert b"".join(parts) == b'"' + base64.b64encode(rows.tobytes()) + b'"'


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, EmbedDtype.FLOAT32) for kind in (None, "int8", "ubinary")),
        *((None, dtype) for dtype in (EmbedDtype.BFLOAT16, EmbedDtype.FP8_E4M3)),
    ],
)
@pytest.mark.parametrize("is_matrix", [False, True])
async def test_large_response_has_the_bytes_of_a_small_one(form, kind: Any, dtype: EmbedDtype, is_matrix: bool) -> None:
    rows: Any = np.random.default_rng(1).normal(size=(3_000, 64)).astype(np.float32)
    if is_matrix:
        rows = [rows[:0], rows[:1], rows[1:2_500], rows[2_500:]]
    encoding = {"x": Encoding(format=form, quantization=kind, dtype=dtype)}
    large = vectors_response(request_for(LARGE_RESPONSE_BYTES), HEAD, rows, encoding, name="pooling")
    small = vectors_response(request_for(LARGE_RESPONSE_BYTES - 1), HEAD, rows, encoding, name="pooling")
    assert isinstance(large, IncrementalResponse)
    assert not isinstance(small, IncrementalResponse)
    headers, parts = await sent(large)
    small_headers, (body,) = await sent(small)
    assert b"".join(parts) == body
    assert max(map(len, parts)) < 4 * PART_BYTES
    assert headers["content-type"] == small_headers["content-type"]
    assert headers.get("metadata") == small_headers.get("metadata")
    is_bytes = form in (EncodingFormat.BYTES, EncodingFormat.BYTES_ONLY)
    assert headers.get("content-length") == (str(len(body)) if is_bytes else None)


async def test_disconnect_ends_the_response() -> None:
    def parts() -> Any:
        for _ in range(1_000):
            yield b"x" * PART_BYTES

    _, seen = await sent(IncrementalResponse(parts(), {}), gone_after=3)
    assert len(seen) < 6


async def test_memory_is_held_until_the_response_has_gone(serving, engine) -> None:
    engine.gate = asyncio.Event()
    texts = {"inputs": ["word " * 60] * 1_000}
    async with serving(engine, response_memory=3_000_000) as client:
        admission = client._transport.app.state.context.admission
        first = asyncio.create_task(client.post("/embed_all", json=texts))
        await engine.entered.wait()
        assert admission.responses.used == 12 * 62_000 * 8
        num_calls = len(engine.calls)
        rejected = await client.post("/embed_all", json=texts)
        assert rejected.status_code == 429
        assert int(rejected.headers["retry-after"]) >= 1
        assert "The response memory is full" in rejected.json()["message"]
        assert len(engine.calls) == num_calls, "it was rejected after the model ran"
        engine.gate.set()
        assert (await first).status_code == 200
        assert admission.responses.used == 0
        assert (await client.post("/embed_all", json=texts)).status_code == 200
        assert (await client.post("/embed_all", json={"inputs": "a"})).status_code == 200


# [path, body, bytes of the response and of its values without texts, texts in the response, how often each is written]
SIZES: list[tuple[str, dict[str, Any], int, int, list[str], int]] = table(__file__, "sizes_of_responses")


async def test_each_route_reserves_memory_for_its_response(client: httpx.AsyncClient, engine, monkeypatch) -> None:
    reserved: list[ResponseSize] = []
    hold = AdmissionController.reserve_response

    def record(self: AdmissionController, scope: Any, size: ResponseSize, **options: Any) -> None:
        reserved.append(size)
        hold(self, scope, size, **options)

    monkeypatch.setattr(AdmissionController, "reserve_response", record)
    for path, body, written, held, texts, copies in SIZES:
        reserved.clear()
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        sizes = (sum(size.json_bytes for size in reserved), sum(size.value_bytes for size in reserved))
        text_bytes = sum(text.__sizeof__() for text in texts)
        assert sizes == (written + copies * text_bytes, held + text_bytes), (path, body)


async def test_too_large_response_stops_before_the_forward(client: httpx.AsyncClient, engine, monkeypatch) -> None:
    monkeypatch.setattr("penstock.server.admission.MAX_RESPONSE_BYTES", 10)
    for path, body, *_ in SIZES:
        response = await client.post(path, json=body)
        assert response.status_code in (400, 422), path
        assert "the limit is 10. Send " in response.text
    assert {name for name, _ in engine.calls} <= {"tokenize_details"}


@cases(__file__, "body", "status")
async def test_returned_documents_count_in_the_response_size(client, engine, monkeypatch, body, status: int) -> None:
    monkeypatch.setattr("penstock.server.admission.MAX_RESPONSE_BYTES", 600)
    answer = await client.post("/rerank", json={"query": "a", **body})
    assert answer.status_code == status
    if status != 200:
        assert "set return_documents to false" in answer.text or "leave return_text out" in answer.text
        assert not engine.calls
