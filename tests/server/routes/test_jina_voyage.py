"""Jina's and Voyage's words on /v1/embeddings and /v1/rerank."""

import base64

import httpx
import numpy as np
import pytest

from penstock.server.routes.openai import EmbeddingRequest
from penstock.server.routes.rerank import RerankRequest

from ..conftest import FakeEngine, Serving

TEXTS = ["hello world", "goodbye"]
DOCUMENTS = ["one red", "one two three red", "blue", "one two red"]
QUERY = "one two three red"
VOYAGE_NULLS = {
    "input_type": None,
    "truncation": True,
    "output_dtype": None,
    "output_dimension": None,
    "encoding_format": "base64",
}

# (client, body of /v1/embeddings, the prompt that is used)
EMBEDDING_BODIES = [
    ("voyageai defaults", {"model": "alias", "input": TEXTS, **VOYAGE_NULLS}, None),
    ("voyageai query", {"model": "alias", "input": TEXTS, **VOYAGE_NULLS, "input_type": "query"}, "query"),
    ("voyageai document", {"model": "alias", "input": TEXTS, **VOYAGE_NULLS, "input_type": "document"}, None),
    ("litellm voyage and jina", {"model": "alias", "input": TEXTS}, None),
    ("voyageai width", {"model": "alias", "input": TEXTS, **VOYAGE_NULLS, "output_dimension": 8}, None),
    ("langchain jina", {"input": TEXTS, "model": "alias"}, None),
    ("haystack jina", {"input": TEXTS, "model": "alias", "task": None, "late_chunking": None}, None),
    (
        "weaviate jina",
        {"input": TEXTS, "model": "alias", "embedding_type": "float", "task": "retrieval.query", "normalized": False},
        "query",
    ),
    ("jina objects", {"input": [{"text": TEXTS[0]}, TEXTS[1]], "task": "retrieval.passage", "truncate": True}, None),
    ("jina text matching", {"input": TEXTS, "task": "text-matching", "embedding_type": "base64"}, None),
    ("chatwiki", {"input": TEXTS, "model": "alias", "encoding_type": "float"}, None),
    ("nvidia nim", {"input": TEXTS, "model": "alias", "input_type": "passage", "truncate": "END"}, None),
]


@pytest.mark.parametrize(
    ("body", "prompt"), [case[1:] for case in EMBEDDING_BODIES], ids=[case[0] for case in EMBEDDING_BODIES]
)
async def test_response_fits_the_parser_of_every_client(
    client: httpx.AsyncClient, engine, body: dict, prompt: str | None
) -> None:
    response = await client.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["object"] == "list"
    assert answer["model"] == body.get("model", "fake-model")
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] == 7
    for i, row in enumerate(answer["data"]):
        assert (row["index"], row["object"]) == (i, "embedding")
        vector = row["embedding"]
        if isinstance(vector, str):
            vector = np.frombuffer(base64.b64decode(vector), np.float32)  # as voyageai reads it
        assert len(vector) == 8
    inputs, params, options = engine.calls[-1][1]
    assert inputs == TEXTS
    assert options.prompt_name == prompt
    assert params.normalize is (body.get("normalized", True))


# (what truncation is asked for, tokens, side)
TRUNCATIONS = [
    ({}, None, None),
    ({"truncate": None, "truncation": None}, None, None),
    ({"truncate": True}, -1, None),
    ({"truncate": False}, None, None),
    ({"truncate": "NONE"}, None, None),
    ({"truncate": "START"}, -1, "left"),
    ({"truncate": "end"}, -1, "right"),
    ({"truncation": True}, -1, None),
    ({"truncation": False}, None, None),
    ({"truncate": False, "truncation": True}, None, None),
    ({"truncate": True, "truncate_prompt_tokens": 5}, 5, None),
    ({"truncate": "START", "truncate_prompt_tokens": 5, "truncation_side": "right"}, 5, "right"),
    ({"truncate": True, "truncation_side": "left"}, -1, "left"),
]


