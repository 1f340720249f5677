"""Cohere's embed, tokenize and detokenize, through its unmodified Python clients v1 and v2 and in its wire bodies."""

import base64
import warnings
from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest

from penstock.engine.protocol.errors import EngineOverloadedError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    cohere = pytest.importorskip("cohere")

# The clients' own use of pydantic.
pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")

MODEL = "alias"
TEXTS = ["one red gate", "two blue gates and a pipe", "three"]
WIDTH = 8
LONG = "word " * 100  # MAX_MODEL_LEN of the engine is 64.
NUM_TOKENS = sum(len(text.split()) + 2 for text in TEXTS)
ALL_TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]


def client_of(kind: type, http: httpx.AsyncClient) -> object:
    return kind(api_key="any", base_url="http://test", httpx_client=http)


@pytest.fixture
async def v1(client: httpx.AsyncClient) -> AsyncIterator["cohere.AsyncClient"]:
    return client_of(cohere.AsyncClient, client)


@pytest.fixture
async def v2(client: httpx.AsyncClient) -> AsyncIterator["cohere.AsyncClientV2"]:
    return client_of(cohere.AsyncClientV2, client)


@pytest.fixture
async def floats(client: httpx.AsyncClient) -> np.ndarray:
    rows = (await client.post("/v1/embeddings", json={"input": TEXTS})).json()["data"]
    return np.array([row["embedding"] for row in rows], np.float32)


async def test_v1_answers_with_plain_lists(v1, floats) -> None:
    answer = await v1.embed(texts=TEXTS, model=MODEL, input_type="search_document")
    assert isinstance(answer, cohere.EmbeddingsFloatsEmbedResponse)
    np.testing.assert_allclose(answer.embeddings, floats, rtol=1e-6)
    assert answer.texts == TEXTS
    assert answer.id.startswith("embed-")
    assert answer.meta.api_version.version == "1"
    assert answer.meta.billed_units.input_tokens == NUM_TOKENS


async def test_v1_answers_by_type_on_request(v1, floats) -> None:
    answer = await v1.embed(texts=TEXTS, model=MODEL, embedding_types=["float", "int8"], truncate=None)
    assert isinstance(answer, cohere.EmbeddingsByTypeEmbedResponse)
    np.testing.assert_allclose(answer.embeddings.float_, floats, rtol=1e-6)
    assert np.array(answer.embeddings.int8).shape == floats.shape
    assert (answer.embeddings.uint8, answer.embeddings.binary) == (None, None)


async def test_v1_merges_the_batches_of_96_that_it_makes(v1) -> None:
    texts = [f"text {i}" for i in range(200)]
    plain = await v1.embed(texts=texts, model=MODEL)
    assert (len(plain.embeddings), plain.texts) == (200, texts)
    assert plain.meta.billed_units.input_tokens == 800
    typed = await v1.embed(texts=texts, model=MODEL, embedding_types=["ubinary", "base64"])
    assert (len(typed.embeddings.ubinary), len(typed.embeddings.base64)) == (200, 200)


async def test_v2_answers_every_type_of_one_pass(v2, engine, floats) -> None:
    answer = await v2.embed(texts=TEXTS, model=MODEL, input_type="search_document", embedding_types=ALL_TYPES)
    assert len([call for call in engine.calls if call[0] == "embed"]) == 2  # one of them made `floats`
    embeddings = answer.embeddings
    np.testing.assert_allclose(embeddings.float_, floats, rtol=1e-6)
    assert embeddings.float == embeddings.float_
    decoded = [np.frombuffer(base64.b64decode(row), "<f4") for row in embeddings.base64]
    np.testing.assert_array_equal(decoded, floats)
    int8, uint8 = np.array(embeddings.int8), np.array(embeddings.uint8)
    assert int8.min() >= -128
    np.testing.assert_array_equal(int8 + 128, uint8)
    cosines = (int8 * floats).sum(1) / np.linalg.norm(int8, axis=1) / np.linalg.norm(floats, axis=1)
    assert cosines.min() > 0.999
    bits = np.packbits(floats > 0, axis=1)
    np.testing.assert_array_equal(embeddings.ubinary, bits)
    np.testing.assert_array_equal(embeddings.binary, bits.astype(int) - 128)
    assert answer.response_type == "embeddings_by_type"
    assert answer.meta.api_version.version == "2"
    assert answer.meta.billed_units.input_tokens == NUM_TOKENS


async def test_v2_answers_floats_by_default(v2, floats) -> None:
    answer = await v2.embed(texts=TEXTS, model=MODEL, input_type="classification")
    np.testing.assert_allclose(answer.embeddings.float_, floats, rtol=1e-6)
    assert answer.embeddings.int8 is None
    assert answer.texts == TEXTS


