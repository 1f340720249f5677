"""POST /v1/encode: several outputs of one forward."""

import base64
from typing import Any

import httpx
import numpy as np

from penstock.engine.protocol.multi_vector import MultiVector, SparseKind, SparsePooling, TokenHeadFiles
from penstock.engine.protocol.tasks import PoolingTask

from ...tables import cases
from ..fake_engine import FakeEngine, Serving

M3: dict[str, Any] = {
    "sparse": SparsePooling(kind=SparseKind.TOKEN_WEIGHTS),
    "token_heads": TokenHeadFiles(weights_file="a", vectors_file="b"),
    "tasks": (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SCORE, PoolingTask.SPARSE_EMBED),
}
SPLADE: dict[str, Any] = {
    "sparse": SparsePooling(kind=SparseKind.VOCABULARY_LOGITS),
    "tasks": (PoolingTask.SPARSE_EMBED, PoolingTask.SCORE),
}
COLBERT: dict[str, Any] = {"multi_vector": MultiVector(), "tasks": (PoolingTask.TOKEN_EMBED, PoolingTask.SCORE)}


WITH_SPARSE = (PoolingTask.EMBED, PoolingTask.SPARSE_EMBED)
NO_VECTORS = TokenHeadFiles(weights_file="a", vectors_file=None)
MODELS = {"m3": M3, "splade": SPLADE, "colbert": COLBERT, "dense": {}}
MODELS["m3 without vectors"] = {**M3, "tasks": WITH_SPARSE, "token_heads": NO_VECTORS}


async def encode(serving: Serving, engine: FakeEngine, **body: Any) -> httpx.Response:
    async with serving(engine) as client:
        return await client.post("/v1/encode", json=body)


@cases(__file__, "name", "outputs", "expected")
async def test_response_has_the_wanted_outputs_in_order(serving, make_engine, name: str, outputs, expected) -> None:
    engine = make_engine(**MODELS[name])
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
    assert (answer["object"], answer["id"][:7]) == ("list", "encode-")
    assert len(engine.calls) == 1


async def test_base64_holds_the_same_numbers_as_floats(serving: Serving, make_engine: type[FakeEngine]) -> None:
    floats, text = [
        (await encode(serving, make_engine(**M3), input="one two", encoding_format=kind)).json()["data"][0]
        for kind in ("float", "base64")
    ]
    assert np.allclose(np.frombuffer(base64.b64decode(text["dense"]), "<f4"), floats["dense"])
    rows = np.frombuffer(base64.b64decode(text["multi_vector"]), "<f4").reshape(-1, 8)
    assert np.allclose(rows, floats["multi_vector"])
    assert text["sparse"] == floats["sparse"]


async def test_token_ids_are_returned_on_request(serving: Serving, make_engine: type[FakeEngine]) -> None:
    for fields in ({"outputs": ["multi_vector", "dense"]}, {}):
        answer = (await encode(serving, make_engine(**M3), input=["a b", "c"], return_token_ids=True, **fields)).json()
        assert [row["token_ids"] for row in answer["data"]] == [[0, 1, 2, 3], [0, 1, 2]]
        assert [len(row["multi_vector"]) for row in answer["data"]] == [4, 3]
    answer = (await encode(serving, make_engine(**M3), input=["a b"], return_token_ids=False)).json()
    assert "token_ids" not in answer["data"][0]


async def test_options_reach_the_engine(serving: Serving, make_engine: type[FakeEngine]) -> None:
    engine = make_engine(**M3)
    body = {"input_type": "query", "normalize": False, "truncate_prompt_tokens": -1, "dimensions": 8, "priority": 3}
    await encode(serving, engine, input=["a"], **body)
    _, (inputs, tasks, params, options) = engine.calls[-1]
    assert (inputs, len(tasks), options.prompt_name, options.is_query) == (["a"], 3, "query", True)
    assert options.priority == 3
    assert (params.normalize, params.truncate_prompt_tokens, params.dimensions) == (False, -1, 8)


async def test_sparse_vectors_beyond_the_expected_size_need_memory(serving, make_engine, monkeypatch) -> None:
    monkeypatch.setattr("penstock.server.response_size.EXPECTED_ENTRIES", 2)
    monkeypatch.setattr("penstock.server.admission.MAX_RESPONSE_BYTES", 100)
    async with serving(make_engine(**M3)) as client:
        for text, fits in (("a b", True), ("a b c", False)):
            bodies = {"/v1/encode": {"input": text, "outputs": ["sparse"]}, "/embed_sparse": {"inputs": text}}
            for path, body in bodies.items():
                response = await client.post(path, json=body)
                assert response.is_success is fits, response.text
        metrics = (await client.get("/metrics")).text
    assert 'penstock_inputs_total{model="fake-model",task="sparse_embed"} 2.0' in metrics  # only those with vectors
