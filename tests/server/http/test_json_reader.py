"""The values of large and dense bodies are counted before they are parsed."""

import json
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError

from penstock.server.admission import AdmissionController
from penstock.server.http.json_reader import SLICE_BYTES, WEIGHT, JsonReader, count_values
from penstock.server.settings import ServerSettings

from ...tables import cases


@cases(__file__, "value", "num_values")
@pytest.mark.parametrize("is_ascii", [False, True])
def test_count_does_not_depend_on_the_slices(value: Any, num_values: int, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=1).encode()
    for slice_bytes in (2, 3, 7, 64, 1_000_000):
        *_, counted = count_values(text, slice_bytes)
        assert counted == num_values


def json_reader(max_values: int = 2_000_000) -> JsonReader:
    return JsonReader(AdmissionController(ServerSettings(max_json_values=max_values)), 4096)


def scope() -> dict[str, Any]:
    return {"headers": [], "client": ("10.0.0.1", 1)}


def receiving(*pieces: bytes) -> Any:
    left = list(pieces)

    async def receive() -> dict[str, Any]:
        piece = left.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    return receive


@pytest.mark.parametrize("unit", [b"[]", b"{}", b'"a"', b"1", b"null", b'{"a":1}', b"[[1]]"])
async def test_dense_body_is_rejected_before_parsing(unit: bytes) -> None:
    reader = json_reader(100_000)
    with pytest.raises(HTTPException) as raised:
        await reader.read(scope(), receiving(b'{"input":"a","user":[' + b",".join([unit] * 100_001) + b"]}"))
    assert raised.value.status_code == 413
    assert "--max-json-values" in raised.value.detail


@cases(__file__, "unit", "is_dense")
async def test_values_of_short_dense_bodies_are_counted(unit: str, is_dense: bool, monkeypatch) -> None:
    memory, reader = Mock(), json_reader()
    monkeypatch.setattr(reader._admission, "body_memory", lambda _: memory)
    body = f"[{','.join([unit] * (10_000 // len(unit)))}]".encode()
    assert await reader.read(scope(), receiving(body)) == json.loads(body)
    if is_dense:
        assert memory.add_values.call_args.args[0] >= len(body)
    else:
        memory.add_values.assert_not_called()
    memory.reset_mock()
    await reader.read(scope(), receiving(f"[{','.join([unit] * 100)}]".encode()))
    memory.add_values.assert_not_called()  # a small body need not be counted


async def test_numbers_of_a_short_body_are_counted() -> None:
    body = b"[" + b",".join([b"1"] * 1000) + b"]"
    assert len(await json_reader(1000 + WEIGHT).read(scope(), receiving(body))) == 1000
    with pytest.raises(HTTPException, match="--max-json-values"):
        await json_reader(900).read(scope(), receiving(body))
    with pytest.raises(HTTPException, match="--max-json-values"):
        await json_reader(900).read(scope(), receiving(b"[" + b",".join([b"[]"] * 112) + b"]"))


@pytest.mark.parametrize(
    "body",
    [b"{" + b" " * SLICE_BYTES, b'"' + b" " * SLICE_BYTES + b"\\", b'{"a": nul}' + b" " * SLICE_BYTES, b"{", b""],
)
async def test_invalid_json_raises_a_validation_error(body: bytes) -> None:
    with pytest.raises(RequestValidationError) as raised:
        await json_reader().read(scope(), receiving(body))
    assert raised.value.errors()[0]["type"] == ("json_invalid" if body else "missing")


@cases(__file__, "path", "body", "named")
async def test_entries_are_counted_before_they_are_validated(serving, engine, path: str, body, named: str) -> None:
    async with serving(engine, max_inputs_per_request=4) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code in (400, 422)
    assert "has 5 entries; the limit is 4" in answer.text
    assert named in answer.json()["message"]
    assert not engine.calls


async def test_values_of_large_bodies_use_body_memory(serving, engine) -> None:
    body = b'{"input":"a","user":[[' + b",".join([b"[]"] * 100_000) + b"]]}"
    async with serving(engine, max_body_bytes=310_000) as client:
        memory = client._transport.app.state.context.admission.bodies
        memory.add("another client", memory.limit - 2_000_000)
        answer = await client.post("/v1/embeddings", content=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert not engine.calls
        memory.add("another client", -memory.used)
        assert (await client.post("/v1/embeddings", content=body)).status_code == 200


async def test_missing_keys_of_a_message_have_the_defaults_of_asgi() -> None:
    receive = AsyncMock(
        side_effect=[{"type": "http.request", "more_body": True}, {"type": "http.request", "body": b"7"}]
    )
    assert await json_reader().read(scope(), receive) == 7
    assert receive.await_count == 2
