"""Haystack: embedders and rankers of OpenAI, Cohere, Jina and TEI."""

import plain_http as http
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
from plain_http import DOCUMENTS, MODEL, QUERY, RERANKER, RERANKER_URL, TEXTS, URL, assert_close

ANY = Secret.from_token("any")
OPENAI = {"api_key": ANY, "model": MODEL, "api_base_url": f"{URL}/v1"}
COHERE = {"api_key": ANY, "model": MODEL, "api_base_url": URL}
JINA = {"api_key": ANY, "model": MODEL, "base_url": f"{URL}/v1/embeddings"}
TEI = {"api_type": "text_embeddings_inference", "api_params": {"url": URL}, "token": ANY}


def documents(texts: list[str]) -> list[Document]:
    return [Document(content=text) for text in texts]


@pytest.mark.parametrize(
    ("embedder", "options"),
    [
        (OpenAITextEmbedder(**OPENAI), {}),
        (OpenAITextEmbedder(**OPENAI, dimensions=http.WIDTH), {}),
        (CohereTextEmbedder(**COHERE), {}),
        (JinaTextEmbedder(**JINA), {}),
        (HuggingFaceAPITextEmbedder(**TEI, normalize=True), {}),
        (HuggingFaceAPITextEmbedder(**TEI), {"normalize": False}),
    ],
)
def test_text_embedding_equals_plain_http(embedder, options):
    assert_close(embedder.run(QUERY)["embedding"], http.embed([QUERY], **options)[0])


@pytest.mark.parametrize(
    "embedder",
    [
        OpenAIDocumentEmbedder(**OPENAI, progress_bar=False),
        CohereDocumentEmbedder(**COHERE, progress_bar=False),
        JinaDocumentEmbedder(**JINA, progress_bar=False),
        HuggingFaceAPIDocumentEmbedder(**TEI, normalize=True, progress_bar=False),
    ],
)
def test_document_embeddings_equal_plain_http(embedder):
    texts = [*TEXTS, *http.MANY[:60]]  # more than a batch of 32
    answer = embedder.run(documents(texts))
    assert_close([document.embedding for document in answer["documents"]], http.embed(texts))


@pytest.mark.parametrize(
    "ranker",
    [
        CohereRanker(model=RERANKER, api_key=ANY, api_base_url=RERANKER_URL),
        JinaRanker(model=RERANKER, api_key=ANY, base_url=f"{RERANKER_URL}/v1/rerank"),
        HuggingFaceTEIRanker(url=RERANKER_URL, token=ANY),
    ],
)
def test_ranks_equal_plain_http(ranker):
    answer = ranker.run(query=QUERY, documents=documents(DOCUMENTS))
    ranks = [(DOCUMENTS.index(document.content), document.score) for document in answer["documents"]]
    http.assert_ranks(ranks, http.rerank())
