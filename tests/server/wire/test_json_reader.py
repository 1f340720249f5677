"""What a body may hold is counted before it is parsed; what is large is parsed in slices, to the same value."""

from __future__ import annotations

import json
import random
from collections.abc import Generator
from typing import Any, TypeVar

import httpx
import orjson
import pytest
from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError

from penstock.server.wire.json_marks import (
    SLICE_BYTES,
    WEIGHT,
    InvalidJsonError,
    TooManyValuesError,
    find_marks,
)
from penstock.server.wire.json_reader import JsonReader
from penstock.server.wire.json_slices import build

T = TypeVar("T")
PLENTY = 10**9
CHARS = ["a", '"', "\\", "é", "я", "😀", "\n", "\r", "\r\n", ",", "[", "]", "{", "}", ":", '\\"', "\\\\", " "]


def run(steps: Generator[None, None, T]) -> tuple[T, int]:
    """Return what comes of all steps, and how many there are."""
    num_steps = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, num_steps
        num_steps += 1


def parse(text: bytes, slice_bytes: int) -> Any:
    marks, _ = run(find_marks(text, PLENTY, slice_bytes))
    return run(build(bytearray(text), marks, slice_bytes))[0]


def some_text(chance: random.Random) -> str:
    return "".join(chance.choices(CHARS, k=chance.choice([0, 1, 5, 30, 300])))


def some_value(chance: random.Random, depth: int) -> Any:
    kind = chance.random()
    if depth == 0 or kind < 0.3:
        return chance.choice([None, True, chance.randint(-(10**9), 10**9), chance.random(), some_text(chance)])
    if kind < 0.7:
        return [some_value(chance, depth - 1) for _ in range(chance.choice([0, 1, 3, 8]))]
    return {some_text(chance)[:4]: some_value(chance, depth - 1) for _ in range(chance.choice([0, 1, 3]))}


@pytest.mark.parametrize("seed", range(40))
def test_slices_give_what_orjson_gives(seed: int) -> None:
    chance = random.Random(seed)
    value = some_value(chance, 4)
    is_ascii, indent = chance.random() < 0.5, chance.choice([None, 1, 30])
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode()
    assert parse(text, chance.choice([64, 65, 100, 1000])) == value


@pytest.mark.parametrize("seed", range(40))
def test_slices_refuse_what_orjson_refuses(seed: int) -> None:
    chance = random.Random(seed)
    text = bytearray(json.dumps([some_value(chance, 3) for _ in range(3)]).encode())
    at = chance.randrange(len(text))
    text[at : at + chance.choice([0, 1, 4])] = chance.choice([b"", b",", b"[", b"}", b'"', b"\\", b":", b"\xff"])
    try:
        wanted = orjson.loads(text)
    except orjson.JSONDecodeError:
        with pytest.raises(InvalidJsonError):
            parse(bytes(text), 64)
    else:
        assert parse(bytes(text), 64) == wanted


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b" " * 200, b"[" * 200, b"]" * 200, b'"' + b"a" * 200, b"1," * 200, b"7" * 200, b"x" * 200),
        *(b"[" + b"1," * 100 + b"]", b"[" + b" " * 200 + b",1]", b"[1" + b" " * 200 + b"2]", b"[" + b" " * 200 + b"}"),
        *(b'{"a"' + b" " * 200 + b"}", b"{" + b"1" * 200 + b":1}", b'{"' + b"k" * 200 + b'":1}'),
        *(b'["' + b"a" * 100 + b'" "' + b"a" * 100 + b'"]', b'["' + b"\\ud83d" * 30 + b'"]'),
    ],
)
def test_what_is_no_json_is_refused_at_every_size(text: bytes) -> None:
    with pytest.raises(InvalidJsonError):
        parse(text, 64)


@pytest.mark.parametrize("unit", ["a", "é", "я", "😀", "\\", '"', "\\u00e9", "\r\n"])
@pytest.mark.parametrize("is_ascii", [False, True])
def test_long_texts_are_cut_between_characters(unit: str, is_ascii: bool) -> None:
    for num_before in range(15):
        value = ["x" * num_before + unit * 100]
        assert parse(json.dumps(value, ensure_ascii=is_ascii).encode(), 64) == value


def test_large_bodies_are_looked_at_in_many_slices() -> None:
    text = json.dumps({"input": ["a, [b], {c}" * 100] * 100, "deep": [[["x" * 1000] * 10] * 10]}).encode()
    marks, num_steps = run(find_marks(text, PLENTY, 1000))
    assert num_steps >= len(text) / 1000
    value, num_steps = run(build(text, marks, 1000))
    assert num_steps >= len(text) / 2000
    assert value == json.loads(text)


