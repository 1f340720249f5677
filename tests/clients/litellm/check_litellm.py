"""litellm: its prefixes for embeddings and for rerankers, each with the api_base that it wants."""

import asyncio

import litellm
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
    rerank,
)

# (prefix, path of the api_base, arguments). Cohere's /v1/embed gives lists, which this version does not read.
EMBEDDINGS = [
    ("openai", "/v1", {}),
    ("openai_like", "/v1", {}),
    ("hosted_vllm", "/v1", {}),
    ("hosted_vllm", "", {}),
    ("infinity", "", {}),
    ("jina_ai", "/v1", {}),
    ("voyage", "/v1", {}),
    ("cohere", "/v2/embed", {}),
    # Without its task LiteLLM would ask the hub what the model is for.
    ("huggingface", "/embed", {"input_type": "feature-extraction"}),
    ("huggingface", "", {"input_type": "feature-extraction"}),
]
# (prefix, path of the api_base). LiteLLM reads Voyage's answer only of requests with top_n, which become Voyage's.
RERANKS = [
    ("cohere", ""),
    ("cohere", "/v1/rerank"),
    ("hosted_vllm", ""),
    ("hosted_vllm", "/v1"),
    ("hosted_vllm", "/v1/rerank"),
    ("jina_ai", ""),
    ("huggingface", ""),
    ("voyage", "/v1"),
]


def vectors(answer) -> list[list[float]]:
    assert [row["index"] for row in answer.data] == list(range(len(answer.data)))
    return [row["embedding"] for row in answer.data]


def ranks(answer) -> list[tuple[int, float]]:
    return [(row["index"], row["relevance_score"]) for row in answer.results]


@pytest.mark.parametrize(("prefix", "path", "arguments"), EMBEDDINGS)
def test_embedding(prefix, path, arguments):
    answer = litellm.embedding(f"{prefix}/{MODEL}", input=TEXTS, api_base=URL + path, api_key="any", **arguments)
    assert_close(vectors(answer), embed(TEXTS))
    assert answer.usage.total_tokens > 0


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_embedding_options(encoding_format):
    options = {"dimensions": WIDTH, "encoding_format": encoding_format}
    answer = litellm.embedding(f"hosted_vllm/{MODEL}", input=TEXTS, api_base=f"{URL}/v1", **options)
    assert vectors(answer) == embed(TEXTS, encoding_format=encoding_format)


def test_many_texts():
    answer = litellm.embedding(f"hosted_vllm/{MODEL}", input=MANY[:256], api_base=f"{URL}/v1")
    assert_close(vectors(answer), embed(MANY[:256]))


def test_async_embedding():
    answer = asyncio.run(litellm.aembedding(f"openai/{MODEL}", input=TEXTS, api_base=f"{URL}/v1", api_key="any"))
    assert_close(vectors(answer), embed(TEXTS))


@pytest.mark.parametrize(("prefix", "path"), RERANKS)
def test_rerank(prefix, path):
    arguments = {"api_base": RERANKER_URL + path, "api_key": "any", "query": QUERY, "documents": DOCUMENTS}
    answer = litellm.rerank(f"{prefix}/{RERANKER}", top_n=2, **arguments)
    assert_ranks(ranks(answer), rerank()[:2])
    assert [row["document"]["text"] for row in answer.results] == [DOCUMENTS[row["index"]] for row in answer.results]
    if prefix != "voyage":
        assert_ranks(ranks(litellm.rerank(f"{prefix}/{RERANKER}", **arguments)), rerank())


def test_async_rerank():
    call = litellm.arerank(f"cohere/{RERANKER}", query=QUERY, documents=DOCUMENTS, api_base=RERANKER_URL, api_key="any")
    assert_ranks(ranks(asyncio.run(call)), rerank())


@pytest.mark.parametrize("prefix", ["openai", "hosted_vllm"])
def test_errors(prefix):
    arguments = {"api_base": f"{URL}/v1", "api_key": "any"}
    with pytest.raises(litellm.NotFoundError, match="unknown"):
        litellm.embedding(f"{prefix}/unknown", input=TEXTS, **arguments)
    with pytest.raises(litellm.BadRequestError, match="maximum context length is 256 tokens"):
        litellm.embedding(f"{prefix}/{MODEL}", input=[TOO_LONG], **arguments)


def test_api_key():
    with pytest.raises(litellm.AuthenticationError):
        litellm.embedding(f"openai/{MODEL}", input=TEXTS, api_base=f"{PROTECTED_URL}/v1", api_key="wrong")
    answer = litellm.embedding(f"openai/{MODEL}", input=TEXTS, api_base=f"{PROTECTED_URL}/v1", api_key=KEY)
    assert_close(vectors(answer), embed(TEXTS))
