"""The unmodified cohere clients, v1 and v2, against a real server."""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    cohere = pytest.importorskip("cohere")

MODEL = "all-MiniLM-L6-v2"
QUERY = "What holds back the water?"
DOCUMENTS = ["A song about the sea.", "The gate holds back the water.", "Bread is baked in an oven.", "A dam."]


@pytest.fixture(params=["", "/v1"], ids=["root", "base with /v1"])
def base_url(request, server) -> str:
    return server.url + request.param


@pytest.fixture
def v1(base_url: str) -> Iterator[object]:
    client = cohere.Client(base_url=base_url, api_key="any")
    yield client
    client._client_wrapper.httpx_client.httpx_client.close()


@pytest.fixture
def v2(base_url: str) -> Iterator[object]:
    client = cohere.ClientV2(base_url=base_url, api_key="any")
    yield client
    client._client_wrapper.httpx_client.httpx_client.close()


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


def test_rerank_options(v1, v2) -> None:
    answer = v1.rerank(
        model=MODEL, query=QUERY, documents=[{"text": d} for d in DOCUMENTS], top_n=2, return_documents=True
    )
    assert [item.document.text for item in answer.results] == [DOCUMENTS[1], DOCUMENTS[3]]
    assert answer.meta.api_version.version == "1"
    answer = v2.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=99, max_tokens_per_doc=5)
    assert len(answer.results) == len(DOCUMENTS)
    assert answer.meta.api_version.version == "2"


def test_long_documents_are_cut(v2) -> None:
    answer = v2.rerank(model=MODEL, query=QUERY, documents=["water " * 5000, "bread"])
    assert answer.results[0].index == 0


def test_classify_by_examples(v1) -> None:
    examples = [
        ("When will my order arrive?", "shipping"),
        ("Where is my parcel now?", "shipping"),
        ("I want my money back.", "refund"),
        ("Please return the payment.", "refund"),
    ]
    answer = v1.classify(
        model=MODEL,
        inputs=["The delivery is late.", "Give me a refund."],
        examples=[cohere.ClassifyExample(text=text, label=label) for text, label in examples],
    )
    assert [item.prediction for item in answer.classifications] == ["shipping", "refund"]
    for item in answer.classifications:
        assert item.labels[item.prediction].confidence == item.confidence > 0.5
        assert sum(label.confidence for label in item.labels.values()) == pytest.approx(1, abs=1e-5)


def test_errors_arrive_typed(v1, v2) -> None:
    with pytest.raises(cohere.NotFoundError) as caught:
        v2.rerank(model="unknown", query=QUERY, documents=DOCUMENTS)
    assert "'unknown'" in caught.value.body["message"]
    with pytest.raises(cohere.BadRequestError) as caught:
        v1.rerank(model=MODEL, query=QUERY, documents=[])
    assert "empty list" in caught.value.body["message"]
