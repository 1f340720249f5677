"""The huggingface_hub client, and other routes of TEI."""

import warnings

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


def test_tokens_are_decoded_to_the_text(http: httpx.Client) -> None:
    text = "Größe matters, embedding too."
    (tokens,) = http.post("/tokenize", json={"inputs": text}).json()
    assert [tokens[0], tokens[-1]] == [
        {"id": 101, "text": "[CLS]", "special": True, "start": None, "stop": None},
        {"id": 102, "text": "[SEP]", "special": True, "start": None, "stop": None},
    ]
    inner = tokens[1:-1]
    assert all(token["text"] == text[token["start"] : token["stop"]] for token in inner)
    assert "".join(token["text"] for token in inner) == text.replace(" ", "")
    ids = [token["id"] for token in tokens]
    assert http.post("/decode", json={"ids": ids}).json() == ["große matters, embedding too."]
    assert http.post("/decode", json={"ids": [ids], "skip_special_tokens": False}).json()[0].startswith("[CLS]")
    rows = http.post("/embed_all", json={"inputs": text}).json()
    assert np.shape(rows) == (1, len(ids), 384)
    mean = np.mean(rows[0], axis=0)
    vector = http.post("/embed", json={"inputs": text}).json()[0]
    np.testing.assert_allclose(mean / np.linalg.norm(mean), vector, atol=1e-5)


def test_text_classification_returns_sorted_classes(launch, model_folder) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = model_folder("toxicity")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        expected = model(**tokenizer("I hate you!", "You idiot.", return_tensors="pt")).logits[0].numpy()
    server = launch(str(folder), "--dtype", "float32")
    client = hub.InferenceClient(model=server.url, provider="hf-inference", token="any")
    classes = client.text_classification("I hate you!")
    assert [c.label for c in classes] == [c.label for c in sorted(classes, key=lambda c: -c.score)]
    assert len(classes) == len(model.config.id2label)
    assert len(client.text_classification("I hate you!", top_k=1)) == 1
    answer = server.post("/predict", {"inputs": ["I hate you!", "You idiot."], "raw_scores": True}).json()
    found = {row["label"]: row["score"] for row in answer}
    np.testing.assert_allclose([found[name] for name in model.config.id2label.values()], expected, atol=1e-4)
    with pytest.raises(hub.errors.HfHubHTTPError, match="does not support the task 'embed'"):
        hub.InferenceClient(model=f"{server.url}/embed", token="any").feature_extraction("a")
    server.stop()
