"""cohere (Python), both versions of its API, against /v1 and /v2."""

import asyncio
import base64
import struct

import cohere
import pytest
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
    post,
    rerank,
)

CLIENTS = pytest.mark.parametrize("kind", [cohere.Client, cohere.ClientV2], ids=["v1", "v2"])


@pytest.fixture
def v1():
    return cohere.Client(base_url=URL, api_key="any")


@pytest.fixture
def v2():
    return cohere.ClientV2(base_url=URL, api_key="any")


def ranks(answer) -> list[tuple[int, float]]:
    return [(item.index, item.relevance_score) for item in answer.results]


def test_v1_embed(v1):
    answer = v1.embed(texts=TEXTS, model=MODEL, input_type="search_document")
    assert_close(answer.embeddings, embed(TEXTS))
    assert answer.texts == TEXTS
    assert answer.meta.billed_units.input_tokens > 0


def test_v1_embed_in_batches_of_96(v1):
    answer = v1.embed(texts=MANY[:250], model=MODEL, input_type="search_document", embedding_types=["float"])
    assert_close(answer.embeddings.float_, embed(MANY[:250]))


def test_v2_embed(v2):
    answer = v2.embed(texts=TEXTS, model=MODEL, input_type="search_document", embedding_types=["float"])
    assert_close(answer.embeddings.float_, embed(TEXTS))
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    answer = v2.embed(inputs=inputs, model=MODEL, input_type="search_document", output_dimension=WIDTH)
    assert_close(answer.embeddings.float_, embed(TEXTS))


def test_v2_embedding_types(v2):
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    answer = v2.embed(texts=TEXTS, model=MODEL, input_type="search_document", embedding_types=types).embeddings
    for name in ("int8", "uint8", "binary", "ubinary"):
        assert getattr(answer, name) == embed(TEXTS, encoding_format=name)
    raw = [base64.b64decode(row) for row in answer.base64]
    assert_close([struct.unpack(f"<{WIDTH}f", row) for row in raw], embed(TEXTS))


@CLIENTS
def test_rerank(kind):
    client = kind(base_url=RERANKER_URL, api_key="any")
    answer = client.rerank(model=RERANKER, query=QUERY, documents=DOCUMENTS)
    assert_ranks(ranks(answer), rerank())
    assert isinstance(answer.id, str)
    assert_ranks(ranks(client.rerank(model=RERANKER, query=QUERY, documents=DOCUMENTS, top_n=2)), rerank()[:2])
    assert len(client.rerank(model=RERANKER, query=QUERY, documents=DOCUMENTS, top_n=99).results) == len(DOCUMENTS)


def test_rerank_with_documents():
    v1 = cohere.Client(base_url=RERANKER_URL, api_key="any")
    documents = [{"text": text, "title": "x"} for text in DOCUMENTS]
    answer = v1.rerank(model=RERANKER, query=QUERY, documents=documents, return_documents=True)
    assert_ranks(ranks(answer), rerank())
    assert [item.document.text for item in answer.results] == [DOCUMENTS[item.index] for item in answer.results]
    titles = v1.rerank(model=RERANKER, query=QUERY, documents=documents, rank_fields=["title"])
    assert_ranks(ranks(titles), rerank(["x"] * len(DOCUMENTS)))


@CLIENTS
def test_rerank_by_cosine_and_base_url_with_v1(kind):
    answer = kind(base_url=f"{URL}/v1", api_key="any").rerank(model=MODEL, query=QUERY, documents=DOCUMENTS)
    assert_ranks(ranks(answer), rerank(url=URL))
    assert answer.results[0].index == 1


def test_classify_by_examples(v1):
    examples = [("Where is my parcel?", "shipping"), ("When does it arrive?", "shipping")]
    examples += [("I want my money back.", "refund"), ("Please return the payment.", "refund")]
    inputs = ["The delivery is late.", "Give me a refund."]
    answer = v1.classify(
        model=MODEL,
        inputs=inputs,
        examples=[cohere.ClassifyExample(text=text, label=label) for text, label in examples],
    )
    body = {"inputs": inputs, "examples": [{"text": text, "label": label} for text, label in examples]}
    expected = post("/v1/classify", body)["classifications"]
    assert [item.prediction for item in answer.classifications] == ["shipping", "refund"]
    assert_close([i.confidence for i in answer.classifications], [i["confidence"] for i in expected])


@CLIENTS
def test_tokenize_and_detokenize(kind):
    client = kind(base_url=URL, api_key="any")
    answer = client.tokenize(text="penstocks hold water", model=MODEL)
    assert answer.token_strings == ["pens", "##tock", "##s", "hold", "water"]
    assert answer.tokens == post("/v1/tokenize", {"text": "penstocks hold water"})["tokens"]
    assert client.detokenize(tokens=answer.tokens, model=MODEL).text == "penstocks hold water"


def test_models(v1):
    assert [model.name.rpartition("/")[2] for model in v1.models.list().models] == [MODEL]
    assert v1.models.get(MODEL).endpoints == ["embed", "rerank", "classify"]


def test_errors(v1, v2):
    with pytest.raises(cohere.NotFoundError) as caught:
        v2.embed(texts=TEXTS, model="unknown", input_type="search_query", embedding_types=["float"])
    assert "'unknown'" in caught.value.body["message"]
    with pytest.raises(cohere.BadRequestError) as caught:
        v1.embed(texts=[TOO_LONG], model=MODEL, input_type="search_query", truncate="NONE")
    assert "maximum context length is 256 tokens" in caught.value.body["message"]
    with pytest.raises(cohere.BadRequestError) as caught:
        v2.rerank(model=MODEL, query=QUERY, documents=[])
    assert "empty list" in caught.value.body["message"]


@CLIENTS
def test_api_key(kind):
    with pytest.raises(cohere.UnauthorizedError) as caught:
        kind(base_url=PROTECTED_URL, api_key="wrong").rerank(model=MODEL, query=QUERY, documents=DOCUMENTS)
    assert "key" in caught.value.body["message"]
    answer = kind(base_url=PROTECTED_URL, api_key=KEY).rerank(model=MODEL, query=QUERY, documents=DOCUMENTS)
    assert_ranks(ranks(answer), rerank(url=URL))


def test_async_clients():
    async def ask() -> list:
        v1, v2 = (kind(base_url=URL, api_key="any") for kind in (cohere.AsyncClient, cohere.AsyncClientV2))
        calls = [v1.embed(texts=TEXTS, model=MODEL, input_type="search_query", embedding_types=["float"])]
        calls += [v2.embed(texts=TEXTS, model=MODEL, input_type="search_query", embedding_types=["float"])]
        return [answer.embeddings.float_ for answer in await asyncio.gather(*calls)]

    assert_close(asyncio.run(ask()), [embed(TEXTS)] * 2)