async def test_v2_inputs_of_contents(v2, engine) -> None:
    inputs = [
        {"content": [{"type": "text", "text": "one"}]},
        {"content": [{"type": "text", "text": "two"}, {"type": "text", "text": "three"}]},
    ]
    answer = await v2.embed(inputs=inputs, model=MODEL, input_type="search_document")
    assert engine.calls[-1][1][0] == ["one", "two\nthree"]
    assert len(answer.embeddings.float_) == 2


@pytest.mark.parametrize(
    ("input_type", "prompt_name"), [("search_query", "query"), ("search_document", None), (None, None), ("", None)]
)
async def test_the_input_type_chooses_the_prompt(v2, engine, input_type: str | None, prompt_name: str | None) -> None:
    await v2.embed(texts=TEXTS, model=MODEL, input_type=input_type)
    assert engine.calls[-1][1][2].prompt_name == prompt_name


# (what the client sends, the limit of the engine, the side that is cut away; none where nothing may be cut)
TRUNCATIONS = [
    ({}, -1, "right"),
    ({"truncate": None, "max_tokens": None}, -1, "right"),
    ({"truncate": "END"}, -1, "right"),
    ({"truncate": "START"}, -1, "left"),
    ({"truncate": "NONE"}, -1, None),
    ({"max_tokens": 10}, 10, "right"),
    ({"max_tokens": 10, "truncate": "START"}, 10, "left"),
    ({"max_tokens": 0}, -1, "right"),
    ({"max_tokens": 100_000}, -1, "right"),
    ({"max_tokens": 100, "truncate": "NONE"}, -1, None),
    ({"max_tokens": 10, "truncate": "NONE"}, 10, None),
]


@pytest.mark.parametrize(("options", "limit", "side"), TRUNCATIONS, ids=[str(case[0]) for case in TRUNCATIONS])
async def test_truncation(v2, engine, options: dict, limit: int | None, side: str | None) -> None:
    await v2.embed(texts=["short"], model=MODEL, input_type="search_document", **options)
    params = engine.calls[-1][1][1]
    assert (params.truncate_prompt_tokens, None if params.refuse_too_long else params.truncation_side) == (limit, side)


async def test_output_dimension(serving, make_engine) -> None:
    async with serving(make_engine(is_matryoshka=True)) as http:
        v2 = client_of(cohere.AsyncClientV2, http)
        answer = await v2.embed(texts=TEXTS, model=MODEL, input_type="search_document", output_dimension=4)
        assert np.array(answer.embeddings.float_).shape == (3, 4)
        np.testing.assert_allclose(np.linalg.norm(answer.embeddings.float_, axis=1), 1, rtol=1e-6)
        with pytest.raises(cohere.BadRequestError, match=r"embedding_types is 'binary'.*4 dimensions"):
            await v2.embed(texts=TEXTS, model=MODEL, input_type="x-y", output_dimension=4, embedding_types=["binary"])


async def test_the_limit_of_long_text_is_its_own(serving, make_engine) -> None:
    engine = make_engine(enable_chunked_processing=True)
    async with serving(engine) as http:
        v2 = client_of(cohere.AsyncClientV2, http)
        await v2.embed(texts=["a"], model=MODEL, input_type="search_document", max_tokens=1000)
    assert engine.calls[-1][1][1].truncate_prompt_tokens == 1000


@pytest.mark.parametrize("priority", [None, 0, 5])
async def test_priority(v2, engine, priority: int | None) -> None:
    await v2.embed(texts=TEXTS, model=MODEL, input_type="search_document", priority=priority)
    assert engine.calls[-1][1][2].priority == (priority or 0)


