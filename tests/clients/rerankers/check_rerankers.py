"""The rerankers library, which posts to full URLs and reads Cohere's, Jina's, Voyage's and TEI's answers."""

import pytest
from plain_http import DOCUMENTS, KEY, MODEL, PROTECTED_URL, QUERY, RERANKER, RERANKER_URL, assert_ranks, rerank
from rerankers.models.api_rankers import APIRanker

PROVIDERS = [
    ("cohere", "/v1/rerank"),
    ("cohere", "/v2/rerank"),
    ("jina", "/v1/rerank"),
    ("voyage", "/v1/rerank"),
    ("text-embeddings-inference", "/rerank"),
]


def ranks(answer) -> list[tuple[int, float]]:
    return [(result.doc_id, result.score) for result in answer.results]


@pytest.mark.parametrize(("provider", "path"), PROVIDERS)
def test_rank(provider, path):
    ranker = APIRanker(RERANKER, api_key="any", api_provider=provider, url=RERANKER_URL + path, verbose=0)
    assert_ranks(ranks(ranker.rank(QUERY, DOCUMENTS)), rerank())


def test_api_key():
    ranker = APIRanker(MODEL, api_key=KEY, api_provider="cohere", url=f"{PROTECTED_URL}/v2/rerank", verbose=0)
    assert ranks(ranker.rank(QUERY, DOCUMENTS))[0][0] == 1
