"""langchain-openai and langchain-cohere, which wrap the clients of openai and cohere, and JinaEmbeddings."""

import base64

import plain_http as http
import pytest
from langchain_cohere import CohereEmbeddings, CohereRerank
from langchain_community.embeddings import JinaEmbeddings, jina
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings
from plain_http import DOCUMENTS, MODEL, QUERY, TEXTS, URL, assert_close, assert_ranks

COHERE = CohereEmbeddings(model=MODEL, base_url=URL, cohere_api_key="any")


def openai_embeddings(*, model=MODEL, url=URL, key="any", **options) -> OpenAIEmbeddings:
    """LangChain sends OpenAI's token ids by default, but other models need the text."""
    options = {"check_embedding_ctx_length": False, **options}
    return OpenAIEmbeddings(model=model, base_url=f"{url}/v1", api_key=key, **options)


@pytest.mark.parametrize("embeddings", [openai_embeddings(), openai_embeddings(dimensions=http.WIDTH), COHERE])
def test_embeddings_equal_plain_http(embeddings):
    assert_close(embeddings.embed_documents(TEXTS), http.embed(TEXTS))
    assert_close(embeddings.embed_query(QUERY), http.embed([QUERY])[0])


def test_2048_texts_equal_plain_http():
    assert_close(openai_embeddings().embed_documents(http.MANY), http.embed(http.MANY))


def test_vector_store_ranks_by_cosine():
    store = InMemoryVectorStore.from_texts(DOCUMENTS, openai_embeddings())
    found = store.similarity_search_with_score(QUERY, k=4)
    assert_ranks([(DOCUMENTS.index(document.page_content), score) for document, score in found], http.rerank(url=URL))


def test_ranks_equal_plain_http():
    reranker = CohereRerank(model=http.RERANKER, base_url=http.RERANKER_URL, cohere_api_key="any")
    ranks = [(row["index"], row["relevance_score"]) for row in reranker.rerank(DOCUMENTS, QUERY)]
    assert_ranks(ranks, http.rerank()[:3])
    documents = reranker.compress_documents([Document(text) for text in DOCUMENTS], QUERY)
    ranks = [(DOCUMENTS.index(d.page_content), d.metadata["relevance_score"]) for d in documents]
    assert_ranks(ranks, http.rerank()[:3])


def test_images_of_jina_are_sent_unmodified(monkeypatch, tmp_path):
    monkeypatch.setattr(jina, "JINA_API_URL", f"{http.IMAGES_URL}/v1/embeddings")  # LangChain has no setting for it
    embeddings = JinaEmbeddings(model_name=http.TWO_TOWER, jina_api_key="any")
    assert_close(embeddings.embed_documents(TEXTS[:3]), http.embed_items([{"text": text} for text in TEXTS[:3]]))
    files = [tmp_path / f"{i}.png" for i in range(len(http.IMAGES))]
    for file, image in zip(files, http.IMAGES, strict=True):
        file.write_bytes(base64.b64decode(image))
    found = embeddings.embed_images([str(file) for file in files])
    assert_close(found, http.embed_items([{"image": image} for image in http.IMAGES]))
