"""POST /v1/embeddings and GET /v1/models as real clients send and read them."""

import base64

import httpx
import numpy as np
import pytest

from penstock.server.routes.models import ModelCard

HELLO = ["hello world", "goodbye"]

# (client, path, body): the bodies that were captured on the wire.
CLIENT_BODIES = [
    ("openai-py default", "/v1/embeddings", {"model": "alias", "input": "hello", "encoding_format": "base64"}),
    ("openai-npm default", "/v1/embeddings", {"input": HELLO, "model": "alias", "encoding_format": "base64"}),
    ("openai-py base without /v1", "/embeddings", {"model": "alias", "input": HELLO, "encoding_format": "base64"}),
    ("openai-py user and dimensions", "/v1/embeddings", {"model": "alias", "input": "a", "user": "u", "dimensions": 8}),
    (
        "langchain token ids",
        "/v1/embeddings",
        {"model": "alias", "input": [[153, 191], [66]], "encoding_format": "base64"},
    ),
    ("langchain empty text", "/v1/embeddings", {"model": "alias", "input": "", "encoding_format": "base64"}),
    ("flat token ids", "/v1/embeddings", {"input": [15, 19]}),
    ("pymilvus probe", "/v1/embeddings", {"input": [""]}),
    ("litellm", "/embeddings", {"model": "alias", "input": HELLO}),
    ("litellm infinity key order", "/embeddings", {"input": HELLO, "model": "alias"}),
    ("llama_index openai-like", "/v1/embeddings", {"input": HELLO, "model": "alias", "encoding_format": "base64"}),
    (
        "infinity_client defaults",
        "/embeddings",
        {"input": HELLO, "model": "default/not-specified", "dimensions": 0, "modality": "text"},
    ),
    ("mistralai", "/v1/embeddings", {"model": "alias", "input": HELLO}),
    (
        "mistralai options",
        "/v1/embeddings",
        {"model": "alias", "input": HELLO, "output_dimension": 8, "output_dtype": "float", "encoding_format": "float"},
    ),
    ("haystack", "/v1/embeddings", {"model": "alias", "input": HELLO, "encoding_format": "float"}),
    ("ai sdk", "/v1/embeddings", {"model": "alias", "input": HELLO, "encoding_format": "float", "user": None}),
    ("open webui", "/v1/embeddings", {"input": ["hello"], "model": "alias", "prefix": "search_query: "}),
    ("dify tei without model", "/v1/embeddings", {"input": HELLO}),
    ("dify openai_api_compatible", "/v1/embeddings", {"model": "alias", "input": HELLO, "encoding_format": "float"}),
    (
        "dify base class",
        "/v1/embeddings",
        {"model": "alias", "input": HELLO, "encoding_format": "float", "user": "somebody"},
    ),
    ("dify validation", "/v1/embeddings", {"input": "ping", "model": "alias"}),
    ("dify localai", "/v1/embeddings", {"input": "ping", "model": "alias"}),
    ("ragflow", "/v1/embeddings", {"model": "alias", "input": HELLO, "encoding_format": "float", "drop_params": True}),
    ("ragflow localai", "/v1/embeddings", {"model": "alias", "input": HELLO, "encoding_format": "base64"}),
    ("anythingllm", "/v1/embeddings", {"model": "alias", "input": ["a"] * 500, "encoding_format": "base64"}),
    ("anythingllm localai", "/v1/embeddings", {"model": "alias", "input": HELLO, "encoding_format": "float"}),
    ("elasticsearch", "/v1/embeddings", {"input": HELLO, "model": "alias", "user": "somebody", "dimensions": 8}),
    ("pgai", "/v1/embeddings", {"input": ["a"] * 2048, "model": "alias", "encoding_format": "float"}),
    ("lightrag", "/v1/embeddings", {"model": "alias", "input": HELLO, "encoding_format": "base64"}),
    ("mem0", "/v1/embeddings", {"input": ["hello"], "model": "alias", "encoding_format": "float"}),
    ("weaviate", "/v1/embeddings", {"input": HELLO, "model": "alias", "dimensions": 8}),
    ("milvus", "/v1/embeddings", {"input": HELLO, "encoding_format": "float"}),
    ("vespa", "/v1/embeddings", {"input": HELLO, "model": "alias", "dimensions": 8, "encoding_format": "base64"}),
    (
        "mteb",
        "/v1/embeddings",
        {"model": "alias", "input": HELLO, "encoding_format": "float", "truncate_prompt_tokens": 64},
    ),
    (
        "voyage nulls",
        "/v1/embeddings",
        {
            "input": HELLO,
            "model": "alias",
            "input_type": None,
            "truncation": True,
            "output_dtype": None,
            "output_dimension": None,
            "encoding_format": "base64",
        },
    ),
    ("trailing slash", "/v1/embeddings/", {"input": HELLO}),
    ("doubled version", "/v1/v1/embeddings", {"input": HELLO}),
]


