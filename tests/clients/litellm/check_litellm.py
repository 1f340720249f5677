"""litellm: its prefixes for embeddings and rerankers, each with its api_base."""

import json
from pathlib import Path

import litellm
import plain_http as http
import pytest
from plain_http import DOCUMENTS, MODEL, QUERY, RERANKER, RERANKER_URL, TEXTS, URL, assert_close, assert_ranks

# litellm asks the hub for the task of a model without `input_type`.
CASES = json.loads(Path(__file__).with_name("cases.json").read_text())


def embed(prefix: str, path: str, texts=TEXTS, *, url=URL, key="any", model=MODEL, **options):
    return litellm.embedding(f"{prefix}/{model}", input=texts, api_base=url + path, api_key=key, **options)


def vectors(answer) -> list:
    assert [row["index"] for row in answer.data] == list(range(len(answer.data)))
    return [row["embedding"] for row in answer.data]


def ranks(answer) -> list[tuple[int, float]]:
    return [(row["index"], row["relevance_score"]) for row in answer.results]


# This version does not parse the lists of Cohere's /v1/embed.
@pytest.mark.parametrize(("prefix", "path", "options"), CASES["embeddings"])
def test_embeddings_equal_plain_http(prefix, path, options):
    answer = embed(prefix, path, **options)
    assert_close(vectors(answer), http.embed(TEXTS))
    assert answer.usage.total_tokens > 0


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_options_are_sent(encoding_format):
    answer = embed("hosted_vllm", "/v1", dimensions=http.WIDTH, encoding_format=encoding_format)
    assert vectors(answer) == http.embed(TEXTS, encoding_format=encoding_format)


# litellm parses Voyage's response only for requests with top_n.
@pytest.mark.parametrize(("prefix", "path"), CASES["ranks"])
def test_ranks_equal_plain_http(prefix, path):
    arguments = {"api_base": RERANKER_URL + path, "api_key": "any", "query": QUERY, "documents": DOCUMENTS}
    answer = litellm.rerank(f"{prefix}/{RERANKER}", top_n=2, **arguments)
    assert_ranks(ranks(answer), http.rerank()[:2])
    assert [row["document"]["text"] for row in answer.results] == [DOCUMENTS[row["index"]] for row in answer.results]
    if prefix != "voyage":
        assert_ranks(ranks(litellm.rerank(f"{prefix}/{RERANKER}", **arguments)), http.rerank())
