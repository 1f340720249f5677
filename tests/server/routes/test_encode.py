"""Several outputs of one forward: POST /v1/encode."""

import base64
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.engine.protocol.multi_vector import MultiVector, SparseKind, SparsePooling, TokenHeads
from penstock.engine.protocol.tasks import PoolingTask

from ..conftest import FakeEngine, Serving

M3: dict[str, Any] = {
    "sparse": SparsePooling(kind=SparseKind.TOKEN_WEIGHTS),
    "token_heads": TokenHeads(weights_file="a", vectors_file="b"),
    "tasks": (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SCORE, PoolingTask.SPARSE_EMBED),
}
SPLADE: dict[str, Any] = {
    "sparse": SparsePooling(kind=SparseKind.VOCABULARY_LOGITS),
    "tasks": (PoolingTask.SPARSE_EMBED, PoolingTask.SCORE),
}
COLBERT: dict[str, Any] = {"multi_vector": MultiVector(), "tasks": (PoolingTask.TOKEN_EMBED, PoolingTask.SCORE)}


async def encode(serving: Serving, engine: FakeEngine, **body: Any) -> httpx.Response:
    async with serving(engine) as client:
        return await client.post("/v1/encode", json=body)


@pytest.mark.parametrize(
    ("info", "outputs", "expected"),
    [
        (M3, None, ["dense", "sparse", "multi_vector"]),
        (M3, ["sparse", "dense"], ["dense", "sparse"]),
        (M3, ["multi_vector"], ["multi_vector"]),
        (SPLADE, None, ["sparse"]),
        (COLBERT, None, ["multi_vector"]),
        ({}, None, ["dense"]),
        ({}, ["dense", "multi_vector"], ["dense", "multi_vector"]),
    ],
)
async def test_outputs(
    serving: Serving, make_engine: type[FakeEngine], info: dict, outputs: list[str] | None, expected: list[str]
) -> None:
    engine = make_engine(**info)
    response = await encode(serving, engine, input=["one two", "three"], outputs=outputs)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [(row["object"], row["index"]) for row in answer["data"]] == [("encoding", 0), ("encoding", 1)]
    for row, num_words in zip(answer["data"], (2, 1), strict=True):
        assert list(row)[2:] == expected
        assert len(row.get("dense", range(8))) == 8
        assert len(row.get("multi_vector", range(num_words + 2))) == num_words + 2
        if "sparse" in row:
            assert row["sparse"] == {"indices": list(range(num_words)), "values": [0.5] * num_words}
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert len(engine.calls) == 1


async def test_base64_holds_the_same_numbers(serving: Serving, make_engine: type[FakeEngine]) -> None:
    floats, text = [
        (await encode(serving, make_engine(**M3), input="one two", encoding_format=kind)).json()["data"][0]
        for kind in ("float", "base64")
    ]
    assert np.allclose(np.frombuffer(base64.b64decode(text["dense"]), "<f4"), floats["dense"])
    rows = np.frombuffer(base64.b64decode(text["multi_vector"]), "<f4").reshape(-1, 8)
    assert np.allclose(rows, floats["multi_vector"])
    assert text["sparse"] == floats["sparse"]


async def test_ids_of_the_tokens_that_have_vectors(serving: Serving, make_engine: type[FakeEngine]) -> None:
    for asked in ({"outputs": ["multi_vector", "dense"]}, {}):
        answer = (await encode(serving, make_engine(**M3), input=["a b", "c"], return_token_ids=True, **asked)).json()
        assert [row["token_ids"] for row in answer["data"]] == [[0, 1, 2, 3], [0, 1, 2]]
        assert [len(row["multi_vector"]) for row in answer["data"]] == [4, 3]
    answer = (await encode(serving, make_engine(**M3), input=["a b"], return_token_ids=False)).json()
    assert "token_ids" not in answer["data"][0]


async def test_options_reach_the_engine(serving: Serving, make_engine: type[FakeEngine]) -> None:
    engine = make_engine(**M3)
    body = {"input_type": "query", "normalize": False, "truncate_prompt_tokens": -1, "dimensions": 8}
    await encode(serving, engine, input=["a"], **body)
    _, (inputs, tasks, params, options) = engine.calls[-1]
    assert (inputs, len(tasks), options.prompt_name, options.is_query) == (["a"], 3, "query", True)
    assert (params.normalize, params.truncate_prompt_tokens, params.dimensions) == (False, -1, 8)


WRONG = [
    ({"input": ["a"], "outputs": ["dense", "colour"]}, "outputs", "colour"),
    ({"input": ["a"], "outputs": []}, "outputs", "at least 1"),
    ({"input": ["a"], "outputs": ["sparse"]}, "outputs", "holds 'sparse', but fake-model gives dense, multi_vector"),
    ({"input": ["a"], "encoding_format": "bytes"}, "encoding_format", "carries one output"),
    ({"outputs": ["dense"]}, "input", "missing"),
    ({"input": ["a"], "return_token_ids": True}, "return_token_ids", "which the answer does not hold"),
]


@pytest.mark.parametrize(("body", "param", "part"), WRONG)
async def test_wrong_bodies(client: httpx.AsyncClient, body: dict, param: str, part: str) -> None:
    response = await client.post("/v1/encode", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert part in response.json()["error"]["message"]