# (client, path, body, the embeddings are lists by type): bodies that were captured on the wire.
CLIENT_BODIES = [
    ("langchain", "/v1/embed", {"embedding_types": ["float"], "input_type": "search_document", "truncate": None}, True),
    ("litellm", "/v1/embed", {"input_type": "search_document"}, False),
    ("litellm, newer path", "/v2/embed", {"input_type": "search_document"}, True),
    (
        "cohere-ai npm",
        "/v2/embed",
        {"input_type": "search_query", "embedding_types": ["float", "ubinary"], "truncate": "NONE"},
        True,
    ),
    ("haystack", "/v2/embed", {"embedding_types": ["float"], "truncate": "END", "input_type": "search_query"}, True),
    ("ai sdk", "/v2/embed", {"embedding_types": ["float"], "input_type": "search_query"}, True),
    (
        "ai sdk, options",
        "/v2/embed",
        {"embedding_types": ["float"], "input_type": "search_query", "truncate": "END", "output_dimension": WIDTH},
        True,
    ),
    ("weaviate", "/v2/embed", {"embedding_types": ["float"], "truncate": "END"}, True),
    ("base with /v1", "/v1/v2/embed", {"input_type": "search_query"}, True),
    ("base with /v1, v1", "/v1/v1/embed", {}, False),
    ("trailing slash", "/v2/embed/", {}, True),
    ("nulls", "/v1/embed", {"embedding_types": None, "input_type": None, "images": None, "inputs": None}, False),
    ("unknown fields", "/v2/embed", {"drop_params": True, "output_dimension": None, "images": []}, True),
    ("one type as text", "/v1/embed", {"embedding_types": "float"}, True),
    ("no types", "/v1/embed", {"embedding_types": []}, False),
    ("beside TEI's /embed", "/embed", {"input_type": "search_document"}, False),
    ("beside TEI's /embed, by type", "/embed", {"embedding_types": ["float"]}, True),
]


@pytest.mark.parametrize(
    ("path", "body", "is_by_type"), [case[1:] for case in CLIENT_BODIES], ids=[case[0] for case in CLIENT_BODIES]
)
async def test_response_fits_the_parser_of_every_client(
    client: httpx.AsyncClient, path: str, body: dict, is_by_type: bool
) -> None:
    response = await client.post(path, json={"model": MODEL, "texts": TEXTS, **body})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert set(answer) == {"response_type", "id", "embeddings", "texts", "meta"}
    assert answer["response_type"] == ("embeddings_by_type" if is_by_type else "embeddings_floats")
    rows = answer["embeddings"]["float"] if is_by_type else answer["embeddings"]
    assert [len(row) for row in rows] == [WIDTH] * len(TEXTS)
    assert answer["meta"]["billed_units"]["input_tokens"] > 0
    assert answer["meta"]["api_version"]["version"] == ("2" if "v2" in path else "1")


