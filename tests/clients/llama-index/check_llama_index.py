"""LlamaIndex: embeddings of OpenAI, Jina and TEI, rerankers of Cohere, Jina and TEI, and an index."""

import base64

import plain_http as http
import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.jinaai import JinaEmbedding
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference as TEIRerank
from plain_http import DOCUMENTS, KEY, MODEL, PROTECTED_URL, QUERY, TEXTS, URL, assert_close, assert_ranks

NODES = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in DOCUMENTS]
RERANKING = {"model": http.RERANKER, "api_key": "any", "top_n": 4}


def openai_like(*, model=MODEL, url=URL, key="any", **options):
    return OpenAILikeEmbedding(model_name=model, api_base=f"{url}/v1", api_key=key, **options)


def tei(query_instruction: str = "") -> TextEmbeddingsInference:
    instructions = {"text_instruction": "", "query_instruction": query_instruction}
    return TextEmbeddingsInference(model_name=MODEL, base_url=URL, **instructions)


def ranks(nodes: list[NodeWithScore]) -> list[tuple[int, float]]:
    return [(DOCUMENTS.index(node.text), node.score) for node in nodes]


@pytest.mark.parametrize(
    "embedding",
    [
        openai_like(),
        openai_like(dimensions=http.WIDTH),
        OpenAIEmbedding(model_name=MODEL, api_base=f"{URL}/v1", api_key="any"),
        tei(),
    ],
)
def test_embeddings_equal_plain_http(embedding):
    assert_close(embedding.get_text_embedding_batch(TEXTS), http.embed(TEXTS))
    assert_close(embedding.get_query_embedding(QUERY), http.embed([QUERY])[0])


def test_tei_sends_the_query_instruction():
    assert_close(tei("find:").get_query_embedding(QUERY), http.embed([f"find: {QUERY}"])[0])


def test_index_ranks_by_cosine():
    index = VectorStoreIndex.from_documents([Document(text=text) for text in DOCUMENTS], embed_model=openai_like())
    assert_ranks(ranks(index.as_retriever(similarity_top_k=4).retrieve(QUERY)), http.rerank(url=URL))


@pytest.mark.parametrize(
    "reranker",
    [
        CohereRerank(base_url=http.RERANKER_URL, **RERANKING),
        JinaRerank(base_url=http.RERANKER_URL, **RERANKING),
        JinaRerank(base_url=f"{http.RERANKER_URL}/v1", **RERANKING),
        TEIRerank(base_url=http.RERANKER_URL, top_n=4),
    ],
)
def test_ranks_equal_plain_http(reranker):
    assert_ranks(ranks(reranker.postprocess_nodes(NODES, QueryBundle(QUERY))), http.rerank())


def test_tei_key_without_bearer_is_accepted():
    reranker = TEIRerank(base_url=PROTECTED_URL, auth_token=KEY, top_n=4)
    assert_ranks(ranks(reranker.postprocess_nodes(NODES, QueryBundle(QUERY))), http.rerank(url=URL))


@pytest.mark.parametrize("encoding", ["float", "binary", "ubinary"])
def test_embeddings_of_jina_equal_plain_http(encoding):
    embedding = JinaEmbedding(model=MODEL, api_key="any", encoding_queries=encoding, dimensions=http.WIDTH)
    embedding._api.api_url = f"{URL}/v1/embeddings"  # LlamaIndex has no setting for it
    expected = http.embed(TEXTS[:1])[0]
    if encoding != "float":
        expected = [int(value > 0) for value in expected]  # LlamaIndex unpacks the bits
    assert_close(embedding.get_query_embedding(TEXTS[0]), expected)


def test_images_of_jina_are_sent_unmodified(tmp_path):
    embedding = JinaEmbedding(model=http.TWO_TOWER, api_key="any")
    embedding._api.api_url = f"{http.IMAGES_URL}/v1/embeddings"
    (tmp_path / "image.png").write_bytes(base64.b64decode(http.IMAGES[0]))
    found = [embedding.get_image_embedding(str(tmp_path / "image.png")), embedding.get_text_embedding(TEXTS[0])]
    assert_close(found, http.embed_items([{"image": http.IMAGES[0]}, {"text": TEXTS[0]}]))