@pytest.mark.parametrize(("body", "tokens", "side"), TRUNCATIONS)
def test_truncation(body: dict, tokens: int | None, side: str | None) -> None:
    params = EmbeddingRequest.model_validate({"input": "a", **body}).pooling_params()
    assert (params.truncate_prompt_tokens, params.truncation_side) == (tokens, side)


async def test_jinas_late_chunking_with_a_task_and_bits(client: httpx.AsyncClient, engine) -> None:
    body = {"input": TEXTS, "late_chunking": True, "task": "retrieval.query", "embedding_type": "ubinary"}
    answer = (await client.post("/v1/embeddings", json=body)).json()
    assert [row["embedding"] for row in answer["data"]] == [[128], [64]]
    name, (_, _, options) = engine.calls[-1]
    assert (name, options.prompt_name) == ("embed_late", "query")


async def test_an_instruction_reaches_the_prompt(serving, make_engine) -> None:
    engine = make_engine(prompts={"query": "Instruct: Find\nQuery: "})
    async with serving(engine) as client:
        body = {"input": TEXTS, "input_type": "query", "instruction": "Find the law"}
        assert (await client.post("/v1/embeddings", json=body)).status_code == 200
    assert engine.calls[-1][1][2].prompt == "Instruct: Find the law\nQuery: "


# (body, field, part of the message)
WRONG_BODIES = [
    ({"input": "a", "input_type": "poetry"}, "input_type", "clustering"),
    ({"input": "a", "task": "poetry"}, "task", "'poetry'"),
    ({"input": "a", "task": 5}, "task", "5"),
    ({"input": "a", "output_dimension": 9}, "output_dimension", "output_dimension is 9"),
    ({"input": "a", "output_dimension": "8"}, "output_dimension", "'8'"),
    ({"input": "a", "normalized": True, "use_activation": False}, "normalized", "two names"),
    ({"input": "a", "truncate": "MIDDLE"}, "truncate", "'MIDDLE'"),
    ({"input": [{"image": "http://x/a.png"}]}, "input", "entry 0 is an object"),
    ({"input": ["a", {"text": 5}]}, "input", "entry 1 is an object"),
    ({"input": "a", "return_multivector": True, "late_chunking": True}, "return_multivector", "ask for one"),
    ({"input": "a", "instruction": "Find"}, "instruction", "takes no instruction"),
    ({"input": "word " * 100, "truncation": False}, "input", "maximum context length"),
]


@pytest.mark.parametrize(("body", "param", "part"), WRONG_BODIES)
async def test_wrong_bodies_are_400_with_a_detail(client: httpx.AsyncClient, body: dict, param: str, part: str) -> None:
    response = await client.post("/v1/embeddings", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert part in response.json()["detail"]  # what Jina and Voyage clients show


@pytest.mark.parametrize("top_k", [None, 2, 100])
@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
async def test_voyage_reranks(client: httpx.AsyncClient, path: str, top_k: int | None) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "model": "alias", "top_k": top_k, "truncation": True}
    answer = (await client.post(path, json=body)).json()
    assert [row["index"] for row in answer["data"]] == [1, 3, 0, 2][:top_k]
    assert all(set(row) == {"index", "relevance_score"} for row in answer["data"])
    assert answer["usage"]["total_tokens"] > 0
    assert answer["results"] == answer["data"]
    assert "object" not in answer


async def test_voyages_document_is_a_text(client: httpx.AsyncClient) -> None:
    """As LiteLLM and the rerankers library ask for it."""
    body = {"model": "alias", "query": QUERY, "documents": DOCUMENTS, "top_k": 1, "return_documents": True}
    answer = (await client.post("/rerank", json=body)).json()
    assert answer["data"][0]["document"] == DOCUMENTS[1]
    assert answer["results"][0]["document"] == {"text": DOCUMENTS[1]}


