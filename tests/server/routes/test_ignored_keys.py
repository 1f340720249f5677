"""Keys of bodies that no schema has: per dialect, which ones are let pass, and why. All others are refused by name."""

import httpx
import pytest
from jsonschema import Draft202012Validator

from penstock.server.app import create_app
from penstock.server.dialects import DIALECTS
from penstock.server.models.served_model import ServedModel
from penstock.server.settings import ServerSettings

USER = "the end user, for a vendor's watch over abuse; every dialect has it"
# dialect: {key: why it is let pass}
TABLE = {
    "openai": {
        "user": USER,
        "safety_identifier": "the newer name of user",
        "service_tier": "a price; gateways add it to every request",
        "metadata": "a note for the vendor's dashboard; gateways add it to every request",
        "drop_params": "RAGFlow sends LiteLLM's own switch to every server",
    },
    "jina": {"user": USER},
    "voyage": {"user": USER},
    "vllm": {
        "user": USER,
        "cache_salt": "keeps prefix caches apart; no answer depends on it",
    },
    "infinity": {"user": USER},
    "cohere": {"user": USER, "drop_params": "LiteLLM in front of Cohere's routes"},
    "xinference": {"user": USER, "return_len": "RAGFlow sends it; usage is in every answer"},
    "tei": {"user": USER, "options": "Weaviate and LiteLLM send what the Inference API is to wait for"},
    "ollama": {
        "user": USER,
    },
    "penstock": {"user": USER},
}
EMBED = ("openai", "jina", "voyage", "vllm", "infinity")
RERANK = ("cohere", "jina", "voyage", "vllm", "infinity", "xinference")
# (path, a body, the dialects that share it)
BODIES = [
    ("/v1/embeddings", {"input": "a"}, EMBED),
    ("/v1/multi-vector", {"input": "a"}, EMBED),
    ("/v1/encode", {"input": "a", "outputs": ["dense"]}, ("penstock",)),
    ("/v1/embed", {"texts": ["a"]}, ("cohere",)),
    ("/v2/embed", {"texts": ["a"]}, ("cohere",)),
    ("/embed", {"texts": ["a"]}, ("cohere",)),
    ("/v1/tokenize", {"text": "a"}, ("cohere",)),
    ("/v1/detokenize", {"tokens": [1]}, ("cohere",)),
    ("/v2/rerank", {"query": "a", "documents": ["b"]}, RERANK),
    ("/rerank", {"query": "a", "documents": ["b"]}, RERANK),
    ("/rerank", {"query": "a", "texts": ["b"]}, ("tei",)),
    ("/score", {"text_1": "a", "text_2": "b"}, ("vllm",)),
    ("/classify", {"input": "a", "labels": ["x", "y"]}, ("vllm", "infinity", "cohere")),
    ("/pooling", {"input": "a"}, ("vllm",)),
    ("/tokenize", {"prompt": "a"}, ("vllm",)),
    ("/tokenize", {"inputs": "a"}, ("tei",)),
    ("/detokenize", {"tokens": [1]}, ("vllm",)),
    ("/embed", {"inputs": "a"}, ("tei",)),
    ("/embed_all", {"inputs": "a"}, ("tei",)),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, ("tei",)),
    ("/decode", {"ids": [1]}, ("tei",)),
    ("/", {"inputs": "a"}, ("tei",)),
    ("/api/embed", {"input": "a"}, ("ollama",)),
    ("/api/embeddings", {"prompt": "a"}, ("ollama",)),
    ("/invocations", {"inputs": "a"}, ("tei",)),
    ("/invocations", {"input": "a"}, EMBED),
    ("/invocations", {"query": "a", "documents": ["b"]}, RERANK),
]
IDS = [f"{path} {next(iter(body))}" for path, body, _ in BODIES]


async def _refused(client: httpx.AsyncClient, path: str, body: dict) -> tuple[str | None, str]:
    """The field that a refusal names, and its message; in the form and with the status of the body's dialect."""
    response = await client.post(path, json=body)
    answer = response.json()
    is_text = isinstance(answer["error"], str)
    assert response.status_code == (422 if is_text and not path.startswith("/api/") else 400), response.text
    return (answer["param"], answer["error"]) if is_text else (answer["error"]["param"], answer["message"])


