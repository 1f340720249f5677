"""Classifiers and a cross-encoder through HTTP, against transformers and sentence-transformers."""

import shutil
import warnings
from pathlib import Path

import httpx
import numpy as np
import pytest

TEXTS = ["You are a wonderful person.", "I hate you, you stupid idiot!", "George Washington lived in Virginia.", "x"]


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    """The libraries that hold the truth warn of their own future; that is not ours to fail on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def transformers_logits(folder: Path, head: str, texts: list[str]) -> list[np.ndarray]:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = getattr(transformers, head).from_pretrained(folder, dtype=torch.float32).eval()
        return [model(**tokenizer(text, return_tensors="pt")).logits[0].numpy() for text in texts]


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def test_toxicity_probabilities(launch, model_folder) -> None:
    folder = model_folder("toxicity")
    expected = [softmax(row) for row in transformers_logits(folder, "AutoModelForSequenceClassification", TEXTS)]
    server = launch(str(folder), "--dtype", "float32")
    answer = httpx.post(f"{server.url}/classify", json={"input": TEXTS}, timeout=60).json()
    np.testing.assert_allclose([row["probs"] for row in answer["data"]], expected, atol=1e-4)
    cohere = httpx.post(f"{server.url}/v1/classify", json={"inputs": TEXTS}, timeout=60).json()["classifications"]
    assert [item["prediction"] for item in cohere] == [row["label"] for row in answer["data"]]
    assert cohere[0]["prediction"] != cohere[1]["prediction"]
    refused = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"})
    assert refused.status_code == 400
    server.stop()


def test_ner_tokens(launch, model_folder) -> None:
    folder = model_folder("ner")
    expected = [softmax(rows) for rows in transformers_logits(folder, "AutoModelForTokenClassification", TEXTS)]
    server = launch(str(folder), "--dtype", "float32")
    answer = httpx.post(f"{server.url}/classify", json={"input": TEXTS}, timeout=60).json()
    for row, probs in zip(answer["data"], expected, strict=True):
        np.testing.assert_allclose([token["probs"] for token in row["tokens"]], probs, atol=1e-4)
        assert [answer["labels"].index(token["label"]) for token in row["tokens"]] == probs.argmax(-1).tolist()
    found = {token["token"]: token["label"] for token in answer["data"][2]["tokens"]}
    assert found["[CLS]"] == "O"
    assert found["washington"].endswith("PER")
    assert found["virginia"].endswith("LOC")
    server.stop()


@pytest.fixture(scope="module")
def cross_encoder(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BertForSequenceClassification of one label with random weights, and MiniLM's tokenizer."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("cross-encoder")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30522,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=128,
        num_labels=1,
        initializer_range=0.5,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copy(default_model / name, folder)
    return folder


def test_a_cross_encoder_through_rerank_and_score(launch, cross_encoder: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    query, documents = (
        "What holds back the water?",
        ["A gate.", "A song about the sea and the land.", "x", "A dam " * 30],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = sentence_transformers.CrossEncoder(str(cross_encoder), device="cpu")
        expected = model.predict([(query, document) for document in documents])
    server = launch(str(cross_encoder), "--dtype", "float32")
    answer = httpx.post(f"{server.url}/score", json={"text_1": query, "text_2": documents}, timeout=60).json()
    np.testing.assert_allclose([row["score"] for row in answer["data"]], expected, atol=1e-4)
    answer = httpx.post(f"{server.url}/rerank", json={"query": query, "documents": documents}, timeout=60).json()
    assert [row["index"] for row in answer["results"]] == np.argsort(-expected, kind="stable").tolist()
    np.testing.assert_allclose([row["relevance_score"] for row in answer["results"]], -np.sort(-expected), atol=1e-4)
    server.stop()
