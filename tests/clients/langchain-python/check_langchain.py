"""langchain-openai and langchain-cohere: embeddings, a vector store over them, reranking."""

import asyncio
import sys
from pathlib import Path

import openai
import pytest
import tiktoken
from cohere.core.api_error import ApiError
from langchain_cohere import CohereEmbeddings, CohereRerank
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings
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
    URL,
    WIDTH,
    assert_close,
    assert_ranks,
    embed,
    rerank,
)

LITELLM = Path(sys.prefix).parent / "litellm"


@pytest.fixture
def embeddings():
    """LangChain sends OpenAI's token ids unless it is told otherwise; another model wants the text."""
    return OpenAIEmbeddings(model=MODEL, base_url=f"{URL}/v1", api_key="any", check_embedding_ctx_length=False)


@pytest.fixture
def encoding(monkeypatch):
    """cl100k_base, which tiktoken downloads; LiteLLM's package carries it too."""
    for file in LITELLM.rglob("litellm_core_utils/tokenizers"):
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(file))
    try:
        return tiktoken.get_encoding("cl100k_base")
    except OSError as error:
        pytest.skip(f"tiktoken has no encoding here: {error}")


def test_embeddings_of_texts(embeddings):
    assert_close(embeddings.embed_documents(TEXTS), embed(TEXTS))
    assert_close(embeddings.embed_query(QUERY), embed([QUERY])[0])
    assert_close(embeddings.embed_query(""), embed([""])[0])


def test_2048_texts(embeddings):
    assert_close(embeddings.embed_documents(MANY), embed(MANY))


def test_async_embeddings(embeddings):
    assert_close(asyncio.run(embeddings.aembed_documents(TEXTS)), embed(TEXTS))


def test_dimensions():
    arguments = {"base_url": f"{URL}/v1", "api_key": "any", "check_embedding_ctx_length": False}
    assert_close(OpenAIEmbeddings(model=MODEL, dimensions=WIDTH, **arguments).embed_documents(TEXTS), embed(TEXTS))
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        OpenAIEmbeddings(model=MODEL, dimensions=100, **arguments).embed_documents(TEXTS)


def test_default_token_ids(encoding):
    embeddings = OpenAIEmbeddings(model=MODEL, base_url=f"{URL}/v1", api_key="any")
    texts = ["hello world", "a short text"]
    ids = [encoding.encode(text) for text in texts]
    assert_close(embeddings.embed_documents(texts), embed(ids))  # read as the served model's own ids
    with pytest.raises(openai.BadRequestError, match="out of vocabulary"):
        embeddings.embed_documents(["penstock 東京"])


def test_vector_store(embeddings):
    store = InMemoryVectorStore.from_texts(DOCUMENTS, embeddings)
    found = store.similarity_search_with_score(QUERY, k=4)
    ranks = [(DOCUMENTS.index(document.page_content), score) for document, score in found]
    assert_ranks(ranks, rerank(url=URL))


def test_cohere_embeddings():
    embeddings = CohereEmbeddings(model=MODEL, base_url=URL, cohere_api_key="any")
    assert_close(embeddings.embed_documents(TEXTS), embed(TEXTS))
    assert_close(embeddings.embed_query(QUERY), embed([QUERY])[0])
    assert_close(asyncio.run(embeddings.aembed_documents(TEXTS)), embed(TEXTS))


def test_cohere_rerank():
    reranker = CohereRerank(model=RERANKER, base_url=RERANKER_URL, cohere_api_key="any")
    ranks = [(row["index"], row["relevance_score"]) for row in reranker.rerank(DOCUMENTS, QUERY)]
    assert_ranks(ranks, rerank()[:3])
    documents = reranker.compress_documents([Document(text) for text in DOCUMENTS], QUERY)
    ranks = [(DOCUMENTS.index(d.page_content), d.metadata["relevance_score"]) for d in documents]
    assert_ranks(ranks, rerank()[:3])
    assert len(reranker.rerank(DOCUMENTS[:2], QUERY)) == 2


def test_errors(embeddings):
    unknown = OpenAIEmbeddings(model="unknown", base_url=f"{URL}/v1", api_key="any", check_embedding_ctx_length=False)
    with pytest.raises(openai.NotFoundError, match="'unknown'"):
        unknown.embed_query(QUERY)
    with pytest.raises(ApiError, match="'unknown'"):
        CohereRerank(model="unknown", base_url=URL, cohere_api_key="any").rerank(DOCUMENTS, QUERY)


def test_api_key():
    arguments = {"model": MODEL, "base_url": f"{PROTECTED_URL}/v1", "check_embedding_ctx_length": False}
    with pytest.raises(openai.AuthenticationError):
        OpenAIEmbeddings(api_key="wrong", **arguments).embed_query(QUERY)
    assert_close(OpenAIEmbeddings(api_key=KEY, **arguments).embed_query(QUERY), embed([QUERY])[0])