def decoded(embedding: object) -> np.ndarray:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4")
    return np.array(embedding, np.float32)


@pytest.mark.parametrize(
    ("path", "body"), [case[1:] for case in CLIENT_BODIES], ids=[case[0] for case in CLIENT_BODIES]
)
async def test_response_fits_the_parser_of_every_client(client: httpx.AsyncClient, path: str, body: dict) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    is_flat = isinstance(body["input"], str) or all(isinstance(i, int) for i in body["input"])
    num_inputs = 1 if is_flat else len(body["input"])
    assert set(answer) == {"id", "object", "created", "model", "usage", "data"}
    assert answer["object"] == "list"
    is_named = body.get("model") not in (None, "default/not-specified")
    assert answer["model"] == (body["model"] if is_named else "fake-model")
    assert isinstance(answer["id"], str)
    assert isinstance(answer["created"], int)
    assert [row["index"] for row in answer["data"]] == list(range(num_inputs))
    assert all(set(row) == {"object", "index", "embedding"} for row in answer["data"])
    assert all(row["object"] == "embedding" for row in answer["data"])
    expected_type = str if body.get("encoding_format") == "base64" else list
    assert all(type(row["embedding"]) is expected_type for row in answer["data"])
    assert all(len(decoded(row["embedding"])) == 8 for row in answer["data"])
    usage = answer["usage"]
    assert set(usage) == {"prompt_tokens", "total_tokens"}
    assert usage["prompt_tokens"] == usage["total_tokens"] > 0


async def test_base64_and_float_are_the_same_numbers(client: httpx.AsyncClient) -> None:
    rows = []
    for encoding_format in ("base64", "float", None):
        body = {"input": HELLO, "encoding_format": encoding_format}
        answer = (await client.post("/v1/embeddings", json=body)).json()
        rows.append(np.stack([decoded(row["embedding"]) for row in answer["data"]]))
    np.testing.assert_array_equal(rows[0], rows[1])
    np.testing.assert_array_equal(rows[0], rows[2])


async def test_options_reach_the_engine(client: httpx.AsyncClient, engine) -> None:
    body = {
        "input": "a",
        "truncate_prompt_tokens": -1,
        "truncation_side": "left",
        "normalize": False,
        "dimensions": 8,
        "prompt_name": "query",
    }
    assert (await client.post("/v1/embeddings", json=body)).status_code == 200
    _, (inputs, params, options) = engine.calls[-1]
    assert inputs == ["a"]
    assert (params.truncate_prompt_tokens, params.truncation_side) == (-1, "left")
    assert (params.normalize, params.dimensions) == (False, 8)
    assert options.prompt_name == "query"
    assert 599 < options.timeout_s < 600


async def test_default_prompt_name_applies_where_a_request_names_none(serving, engine) -> None:
    async with serving(engine, default_prompt_name="query") as client:
        await client.post("/v1/embeddings", json={"input": "a"})
    assert engine.calls[-1][1][2].prompt_name == "query"


