"""Cohere's routes with its Python clients v1 and v2 and with the bodies of other clients."""

import base64

import httpx
import numpy as np
import pytest

from penstock.engine.protocol.errors import EngineOverloadedError

from ...tables import cases, table
from ..bodies import client_bodies

cohere = pytest.importorskip("cohere", reason="needs the client: pip install cohere")

# The clients use a deprecated part of pydantic.
pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")

MODEL = "alias"
TEXTS = ["one red gate", "two blue gates and a pipe", "three"]
WIDTH = 8
LONG = "word " * 100  # MAX_MODEL_LEN of the engine is 64.
NUM_TOKENS = sum(len(text.split()) + 2 for text in TEXTS)
QUERY = {"input_type": "search_query"}
ALL_TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]


def client_of(kind: type, http: httpx.AsyncClient) -> object:
    return kind(api_key="any", base_url="http://test", httpx_client=http)


@pytest.fixture
def v1(client: httpx.AsyncClient) -> "cohere.AsyncClient":
    return client_of(cohere.AsyncClient, client)


@pytest.fixture
def v2(client: httpx.AsyncClient) -> "cohere.AsyncClientV2":
    return client_of(cohere.AsyncClientV2, client)


@pytest.fixture
async def floats(client: httpx.AsyncClient) -> np.ndarray:
    rows = (await client.post("/v1/embeddings", json={"input": TEXTS})).json()["data"]
    return np.array([row["embedding"] for row in rows], np.float32)


async def test_v2_returns_every_type_from_one_call(v2, engine, floats) -> None:
    answer = await v2.embed(texts=TEXTS, model=MODEL, input_type="search_document", embedding_types=ALL_TYPES)
    assert len([call for call in engine.calls if call[0] == "embed"]) == 2  # the other call made `floats`
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


async def test_v2_joins_the_contents_of_inputs(v2, engine) -> None:
    inputs = table(__file__, "test_v2_joins_the_contents_of_inputs")
    answer = await v2.embed(inputs=inputs, model=MODEL, input_type="search_document")
    assert engine.calls[-1][1][0] == ["one", "two\nthree"]
    assert (len(answer.embeddings.float_), answer.embeddings.int8) == (2, None)


@cases(__file__, "options", "limit", "side")
async def test_truncate_and_max_tokens_set_the_limit(v2, engine, options: dict, limit: int, side: str | None) -> None:
    await v2.embed(texts=["short"], model=MODEL, input_type="search_document", **options)
    params = engine.calls[-1][1][1]
    assert (params.truncate_prompt_tokens, None if params.reject_too_long else params.truncation_side) == (limit, side)


async def test_output_dimension_narrows_the_vectors(serving, make_engine) -> None:
    async with serving(make_engine(is_matryoshka=True)) as http:
        v2 = client_of(cohere.AsyncClientV2, http)
        answer = await v2.embed(texts=TEXTS, model=MODEL, input_type="search_document", output_dimension=4)
        assert np.array(answer.embeddings.float_).shape == (3, 4)
        np.testing.assert_allclose(np.linalg.norm(answer.embeddings.float_, axis=1), 1, rtol=1e-6)
        with pytest.raises(cohere.BadRequestError, match=r"embedding_types is 'binary'.*4 dimensions"):
            await v2.embed(texts=TEXTS, model=MODEL, input_type="x-y", output_dimension=4, embedding_types=["binary"])


@pytest.mark.parametrize(
    ("longest", "max_tokens", "limit"), [(None, 100_000, 100_000), (500, 499, 499), (500, 500, -1), (500, 501, -1)]
)
async def test_max_tokens_may_exceed_the_model_if_it_takes_chunks(
    serving, make_engine, longest: int | None, max_tokens: int, limit: int
) -> None:
    engine = make_engine(enable_chunked_processing=True, max_embed_len=longest)
    async with serving(engine) as http:
        v2 = client_of(cohere.AsyncClientV2, http)
        await v2.embed(texts=["a"], model=MODEL, input_type="search_document", max_tokens=max_tokens, priority=5)
    assert engine.calls[-1][1][1].truncate_prompt_tokens == limit
    assert engine.calls[-1][1][2].priority == 5


