"""LlamaIndex's embeddings of OpenAI's and TEI's kind, its rerankers of Cohere's, Jina's and TEI's, and an index."""

import asyncio

import openai
import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference as TEIRerank
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

NODES = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in DOCUMENTS]


def openai_like(**arguments):
    return OpenAILikeEmbedding(**{"model_name": MODEL, "api_base": f"{URL}/v1", "api_key": "any", **arguments})


def ranks(nodes: list[NodeWithScore]) -> list[tuple[int, float]]:
    return [(DOCUMENTS.index(node.text), node.score) for node in nodes]


def test_openai_like_texts_and_query():
    model = openai_like()
    assert_close(model.get_text_embedding_batch(TEXTS), embed(TEXTS))
    assert_close(model.get_text_embedding(TEXTS[0]), embed(TEXTS[:1])[0])
    assert_close(model.get_query_embedding(QUERY), embed([QUERY])[0])


def test_openai_like_many_texts():
    assert_close(openai_like().get_text_embedding_batch(MANY[:256]), embed(MANY[:256]))


def test_openai_like_async():
    async def ask() -> list:
        model = openai_like()
        return [await model.aget_text_embedding_batch(TEXTS), [await model.aget_query_embedding(QUERY)]]

    assert_close(asyncio.run(ask()), [embed(TEXTS), embed([QUERY])])


def test_dimensions():
    assert_close(openai_like(dimensions=WIDTH).get_text_embedding_batch(TEXTS), embed(TEXTS))
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        openai_like(dimensions=100).get_text_embedding("a")


def test_openai_embedding_with_a_model_name():
    model = OpenAIEmbedding(model_name=MODEL, api_base=f"{URL}/v1", api_key="any")
    assert_close(model.get_text_embedding_batch(TEXTS), embed(TEXTS))
    assert_close(model.get_query_embedding(QUERY), embed([QUERY])[0])


def test_vector_store_index():
    index = VectorStoreIndex.from_documents([Document(text=text) for text in DOCUMENTS], embed_model=openai_like())
    assert_ranks(ranks(index.as_retriever(similarity_top_k=4).retrieve(QUERY)), rerank(url=URL))


def test_tei_embeddings():
    model = TextEmbeddingsInference(model_name=MODEL, base_url=URL, text_instruction="", query_instruction="")
    assert_close(model.get_text_embedding_batch(TEXTS), embed(TEXTS))
    assert_close(model.get_query_embedding(QUERY), embed([QUERY])[0])
    assert_close(asyncio.run(model.aget_text_embedding_batch(TEXTS)), embed(TEXTS))
    instructed = TextEmbeddingsInference(model_name=MODEL, base_url=URL, text_instruction="", query_instruction="find:")
    assert_close(instructed.get_query_embedding(QUERY), embed([f"find: {QUERY}"])[0])


@pytest.mark.parametrize(
    "reranker",
    [
        CohereRerank(model=RERANKER, base_url=RERANKER_URL, api_key="any", top_n=4),
        JinaRerank(model=RERANKER, base_url=RERANKER_URL, api_key="any", top_n=4),
        JinaRerank(model=RERANKER, base_url=f"{RERANKER_URL}/v1", api_key="any", top_n=4),
        TEIRerank(base_url=RERANKER_URL, top_n=4),
    ],
)
def test_rerank(reranker):
    assert_ranks(ranks(reranker.postprocess_nodes(NODES, QueryBundle(QUERY))), rerank())


def test_errors():
    with pytest.raises(openai.NotFoundError, match="'unknown'"):
        openai_like(model_name="unknown").get_text_embedding("a")
    with pytest.raises(RuntimeError, match="'unknown'"):  # the answer's `detail`
        JinaRerank(model="unknown", base_url=URL, api_key="any").postprocess_nodes(NODES, QueryBundle(QUERY))


def test_api_key():
    arguments = {"api_base": f"{PROTECTED_URL}/v1"}
    with pytest.raises(openai.AuthenticationError):
        openai_like(api_key="wrong", **arguments).get_text_embedding("a")
    assert_close(openai_like(api_key=KEY, **arguments).get_text_embedding("a"), embed(["a"])[0])
    tei = TEIRerank(base_url=PROTECTED_URL, auth_token=KEY, top_n=4)  # sent without "Bearer"
    assert_ranks(ranks(tei.postprocess_nodes(NODES, QueryBundle(QUERY))), rerank(url=URL))
