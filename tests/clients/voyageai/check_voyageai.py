"""voyageai against /v1/embeddings and /v1/rerank."""

import asyncio

import pytest
import voyageai
from plain_http import (
    DOCUMENTS,
    KEY,
    MANY,
    MODEL,
    PROTECTED_URL,
    QUERY,
    RERANKER,
    RERANKER_URL,
    TEXTS,
    TOO_LONG,
    URL,
    WIDTH,
    assert_close,
    assert_ranks,
    embed,
    rerank,
)
from voyageai.error import AuthenticationError, InvalidRequestError, VoyageError


@pytest.fixture
def client():
    return voyageai.Client(api_key="any", base_url=f"{URL}/v1")


def ranks(answer) -> list[tuple[int, float]]:
    return [(result.index, result.relevance_score) for result in answer.results]


@pytest.mark.parametrize("input_type", [None, "query", "document"])
def test_embed(client, input_type):
    answer = client.embed(TEXTS, model=MODEL, input_type=input_type)
    assert_close(answer.embeddings, embed(TEXTS))
    assert answer.total_tokens > 0


def test_embed_many(client):
    assert_close(client.embed(MANY[:1000], model=MODEL).embeddings, embed(MANY[:1000]))


@pytest.mark.parametrize("output_dtype", ["float", "int8", "uint8", "binary", "ubinary"])
def test_output_dtype_and_dimension(client, output_dtype):
    answer = client.embed(TEXTS, model=MODEL, output_dtype=output_dtype, output_dimension=WIDTH)
    assert_close(answer.embeddings, embed(TEXTS, encoding_format=output_dtype))


def test_truncation(client):
    assert_close(client.embed([TOO_LONG], model=MODEL).embeddings, embed([TOO_LONG], truncate_prompt_tokens=-1))
    with pytest.raises(InvalidRequestError, match="maximum context length is 256 tokens"):
        client.embed([TOO_LONG], model=MODEL, truncation=False)


def test_rerank():
    client = voyageai.Client(api_key="any", base_url=f"{RERANKER_URL}/v1")
    answer = client.rerank(QUERY, DOCUMENTS, model=RERANKER)
    assert_ranks(ranks(answer), rerank())
    assert [result.document for result in answer.results] == [DOCUMENTS[result.index] for result in answer.results]
    assert answer.total_tokens > 0
    assert_ranks(ranks(client.rerank(QUERY, DOCUMENTS, model=RERANKER, top_k=2)), rerank()[:2])


def test_async_client():
    client = voyageai.AsyncClient(api_key="any", base_url=f"{URL}/v1")
    assert_close(asyncio.run(client.embed(TEXTS, model=MODEL)).embeddings, embed(TEXTS))


def test_errors(client):
    with pytest.raises(VoyageError, match="'unknown'"):
        client.embed(TEXTS, model="unknown")
    with pytest.raises(InvalidRequestError, match="output_dimension is 100"):
        client.embed(TEXTS, model=MODEL, output_dimension=100)


def test_api_key():
    with pytest.raises(AuthenticationError, match="key"):
        voyageai.Client(api_key="wrong", base_url=f"{PROTECTED_URL}/v1").embed(TEXTS, model=MODEL)
    answer = voyageai.Client(api_key=KEY, base_url=f"{PROTECTED_URL}/v1").embed(TEXTS, model=MODEL)
    assert_close(answer.embeddings, embed(TEXTS))
