"""The cohere clients, v1 and v2."""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    cohere = pytest.importorskip("cohere")

# The clients' own use of pydantic.
pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")

MODEL = "all-MiniLM-L6-v2"
QUERY = "What holds back the water?"
DOCUMENTS = ["A song about the sea.", "The gate holds back the water.", "Bread is baked in an oven.", "A dam."]


def connected(client_class, server) -> Iterator[object]:
    client = client_class(base_url=server.url, api_key="any")
    yield client
    client._client_wrapper.httpx_client.httpx_client.close()


@pytest.fixture
def v1(server) -> Iterator[object]:
    yield from connected(cohere.Client, server)


@pytest.fixture
def v2(server) -> Iterator[object]:
    yield from connected(cohere.ClientV2, server)


def test_rerank_scores_are_sentence_transformers_cosines(v1, v2, truth) -> None:
    vectors = truth([QUERY, *DOCUMENTS])
    cosines = vectors[1:] @ vectors[0]
    for client in (v1, v2):
        answer = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS)
        assert [item.index for item in answer.results] == np.argsort(-cosines).tolist()
        scores = [item.relevance_score for item in answer.results]
        np.testing.assert_allclose(scores, np.sort(cosines)[::-1], atol=1e-5)
        assert isinstance(answer.id, str)
        assert answer.meta.billed_units.search_units == 1


def test_long_documents_are_cut_or_read_in_passages(v1) -> None:
    filled = 4 * (256 - 3)  # four passages
    documents = ["bread " * filled + "The gate holds back the water.", "A song about the sea."]
    cut = v1.rerank(model=MODEL, query=QUERY, documents=documents)
    whole = v1.rerank(model=MODEL, query=QUERY, documents=documents, max_chunks_per_doc=20)
    assert [item.index for item in cut.results] == [1, 0]
    assert [item.index for item in whole.results] == [0, 1]