def test_the_table_is_the_servers() -> None:
    assert {dialect.name: set(dialect.ignored_keys) for dialect in DIALECTS} == {
        d: set(keys) for d, keys in TABLE.items()
    }
    assert all(reason.endswith(".") for dialect in DIALECTS for reason in dialect.ignored_keys.values())


@pytest.mark.parametrize(("path", "body", "dialects"), BODIES, ids=IDS)
async def test_only_ignored_keys_of_the_dialects_are_accepted(
    client: httpx.AsyncClient, engine, path: str, body: dict, dialects: tuple[str, ...]
) -> None:
    passed = {key for dialect in dialects for key in TABLE[dialect]}
    for key in passed | {key for keys in TABLE.values() for key in keys}:
        if key in passed:
            response = await client.post(path, json={**body, key: "x"})
            assert response.status_code == 200, response.text
        elif not (key == "options" and path.startswith("/api/")):  # a field of Ollama's
            param, message = await _refused(client, path, {**body, key: "x"})
            assert param == key
            assert message.startswith(f"{key} ")
    assert (await client.post(path, json={**body, "never_heard_of": None})).status_code == 200  # null means absent
    num_calls = len(engine.calls)
    assert (await _refused(client, path, {**body, "never_heard_of": 1}))[0] == "never_heard_of"
    assert len(engine.calls) == num_calls


# (path, body, the parameter that has no use there)
UNFIT = [
    ("/rerank", {"query": "a", "documents": ["b"]}, {"dimensions": 8}),
    ("/rerank", {"query": "a", "documents": ["b"]}, {"normalize": True}),
    ("/rerank", {"query": "a", "documents": ["b"]}, {"input_type": "query"}),
    ("/rerank", {"query": "a", "documents": ["b"]}, {"relevant_spans": True}),
    ("/rerank", {"query": "a", "texts": ["b"]}, {"top_k": 1}),
    ("/v1/embeddings", {"input": "a"}, {"step_tag_id": 3}),
    ("/v1/embeddings", {"input": "a"}, {"returned_token_ids": [1]}),
    ("/v1/embeddings", {"input": "a"}, {"top_n": 1}),
    ("/v1/embeddings", {"input": "a"}, {"mm_processor_kwargs": {"x": 1}}),
    ("/v1/embeddings", {"input": "a"}, {"padding": "max_length"}),
    ("/v1/embeddings", {"input": "a"}, {"modality": "image"}),
    ("/v2/embed", {"texts": ["a"]}, {"dimensions": 8}),
    ("/v2/embed", {"texts": ["a"]}, {"normalize": False}),
    ("/score", {"text_1": "a", "text_2": "b"}, {"dimensions": 8}),
    ("/score", {"text_1": "a", "text_2": "b"}, {"encoding_format": "base64"}),
    ("/score", {"text_1": "a", "text_2": "b"}, {"chat_template_kwargs": {"enable_thinking": True}}),
    ("/classify", {"input": "a", "labels": ["x", "y"]}, {"dimensions": 8}),
    ("/classify", {"input": "a", "labels": ["x", "y"]}, {"prompt_name": "query"}),
    ("/classify", {"inputs": ["a"], "labels": ["x", "y"]}, {"preset": "mine"}),
    ("/embed", {"inputs": "a"}, {"encoding_format": "base64"}),
    ("/embed_all", {"inputs": "a"}, {"dimensions": 8}),
    ("/embed_all", {"inputs": "a"}, {"normalize": False}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, {"normalize": False}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {"top_k": 2}}, {"top_k": 2}),
    ("/tokenize", {"prompt": "a"}, {"truncate_prompt_tokens": 5}),
    ("/decode", {"ids": [1]}, {"add_special_tokens": True}),
]


@pytest.mark.parametrize(("path", "body", "unfit"), UNFIT, ids=[f"{path} {unfit}" for path, _, unfit in UNFIT])
async def test_a_parameter_without_use_is_refused_by_its_name(
    client: httpx.AsyncClient, engine, path: str, body: dict, unfit: dict
) -> None:
    (key,) = unfit
    param, message = await _refused(client, path, {**body, **unfit})
    assert param.startswith(key)
    assert key in message
    assert not engine.calls


