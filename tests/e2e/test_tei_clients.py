"""The huggingface_hub client, and other routes of TEI."""

import httpx
import numpy as np
import pytest

hub = pytest.importorskip("huggingface_hub")

TEXTS = ["A gate holds back the water.", "A song about the sea.", "A dam."]
QUERY = "What holds back the water?"


@pytest.fixture(autouse=True)
def _client_is_online(monkeypatch: pytest.MonkeyPatch) -> None:
    """In offline mode the client refuses even a local server."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture(params=["", "/"], ids=["root", "root with a slash"])
def client(request, server):
    return hub.InferenceClient(model=server.url + request.param, provider="hf-inference", token="any")


def test_vectors_equal_sentence_transformers(client, truth) -> None:
    vectors = client.feature_extraction(TEXTS)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, truth(TEXTS), atol=1e-5)
    np.testing.assert_allclose(
        client.feature_extraction(TEXTS[0], normalize=True, truncate=True), vectors[:1], atol=1e-5
    )
    long = client.feature_extraction("water " * 600, truncate=True, truncation_direction="left")
    assert long.shape == (1, 384)


def test_similarities_are_cosines(client, truth) -> None:
    vectors = truth([QUERY, *TEXTS])
    np.testing.assert_allclose(client.sentence_similarity(QUERY, TEXTS), vectors[1:] @ vectors[0], atol=1e-5)


def test_rerank_of_texts_is_sorted_by_cosine(http: httpx.Client, truth) -> None:
    vectors = truth([QUERY, *TEXTS])
    cosines = vectors[1:] @ vectors[0]
    ranks = http.post("/rerank", json={"query": QUERY, "texts": TEXTS}).json()
    assert [rank["index"] for rank in ranks] == np.argsort(-cosines).tolist()
    np.testing.assert_allclose([rank["score"] for rank in ranks], np.sort(cosines)[::-1], atol=1e-5)