# (what, body, field, part of the message)
WRONG_BODIES = [
    ("nothing", {}, "texts", "neither"),
    ("both", {"texts": ["a"], "inputs": [{"content": "a"}]}, "texts", "both"),
    ("no texts", {"texts": []}, "texts", "empty list"),
    ("a number", {"texts": ["a", 7]}, "texts", "entry 1 is 7"),
    ("images", {"images": ["data:image/png;base64,AA=="]}, "images", "text only"),
    ("TEI's body", {"inputs": ["a"]}, "inputs", "entry 0"),
    ("image in inputs", {"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs", "image"),
    ("unknown type", {"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types", "'int4'"),
    ("unknown truncate", {"texts": ["a"], "truncate": "MIDDLE"}, "truncate", "'MIDDLE'"),
    ("unknown input_type", {"texts": ["a"], "input_type": "poem"}, "input_type", "'poem'"),
    ("too long", {"texts": [LONG], "truncate": "NONE"}, "texts", "maximum context length is 64"),
    ("too long inputs", {"inputs": [{"content": LONG}], "truncate": "NONE"}, "inputs", "maximum context length"),
    (
        "above max_tokens",
        {"texts": ["a", "a b"], "truncate": "NONE", "max_tokens": 3},
        "texts",
        "length is 3 tokens (max_tokens), but input 1 has 4",
    ),
    ("negative max_tokens", {"texts": ["a"], "max_tokens": -1}, "max_tokens", "-1"),
    ("output_dimension", {"texts": ["a"], "output_dimension": 4}, "output_dimension", "output_dimension is 4"),
    ("wide", {"texts": ["a"], "output_dimension": 99}, "output_dimension", "99"),
    ("priority", {"texts": ["a"], "priority": 1000}, "priority", "1000"),
]


@pytest.mark.parametrize(
    ("body", "param", "part"), [case[1:] for case in WRONG_BODIES], ids=[case[0] for case in WRONG_BODIES]
)
async def test_wrong_bodies_are_400_and_name_field_and_value(
    client: httpx.AsyncClient, body: dict, param: str, part: str
) -> None:
    for path in ("/v1/embed", "/v2/embed"):
        response = await client.post(path, json=body)
        answer = response.json()
        assert response.status_code == 400
        assert answer["error"]["param"] == param
        assert part in answer["message"]
        assert "dimensions is" not in answer["message"]
        assert "truncate_prompt_tokens" not in answer["message"]


async def test_wrong_bodies_on_the_path_of_tei_have_a_message(client: httpx.AsyncClient) -> None:
    response = await client.post("/embed", json={"texts": ["a"], "truncate": "MIDDLE"})
    assert (response.status_code, response.json()["param"]) == (422, "truncate")
    assert "'MIDDLE'" in response.json()["message"]


async def test_errors_arrive_typed(v1, v2, engine) -> None:
    with pytest.raises(cohere.NotFoundError) as caught:
        await v2.embed(texts=TEXTS, model="unknown", input_type="search_query")
    assert "'unknown'" in caught.value.body["message"]
    with pytest.raises(cohere.BadRequestError) as caught:
        await v1.embed(texts=[LONG], model=MODEL, truncate="NONE")
    assert "context length" in caught.value.body["message"]
    engine.failure = EngineOverloadedError("The queue is full.", retry_after_s=1, reason="queue_tokens")
    with pytest.raises(cohere.TooManyRequestsError):
        await v1.embed(texts=TEXTS, model=MODEL, request_options={"max_retries": 0})


async def test_more_texts_than_the_limit(serving, engine) -> None:
    async with serving(engine, max_inputs_per_request=2) as http:
        response = await http.post("/v2/embed", json={"texts": TEXTS})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "texts")


@pytest.mark.parametrize("offline", [True, False])
async def test_tokenize_and_detokenize(v1, engine, offline: bool) -> None:
    answer = await v1.tokenize(text="one red gate", model=MODEL, offline=offline)
    assert answer.tokens == (await engine.tokenize(["one red gate"]))[0]
    assert answer.token_strings == [f"t{token_id}" for token_id in answer.tokens]
    back = await v1.detokenize(tokens=answer.tokens, model=MODEL, offline=offline)
    assert back.text == " ".join(answer.token_strings)
    assert (answer.meta.api_version.version, back.meta.api_version.version) == ("1", "1")


async def test_tokenize_through_the_v2_client(v2) -> None:
    assert len((await v2.tokenize(text="one red gate", model=MODEL)).tokens) == 3
    assert (await v2.tokenize(text="", model=MODEL)).tokens == []
    assert (await v2.detokenize(tokens=[1, 2], model=MODEL)).text == "t1 t2"


# (path, body, field, part of the message)
WRONG_TOKENS = [
    ("/v1/tokenize", {}, "text", "missing"),
    ("/v1/tokenize", {"text": ["a"]}, "text", "['a']"),
    ("/v1/detokenize", {"tokens": []}, "tokens", "[]"),
    ("/v1/detokenize", {"tokens": ["a"]}, "tokens", "'a'"),
    ("/v1/detokenize", {"tokens": [-1]}, "tokens", "-1"),
]


@pytest.mark.parametrize(("path", "body", "param", "part"), WRONG_TOKENS)
async def test_wrong_tokens(client: httpx.AsyncClient, path: str, body: dict, param: str, part: str) -> None:
    response = await client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert part in response.json()["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
async def test_rerank_of_both_clients(v1, v2, path: str) -> None:
    documents = ["blue", "one red gate"]
    if path == "/v2/rerank":
        answer = await v2.rerank(model=MODEL, query="red gate", documents=documents, max_tokens_per_doc=10)
        assert isinstance(answer, cohere.V2RerankResponse)
    else:
        answer = await v1.rerank(
            model=MODEL,
            query="red gate",
            documents=[{"title": document, "text": "x"} for document in documents],
            rank_fields=["title"],
            return_documents=True,
            max_chunks_per_doc=1,
        )
        assert isinstance(answer, cohere.RerankResponse)
        assert [item.document.text for item in answer.results] == ["x", "x"]
        assert answer.results[0].document.title == documents[1]
    assert [item.index for item in answer.results] == [1, 0]
    assert answer.meta.billed_units.search_units == 1


# (kind of the model, Cohere's endpoints)
ENDPOINTS = [
    ("embedding", ["embed", "rerank", "classify"]),
    ("cross_encoder", ["rerank", "classify"]),
    ("sequence_classifier", ["classify"]),
    ("token_classifier", []),
]


@pytest.mark.parametrize(("kind", "endpoints"), ENDPOINTS)
async def test_models(serving, make_engine, kind: str, endpoints: list[str]) -> None:
    async with serving(make_engine(kind, ("x", "y"))) as http:
        v2 = client_of(cohere.AsyncClientV2, http)
        models = (await v2.models.list()).models
        assert [model.name for model in models] == ["fake-model"]
        for model in [*models, await v2.models.get(MODEL)]:
            assert (model.endpoints, model.context_length) == (endpoints, 64)
            assert model.tokenizer_url is None  # with one, the client would tokenize by itself
        assert len((await v2.models.list(endpoint="rerank")).models) == ("rerank" in endpoints)