@pytest.mark.parametrize(
    ("text", "num_values"),
    [
        ("[1, 2, 3]", WEIGHT + 2),
        ('["a", "b"]', 3 * WEIGHT + 1),
        ('{"a": [1, {}]}', 4 * WEIGHT + 2),
        ('["a,b,[c],{d},\\"e,\\\\"]', 2 * WEIGHT),
    ],
)
def test_what_a_body_holds_is_counted_outside_its_texts(text: str, num_values: int) -> None:
    run(find_marks(text.encode(), num_values, 16))
    with pytest.raises(TooManyValuesError):
        run(find_marks(text.encode(), num_values - 1, 16))


def receiving(*pieces: bytes) -> Any:
    left = list(pieces)

    async def receive() -> dict[str, Any]:
        piece = left.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    return receive


async def test_the_largest_batches_and_texts_are_read() -> None:
    reader = JsonReader(2_000_000, 4096)
    ids = {"input": [list(range(1000, 1512))] * 2048}
    rows = {"texts": ['{"a": [1, 2, 3], "b": "x, y"},' * 200] * 500}
    assert len(json.dumps(rows)) > 8 * SLICE_BYTES
    for value in (ids, rows, {"inputs": "[], {}, " * 200_000}):
        text = json.dumps(value).encode()
        assert await reader.read(receiving(*(text[i : i + 65_536] for i in range(0, len(text), 65_536)))) == value


@pytest.mark.parametrize("unit", [b"[]", b"{}", b'"a"', b"1", b"null", b'{"a":1}', b"[[1]]"])
async def test_dense_bodies_are_refused_before_they_are_parsed(unit: bytes) -> None:
    reader = JsonReader(100_000, 4096)
    with pytest.raises(HTTPException) as raised:
        await reader.read(receiving(b'{"input":"a","user":[' + b",".join([unit] * 100_001) + b"]}"))
    assert raised.value.status_code == 413
    assert "--max-json-values" in raised.value.detail


@pytest.mark.parametrize(
    ("unit", "is_dense"),
    [
        (b"[]", True),
        (b"{}", True),
        (b'"ab"', True),
        (b'{"a":1}', True),
        (b"1234", False),
        (b'"A gate holds it."', False),
    ],
)
async def test_short_bodies_that_are_dense_are_held(unit: bytes, is_dense: bool) -> None:
    held: list[int] = []
    body = b"[" + b",".join([unit] * (10_000 // len(unit))) + b"]"
    assert await JsonReader(2_000_000, 4096).read(receiving(body), held.append) == json.loads(body)
    assert bool(held) == is_dense
    assert sum(held) >= 8 * len(body) * is_dense
    held.clear()
    await JsonReader(2_000_000, 4096).read(receiving(b"[" + b",".join([unit] * 100) + b"]"), held.append)
    assert not held, "a small body need not be counted"


@pytest.mark.parametrize("body", [b"{" + b" " * SLICE_BYTES, b'{"a": nul}' + b" " * SLICE_BYTES, b"{", b""])
async def test_what_is_no_json_has_one_kind_of_error(body: bytes) -> None:
    with pytest.raises(RequestValidationError) as raised:
        await JsonReader(2_000_000, 4096).read(receiving(body))
    assert raised.value.errors()[0]["type"] == ("json_invalid" if body else "missing")


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/embeddings", {"input": [[5]] * 5}, "input"),
        ("/v1/embeddings", {"input": "a", "user": [None] * 5}, "user"),
        ("/rerank", {"query": "a", "documents": [{}] * 5}, "documents"),
        ("/rerank", {"query": "a", "texts": [{}] * 5}, "texts"),
        ("/v2/embed", {"texts": [1, *["a"] * 5]}, "texts"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": [{}] * 5}}, "sentences"),
        ("/predict", {"parameters": {"inputs": [[]] * 5}}, "inputs"),
        ("/score", {"text_1": "a", "text_2": [[]] * 5}, "text_2"),
    ],
)
async def test_entries_are_counted_before_anybody_looks_into_them(
    serving, engine, path: str, body: dict, named: str
) -> None:
    async with serving(engine, max_inputs_per_request=4) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code in (400, 422)
    if named != "texts" or path == "/rerank":
        assert "has 5 entries; the limit is 4" in answer.text
    assert named in answer.json()["message"]
    assert not engine.calls


async def test_many_unknown_keys_are_counted_and_few_are_worded(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/embeddings", json={"input": "a", **{f"k{i}": 1 for i in range(20_000)}})
    assert answer.status_code == 400
    assert "k2 has no use here" in answer.text
    assert "and 19997 more." in answer.text
    answer = await client.post("/score", json={"text_1": "a", "text_2": "b", "chat_template_kwargs": {"a": 1, "b": 2}})
    assert answer.status_code == 400
    assert "a, b" in answer.text


async def test_what_is_made_of_large_bodies_is_held_with_their_bytes(serving, engine) -> None:
    body = b'{"input":"a","user":[[' + b",".join([b"[]"] * 100_000) + b"]]}"
    async with serving(engine, max_body_bytes=310_000) as client:
        answer = await client.post("/v1/embeddings", content=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert not engine.calls
    async with serving(engine, max_body_bytes=2_000_000) as client:
        assert (await client.post("/v1/embeddings", content=body)).status_code == 200