@pytest.mark.parametrize(("truncation", "tokens"), [(True, -1), (None, -1), (False, None)])
def test_truncation_of_documents(truncation, tokens: int | None) -> None:
    body = RerankRequest.model_validate({"query": QUERY, "documents": DOCUMENTS, "truncation": truncation})
    assert body.pooling_params().truncate_prompt_tokens == tokens


@pytest.mark.parametrize(("raw_scores", "use_activation"), [(True, False), (False, None), (None, None)])
def test_raw_scores_have_no_activation(raw_scores, use_activation) -> None:
    body = RerankRequest.model_validate({"query": QUERY, "documents": DOCUMENTS, "raw_scores": raw_scores})
    assert body.pooling_params().use_activation is use_activation


@pytest.mark.parametrize("top_k", [-1, "2", 1.5, True])
async def test_a_wrong_top_k(client: httpx.AsyncClient, top_k: object) -> None:
    response = await client.post("/rerank", json={"query": QUERY, "documents": DOCUMENTS, "top_k": top_k})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "top_k")


@pytest.mark.parametrize("path", ["/v1/multi-vector", "/v1/embeddings"])
async def test_a_vector_per_token(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    """What api.jina.ai's examples for jina-colbert-v2 send, and the field that they read."""
    body = {"model": "alias", "dimensions": 8, "input_type": "query", "embedding_type": "float", "input": TEXTS}
    if path.endswith("embeddings"):
        body["return_multivector"] = True
    response = await client.post(path, json=body)
    assert response.status_code == 200
    answer = response.json()
    assert [row["index"] for row in answer["data"]] == list(range(len(TEXTS)))
    assert all(len(vector) == 8 for row in answer["data"] for vector in row["embeddings"])
    assert answer["usage"]["total_tokens"] == sum(len(row["embeddings"]) for row in answer["data"])
    name, (_, _, options) = engine.calls[-1]
    assert (name, options.is_query, options.prompt_name) == ("token_embed", True, "query")


@pytest.mark.parametrize(("input_type", "is_query"), [("document", False), ("retrieval.query", True), (None, None)])
async def test_the_side_of_a_text_reaches_models_without_prompts(
    serving: Serving, make_engine: type[FakeEngine], input_type: str | None, is_query: bool | None
) -> None:
    engine = make_engine(prompts={})
    async with serving(engine) as client:
        await client.post("/v1/multi-vector", json={"input": TEXTS, "input_type": input_type})
    assert engine.calls[-1][1][2].is_query is is_query


async def test_vectors_in_base64(client: httpx.AsyncClient) -> None:
    body = {"input": "one two", "embedding_type": "base64"}
    (row,) = (await client.post("/v1/multi-vector", json=body)).json()["data"]
    assert len(base64.b64decode(row["embeddings"])) == 4 * 8 * 4


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": TEXTS, "task": "retrieval.query"}, "task"),
        ("/v1/embeddings", {"input": TEXTS, "input_type": "query"}, "input_type"),
        ("/v2/embed", {"texts": TEXTS, "input_type": "search_query", "embedding_types": ["float"]}, "input_type"),
        ("/v1/encode", {"input": TEXTS, "input_type": "query"}, "input_type"),
        ("/v1/multi-vector", {"input": TEXTS, "task": "retrieval.query"}, "task"),
    ],
)
async def test_tasks_with_adapters_of_their_own_are_refused(
    serving: Serving, make_engine: type[FakeEngine], path: str, body: dict, param: str
) -> None:
    async with serving(make_engine(adapters=("retrieval.query", "retrieval.passage"))) as client:
        response = await client.post(path, json=body)
        assert response.status_code == 400
        assert f"{param} is {body[param]!r}" in response.text.replace("\\", "")
        assert "applies no adapters" in response.text
        plain = {name: value for name, value in body.items() if name != param}
        assert "adapters" not in (await client.post(path, json=plain)).text