@pytest.mark.parametrize(
    ("kind", "task"), [("sequence_classifier", "classify"), ("token_classifier", "token_classify")]
)
async def test_a_prompt_for_classes_is_refused_on_pooling(serving, make_engine, kind: str, task: str) -> None:
    async with serving(make_engine(kind, ("x", "y"))) as client:
        for field in ("prompt_name", "input_type"):
            param, message = await _refused(client, "/pooling", {"input": "a", field: "query"})
            assert (param, task in message) == (field, True)
        assert (await client.post("/pooling", json={"input": "a", "prompt_name": "", "input_type": None})).is_success


async def test_misspelt_parameter_gets_a_hint(client: httpx.AsyncClient) -> None:
    assert await _refused(client, "/v1/embeddings", {"input": "a", "dimension": 8}) == (
        "dimension",
        "dimension is not known here; did you mean dimensions? Otherwise leave it out.",
    )
    _, message = await _refused(client, "/rerank", {"query": "a", "documents": ["b"], "dimensions": 8})
    assert message.startswith("dimensions has no use here; leave it out. This request takes model, ")
    _, message = await _refused(client, "/v1/embeddings", {"input": "a", "labels": ["x", "y"]})
    assert message.endswith(", ...")


async def test_many_and_long_keys_make_a_short_message(client: httpx.AsyncClient) -> None:
    body = {"input": "a", **{"k" * 10_000 + str(i): 1 for i in range(1000)}}
    param, message = await _refused(client, "/v1/embeddings", body)
    assert len(param) < 100
    assert len(message) < 1500
    assert "997 more" in message


ZERO_DIMENSIONS = [
    ("/v1/embeddings", {"input": "a"}, "dimensions"),
    ("/v1/embeddings", {"input": "a"}, "output_dimension"),
    ("/v1/multi-vector", {"input": "a"}, "dimensions"),
    ("/v1/encode", {"input": "a"}, "dimensions"),
    ("/v2/embed", {"texts": ["a"]}, "output_dimension"),
    ("/embed", {"inputs": "a"}, "dimensions"),
    ("/pooling", {"input": "a"}, "dimensions"),
    ("/rerank", {"query": "a", "documents": ["b"]}, "dimensions"),
    ("/invocations", {"input": "a"}, "dimensions"),
]


@pytest.mark.parametrize(("path", "body", "field"), ZERO_DIMENSIONS)
async def test_no_vector_has_a_width_of_0(client: httpx.AsyncClient, path: str, body: dict, field: str) -> None:
    assert (await _refused(client, path, {**body, field: 0}))[0] == field


async def test_width_of_0_from_infinitys_client_is_accepted(client: httpx.AsyncClient) -> None:
    body = {"input": "a", "dimensions": 0, "modality": "text"}
    assert (await client.post("/embeddings", json=body)).status_code == 200


async def test_a_prefix_stands_before_every_text(client: httpx.AsyncClient, engine) -> None:
    await client.post("/v1/embeddings", json={"input": "a", "prefix": "search_query: "})
    assert engine.calls[-1][1][2].prompt == "search_query: "


def test_the_document_says_which_keys_pass() -> None:
    async def start() -> None:
        raise AssertionError

    document = create_app([ServedModel(("served",), start)], ServerSettings()).openapi()
    schemas = document["components"]["schemas"]
    for path, body, dialects in BODIES:
        if path in ("/", "/invocations"):
            continue
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        validator = Draft202012Validator({**schema, "components": document["components"]})
        validator.validate({**body, "user": "u", "never_heard_of": None})
        for dialect in dialects:
            validator.validate({**body, **dict.fromkeys(TABLE[dialect], "x")})
        assert not validator.is_valid({**body, "never_heard_of": 1}), path
    embedding = schemas["EmbeddingRequest"]["properties"]
    assert embedding["drop_params"]["description"].startswith("Accepted and ignored: ")