async def test_use_activation_is_the_newer_name_of_normalize(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/v1/embeddings", json={"input": "a", "use_activation": False})).json()
    assert abs(np.linalg.norm(answer["data"][0]["embedding"]) - 1) > 1e-3


@pytest.mark.parametrize("value", [True, False, None])
async def test_late_chunking_runs_all_inputs_as_one_text(client: httpx.AsyncClient, engine, value) -> None:
    body = {"input": [*HELLO, [5, 6]], "late_chunking": value, "normalize": False, "prompt_name": "query"}
    answer = (await client.post("/v1/embeddings", json=body)).json()
    assert [row["index"] for row in answer["data"]] == [0, 1, 2]
    name, (inputs, params, options) = engine.calls[-1]
    assert name == ("embed_late" if value else "embed")
    assert (inputs, params.normalize, options.prompt_name) == ([*HELLO, [5, 6]], False, "query")


# (what, body, field, part of the message)
WRONG_BODIES = [
    ("no input", {"model": "alias"}, "input", "missing"),
    ("null input", {"input": None}, "input", "null"),
    ("empty list", {"input": []}, "input", "empty list"),
    ("number", {"input": 5}, "input", "5"),
    ("object", {"input": {"text": "a"}}, "input", "object"),
    ("mixed numbers and texts", {"input": ["a", 5]}, "input", "entry 1 is 5"),
    ("empty ids", {"input": [[1], []]}, "input", "entry 1 is an empty list"),
    ("true is no token id", {"input": [True, False]}, "input", "entry 0 is true"),
    ("texts in ids", {"input": [[1, "a"]]}, "input", "'a'"),
    ("encoding", {"input": "a", "encoding_format": "hex"}, "encoding_format", "'hex'"),
    ("dimensions as text", {"input": "a", "dimensions": "8"}, "dimensions", "'8'"),
    ("dimensions as bool", {"input": "a", "dimensions": True}, "dimensions", "not true"),
    ("dimensions below zero", {"input": "a", "dimensions": -1}, "dimensions", "-1"),
    ("dimensions too large", {"input": "a", "dimensions": 9}, "dimensions", "9"),
    ("dimensions of a plain model", {"input": "a", "dimensions": 4}, "dimensions", "Matryoshka"),
    ("model", {"input": "a", "model": 3}, "model", "3"),
    ("truncation above the limit", {"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "65"),
    ("late chunking", {"input": "a", "late_chunking": "often"}, "late_chunking", "'often'"),
    ("truncation side", {"input": "a", "truncation_side": "up"}, "truncation_side", "'up'"),
    ("out of vocabulary", {"input": [5000]}, "input", "out of vocabulary"),
    ("a negative token id", {"input": [-1]}, "input", "-1, which is out of vocabulary"),
]


@pytest.mark.parametrize(
    ("body", "param", "part"), [case[1:] for case in WRONG_BODIES], ids=[case[0] for case in WRONG_BODIES]
)
async def test_wrong_bodies_are_400_and_name_field_and_value(
    client: httpx.AsyncClient, body: dict, param: str, part: str
) -> None:
    response = await client.post("/v1/embeddings", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"] or part in error["message"]
    assert part in error["message"]


async def test_too_long_an_input_has_openais_code(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/embeddings", json={"input": "word " * 100})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 64 tokens" in response.json()["message"]


async def test_2048_inputs_pass_and_one_above_the_limit_does_not(serving, engine) -> None:
    async with serving(engine, max_inputs_per_request=2048) as client:
        response = await client.post("/v1/embeddings", json={"input": ["a"] * 2048})
        assert len(response.json()["data"]) == 2048
        response = await client.post("/v1/embeddings", json={"input": ["a"] * 2049})
        assert response.status_code == 400
        assert "2049" in response.json()["message"]


async def test_a_classifier_refuses_embeddings(serving, make_engine) -> None:
    async with serving(make_engine("sequence_classifier", ("a", "b"))) as client:
        response = await client.post("/v1/embeddings", json={"input": "a"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_task"


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/v1/models/"])
async def test_models_are_listed(client: httpx.AsyncClient, path: str) -> None:
    answer = (await client.get(path)).json()
    assert [card["id"] for card in answer["data"]] == ["fake-model"]
    (card,) = answer["data"]
    assert (card["aliases"], card["max_model_len"]) == (["alias"], 64)
    assert card["status"] == {"value": "loaded", "state": "ready"}


async def test_card_describes_the_model(serving, make_engine) -> None:
    async with serving(make_engine(), default_prompt_name="query") as client:
        facts = (await client.get("/v1/models/alias")).json()["facts"]
    assert facts == {
        "kind": "embedding",
        "tasks": ["embed", "token_embed", "score"],
        "outputs": ["dense"],
        "model_type": "fake",
        "dtype": "float32",
        "sequence_pooling": ["MEAN"],
        "embedding_size": 8,
        "is_matryoshka": False,
        "matryoshka_dimensions": [],
        "prompts": {"query": "query: "},
        "default_prompt_name": "query",
        "num_labels": 0,
    }
    async with serving(make_engine("sequence_classifier", labels=("a", "b"), embedding_size=0)) as client:
        facts = ModelCard.model_validate((await client.get("/v1/models/alias")).json()).facts
    assert (facts.kind, facts.outputs, facts.num_labels, facts.embedding_size) == ("sequence_classifier", [], 2, 0)


async def test_one_model_by_a_name_with_a_slash(serving, engine) -> None:
    async with serving(engine, names=("owner/name",)) as client:
        card = (await client.get("/v1/models/owner/name")).json()
        assert (card["id"], card["object"]) == ("owner/name", "model")
        assert "tokenizer_url" not in card  # the Cohere client would try to download it
        response = await client.get("/v1/models/owner/other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
