"""Haystack's embedders and rankers of OpenAI's, Cohere's, Jina's and TEI's kind."""

import pytest
from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret
from haystack_integrations.components.embedders.cohere import CohereDocumentEmbedder, CohereTextEmbedder
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
)
from haystack_integrations.components.embedders.jina import JinaDocumentEmbedder, JinaTextEmbedder
from haystack_integrations.components.rankers.cohere import CohereRanker
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker
from haystack_integrations.components.rankers.jina import JinaRanker
from openai import AuthenticationError, NotFoundError
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

ANY = Secret.from_token("any")
OPENAI = {"api_key": ANY, "model": MODEL, "api_base_url": f"{URL}/v1"}
COHERE = {"api_key": ANY, "model": MODEL, "api_base_url": URL}
JINA = {"api_key": ANY, "model": MODEL, "base_url": f"{URL}/v1/embeddings"}
TEI = {"api_type": "text_embeddings_inference", "api_params": {"url": URL}, "token": ANY}


def documents(texts: list[str]) -> list[Document]:
    return [Document(content=text) for text in texts]


@pytest.mark.parametrize(
    "embedder",
    [
        OpenAITextEmbedder(**OPENAI),
        OpenAITextEmbedder(**OPENAI, dimensions=WIDTH),
        CohereTextEmbedder(**COHERE),
        JinaTextEmbedder(**JINA),
        HuggingFaceAPITextEmbedder(**TEI, normalize=True),
    ],
)
def test_text_embedders(embedder):
    assert_close(embedder.run(QUERY)["embedding"], embed([QUERY])[0])


def test_text_embedder_of_raw_vectors():
    embedder = HuggingFaceAPITextEmbedder(**TEI)
    assert_close(embedder.run(QUERY)["embedding"], embed([QUERY], normalize=False)[0])


@pytest.mark.parametrize(
    "embedder",
    [
        OpenAIDocumentEmbedder(**OPENAI, progress_bar=False),
        CohereDocumentEmbedder(**COHERE, progress_bar=False),
        JinaDocumentEmbedder(**JINA, progress_bar=False),
        HuggingFaceAPIDocumentEmbedder(**TEI, normalize=True, progress_bar=False),
    ],
)
def test_document_embedders(embedder):
    answer = embedder.run(documents(TEXTS))
    assert_close([document.embedding for document in answer["documents"]], embed(TEXTS))


def test_many_documents():
    embedder = OpenAIDocumentEmbedder(**OPENAI, progress_bar=False)  # 32 at once
    answer = embedder.run(documents(MANY[:128]))
    assert_close([document.embedding for document in answer["documents"]], embed(MANY[:128]))


@pytest.mark.parametrize(
    "ranker",
    [
        CohereRanker(model=RERANKER, api_key=ANY, api_base_url=RERANKER_URL),
        JinaRanker(model=RERANKER, api_key=ANY, base_url=f"{RERANKER_URL}/v1/rerank"),
        HuggingFaceTEIRanker(url=RERANKER_URL, token=ANY),
    ],
)
def test_rankers(ranker):
    answer = ranker.run(query=QUERY, documents=documents(DOCUMENTS))
    assert_ranks([(DOCUMENTS.index(document.content), document.score) for document in answer["documents"]], rerank())


def test_errors():
    with pytest.raises(NotFoundError, match="'unknown'"):
        OpenAITextEmbedder(**{**OPENAI, "model": "unknown"}).run(QUERY)
    with pytest.raises(RuntimeError, match="'unknown'"):  # the answer's `detail`
        JinaRanker(model="unknown", api_key=ANY, base_url=f"{URL}/rerank").run(QUERY, documents(DOCUMENTS))


def test_api_key():
    arguments = {**OPENAI, "api_base_url": f"{PROTECTED_URL}/v1"}
    with pytest.raises(AuthenticationError):
        OpenAITextEmbedder(**{**arguments, "api_key": Secret.from_token("wrong")}).run(QUERY)
    embedder = OpenAITextEmbedder(**{**arguments, "api_key": Secret.from_token(KEY)})
    assert_close(embedder.run(QUERY)["embedding"], embed([QUERY])[0])
