"""The rerankers library, which sends to full URLs and parses responses of Cohere, Jina, Voyage and TEI."""

import plain_http as http
import pytest
from rerankers.models.api_rankers import APIRanker


def ranks(url: str, provider: str, model: str = http.RERANKER, key: str = "any") -> list[tuple[int, float]]:
    ranker = APIRanker(model, api_key=key, api_provider=provider, url=url, verbose=0)
    return [(result.doc_id, result.score) for result in ranker.rank(http.QUERY, http.DOCUMENTS).results]


@pytest.mark.parametrize(
    ("provider", "path"),
    [
        ("cohere", "/v1/rerank"),
        ("cohere", "/v2/rerank"),
        ("jina", "/v1/rerank"),
        ("voyage", "/v1/rerank"),
        ("text-embeddings-inference", "/rerank"),
    ],
)
def test_ranks_equal_plain_http(provider, path):
    http.assert_ranks(ranks(http.RERANKER_URL + path, provider), http.rerank())


def test_api_key_is_accepted():
    assert ranks(f"{http.PROTECTED_URL}/v2/rerank", "cohere", http.MODEL, http.KEY)[0][0] == 1