@pytest.mark.parametrize(("path", "body", "is_by_type"), **client_bodies("cohere"))
async def test_response_has_the_fields_that_clients_read(client, path: str, body: dict, is_by_type: bool) -> None:
    response = await client.post(path, json={"model": MODEL, "texts": TEXTS, **body})
    assert response.status_code == 200, response.text
    answer = response.json()
    embeddings = answer.pop("embeddings")
    assert answer == {
        "response_type": "embeddings_by_type" if is_by_type else "embeddings_floats",
        "id": f"embed-{response.headers['x-request-id']}",
        "texts": TEXTS,
        "meta": {
            "api_version": {"version": "2" if "v2" in path else "1"},
            "billed_units": {"input_tokens": NUM_TOKENS, "image_tokens": 0},
        },
    }
    rows = embeddings["float"] if is_by_type else embeddings
    assert [len(row) for row in rows] == [WIDTH] * len(TEXTS)


async def test_wrong_body_on_the_path_of_tei_has_a_message(client: httpx.AsyncClient) -> None:
    response = await client.post("/embed", json={"texts": ["a"], "truncate": "MIDDLE"})
    assert (response.status_code, response.json()["param"]) == (422, "truncate")
    assert "'MIDDLE'" in response.json()["message"]


async def test_clients_raise_the_error_of_the_status(v1, v2, engine) -> None:
    with pytest.raises(cohere.NotFoundError) as caught:
        await v2.embed(texts=TEXTS, model="unknown", input_type="search_query")
    assert "'unknown'" in caught.value.body["message"]
    with pytest.raises(cohere.BadRequestError) as caught:
        await v1.embed(texts=[LONG], model=MODEL, truncate="NONE")
    assert "context length" in caught.value.body["message"]
    engine.failure = EngineOverloadedError("The queue is full.", retry_after_s=1, reason="queue_tokens")
    with pytest.raises(cohere.TooManyRequestsError):
        await v1.embed(texts=TEXTS, model=MODEL, request_options={"max_retries": 0})


@pytest.mark.parametrize("offline", [True, False])
async def test_v1_client_tokenizes_and_detokenizes(v1, engine, offline: bool) -> None:
    answer = await v1.tokenize(text="one red gate", model=MODEL, offline=offline)
    assert answer.tokens == (await engine.tokenize(["one red gate"]))[0]
    assert answer.token_strings == [f"t{token_id}" for token_id in answer.tokens]
    if not offline:
        assert engine.special_tokens[-3::2] == [False, True]  # without special tokens, but with their names
    back = await v1.detokenize(tokens=answer.tokens, model=MODEL, offline=offline)
    assert back.text == " ".join(answer.token_strings)
    assert (answer.meta.api_version.version, back.meta.api_version.version) == ("1", "1")


async def test_both_clients_rerank(v1, v2) -> None:
    texts = ["blue", "one red gate"]
    second = await v2.rerank(model=MODEL, query="red gate", documents=texts, max_tokens_per_doc=10)
    assert isinstance(second, cohere.V2RerankResponse)
    documents = [{"title": text, "text": "x"} for text in texts]
    fields = {"rank_fields": ["title"], "return_documents": True, "max_chunks_per_doc": 1}
    first = await v1.rerank(model=MODEL, query="red gate", documents=documents, **fields)
    assert isinstance(first, cohere.RerankResponse)
    assert [item.document.text for item in first.results] == ["x", "x"]
    assert first.results[0].document.title == texts[1]
    for answer in (first, second):
        assert [item.index for item in answer.results] == [1, 0]
        assert answer.meta.billed_units.search_units == 1


# (kind of the model, Cohere's endpoints)
ENDPOINTS = table(__file__, "endpoints")


@pytest.mark.parametrize(("kind", "endpoints"), ENDPOINTS)
async def test_model_lists_the_endpoints_of_its_kind(serving, make_engine, kind: str, endpoints: list[str]) -> None:
    async with serving(make_engine(kind, ("x", "y"))) as http:
        v2 = client_of(cohere.AsyncClientV2, http)
        models = (await v2.models.list()).models
        assert [model.name for model in models] == ["fake-model"]
        for model in [*models, await v2.models.get(MODEL)]:
            assert (model.endpoints, model.context_length) == (endpoints, 64)
            assert model.tokenizer_url is None  # with one, the client would tokenize by itself
        assert len((await v2.models.list(endpoint="rerank")).models) == ("rerank" in endpoints)
