"""infinity_client, generated and strict, against /embeddings, /rerank and /classify at the root."""

import asyncio

import pytest
from infinity_client import AuthenticatedClient, Client
from infinity_client.api.default import classify, embeddings, rerank as rerank_route
from infinity_client.errors import UnexpectedStatus
from infinity_client.models import (
    ClassifyInput,
    OpenAIEmbeddingInputText,
    RerankInput,
)
from infinity_client.models.embedding_encoding_format import EmbeddingEncodingFormat
from plain_http import (
    CLASSIFIER_URL,
    DOCUMENTS,
    KEY,
    MODEL,
    PROTECTED_URL,
    QUERY,
    RERANKER_URL,
    TEXTS,
    URL,
    WIDTH,
    assert_close,
    assert_ranks,
    embed,
    post,
    rerank,
)


@pytest.fixture
def client():
    return Client(base_url=URL, raise_on_unexpected_status=True, timeout=60)


def test_embeddings(client):
    answer = embeddings.sync(client=client, body=OpenAIEmbeddingInputText(input_=TEXTS))
    assert_close([row.embedding for row in answer.data], embed(TEXTS))
    assert answer.usage.total_tokens > 0


def test_embeddings_options(client):
    body = OpenAIEmbeddingInputText(
        input_=TEXTS[0], model=MODEL, dimensions=WIDTH, encoding_format=EmbeddingEncodingFormat.FLOAT
    )
    answer = asyncio.run(embeddings.asyncio(client=client, body=body))
    assert_close([row.embedding for row in answer.data], embed(TEXTS[:1]))
    assert answer.model == MODEL


def test_rerank():
    client = Client(base_url=RERANKER_URL, raise_on_unexpected_status=True, timeout=60)
    answer = rerank_route.sync(client=client, body=RerankInput(query=QUERY, documents=DOCUMENTS))
    assert_ranks([(row.index, row.relevance_score) for row in answer.results], rerank())
    answer = rerank_route.sync(client=client, body=RerankInput(query=QUERY, documents=DOCUMENTS, top_n=2))
    assert_ranks([(row.index, row.relevance_score) for row in answer.results], rerank()[:2])


def test_classify():
    client = Client(base_url=CLASSIFIER_URL, raise_on_unexpected_status=True, timeout=60)
    answer = classify.sync(client=client, body=ClassifyInput(input_=TEXTS))
    expected = post("/predict", {"inputs": [[text] for text in TEXTS]}, CLASSIFIER_URL)
    assert [[entry.label for entry in row] for row in answer.data] == [[e["label"] for e in row] for row in expected]
    assert_close([[entry.score for entry in row] for row in answer.data], [[e["score"] for e in r] for r in expected])


def test_errors(client):
    with pytest.raises(UnexpectedStatus, match="404"):
        embeddings.sync(client=client, body=OpenAIEmbeddingInputText(input_=TEXTS, model="unknown"))


def test_api_key():
    body = OpenAIEmbeddingInputText(input_=TEXTS)
    with pytest.raises(UnexpectedStatus, match="401"):
        embeddings.sync(client=Client(base_url=PROTECTED_URL, raise_on_unexpected_status=True), body=body)
    answer = embeddings.sync(client=AuthenticatedClient(base_url=PROTECTED_URL, token=KEY, timeout=60), body=body)
    assert_close([row.embedding for row in answer.data], embed(TEXTS))
