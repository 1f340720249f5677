"""POST /v1/embeddings and /v1/multi-vector with the bodies of real clients."""

import base64
import time
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.server.routes.openai import _PARAM_FIELDS, EmbeddingRequest

from ...tables import cases
from ..bodies import client_bodies
from ..fake_engine import FakeEngine, Serving

HELLO = ["hello world", "goodbye"]


def decoded(embedding: object) -> np.ndarray:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4")
    return np.array(embedding, np.float32)


async def embed(client: httpx.AsyncClient, path: str = "/v1/embeddings", **body: object) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(("path", "body"), **client_bodies("embeddings"))
async def test_response_has_the_fields_that_clients_read(client, engine, path: str, body: dict[str, Any]) -> None:
    before_s = int(time.time())
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    answer, sent = response.json(), body["input"]
    is_single = isinstance(sent, str) or isinstance(sent[0], int | float)
    is_base64 = "base64" in (body.get("encoding_format"), body.get("embedding_type"))
    is_query = "query" in (body.get("input_type") or body.get("task") or "")
    num_tokens = sum(answer["usage"].values())
    inputs, params, options = engine.calls[-1][1]
    created = answer.pop("created")
    assert type(created) is int
    assert before_s <= created <= time.time()
    embeddings = [row.pop("embedding") for row in answer["data"]]
    assert answer == {
        "id": f"embd-{response.headers['x-request-id']}",
        "object": "list",
        "model": body.get("model", "fake-model").replace("default/not-specified", "fake-model"),
        "usage": {"prompt_tokens": num_tokens / 2, "total_tokens": num_tokens / 2},
        "data": [{"object": "embedding", "index": i} for i in range(1 if is_single else len(sent))],
    }
    assert all(isinstance(embedding, str) is is_base64 for embedding in embeddings)
    expected = (await engine.embed(inputs, params, options)).embeddings
    np.testing.assert_allclose([decoded(embedding) for embedding in embeddings], expected, rtol=1e-6)
    texts = [entry["text"] if isinstance(entry, dict) else entry for entry in sent]
    assert list(inputs) == ([sent] if is_single else texts)
    assert num_tokens == 2 * sum(engine._counts(inputs, params))
    assert params.normalize is body.get("normalized", True)
    assert (options.prompt_name, options.prompt) == ("query" if is_query else None, body.get("prefix"))


async def test_options_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = {"truncate_prompt_tokens": -1, "truncation_side": "left", "normalize": False, "dimensions": 8}
    await embed(client, input="a", **fields, prompt_name="query")
    _, (inputs, params, options) = engine.calls[-1]
    assert inputs == ["a"]
    assert {name: getattr(params, name) for name in fields} == fields
    assert options.prompt_name == "query"
    assert 599 < options.timeout_s < 600
    await embed(client, input="a", use_activation=False)  # vLLM's newer name of normalize
    assert engine.calls[-1][1][1].normalize is False


@pytest.mark.parametrize("value", [True, False, None])
async def test_late_chunking_runs_all_inputs_as_one_text(client: httpx.AsyncClient, engine, value) -> None:
    inputs = [*HELLO, [5, 6]]
    answer = await embed(client, input=inputs, late_chunking=value, normalize=False, prompt_name="query")
    assert [row["index"] for row in answer["data"]] == [0, 1, 2]
    name, (sent, params, options) = engine.calls[-1]
    assert name == ("embed_late" if value else "embed")
    assert (sent, params.normalize, options.prompt_name) == (inputs, False, "query")


async def test_classifier_rejects_embeddings(serving: Serving, make_engine) -> None:
    async with serving(make_engine("sequence_classifier", ("a", "b"))) as client:
        response = await client.post("/v1/embeddings", json={"input": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_task")


@cases(__file__, "fields", "tokens", "side")
def test_truncation_fields_set_limit_and_side(fields: dict[str, Any], tokens: int | None, side: str | None) -> None:
    params = EmbeddingRequest.model_validate({"input": "a", **fields}).pooling_params()
    assert (params.truncate_prompt_tokens, params.truncation_side) == (tokens, side)


def test_every_field_of_the_pooling_params_is_named() -> None:
    read = EmbeddingRequest.model_fields.keys() & EmbeddingRequest.pooling_params.__code__.co_names
    assert read - {"modality"} == _PARAM_FIELDS


def test_output_dimension_counts_beside_dimensions_0() -> None:
    body = EmbeddingRequest.model_validate({"input": "a", "modality": "text", "dimensions": 0, "output_dimension": 8})
    assert body.pooling_params().dimensions == 8
    assert body.field_names()["dimensions"] == "output_dimension"


@pytest.mark.parametrize("path", ["/v1/multi-vector", "/v1/embeddings"])
async def test_multi_vector_has_a_vector_for_each_token(client: httpx.AsyncClient, engine, path: str) -> None:
    # The body of api.jina.ai's examples for jina-colbert-v2.
    body = {"model": "alias", "dimensions": 8, "input_type": "query", "embedding_type": "float", "input": HELLO}
    if path == "/v1/embeddings":
        body["return_multivector"] = True
    answer = await embed(client, path, **body)
    assert [(row["object"], row["index"]) for row in answer["data"]] == [("embeddings", 0), ("embeddings", 1)]
    assert [np.shape(row["embeddings"]) for row in answer["data"]] == [(4, 8), (3, 8)]
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    name, (_, _, options) = engine.calls[-1]
    assert (name, options.is_query, options.prompt_name) == ("token_embed", True, "query")
    (row,) = (await embed(client, path, **{**body, "input": "one two", "embedding_type": "base64"}))["data"]
    assert len(base64.b64decode(row["embeddings"])) == 4 * 8 * 4


@pytest.mark.parametrize(("input_type", "is_query"), [("document", False), ("retrieval.query", True), (None, None)])
async def test_input_type_reaches_models_without_prompts(serving, make_engine, input_type, is_query) -> None:
    engine = make_engine(prompts={})
    async with serving(engine) as client:
        await embed(client, "/v1/multi-vector", input=HELLO, input_type=input_type)
    assert engine.calls[-1][1][2].is_query is is_query
