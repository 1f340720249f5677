"""Trained embedding models and a cross-encoder over HTTP equal sentence-transformers."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..servers import Server

pytestmark = pytest.mark.filterwarnings("ignore")
TEXTS = [
    "",
    "What holds back the water?",
    "naïve café — 東京 🚀 Ünïcödé",
    *("The gate of the dam lets water through when the river is high. " * n for n in (1, 3, 14)),
    *(" ".join(f"word{i * 7 % 101}" for i in range(n)) for n in (2, 13, 80)),
]


def embed(server: Server, inputs: Any) -> np.ndarray:
    answer = server.post("/v1/embeddings", {"input": inputs, "encoding_format": "base64"})
    assert answer.status_code == 200, answer.text
    return np.stack([np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in answer.json()["data"]])


@pytest.mark.parametrize("name", ["minilm", "gte-small"])
def test_vectors_equal_sentence_transformers(launch, model_folder: Callable[[str], Path], name: str) -> None:
    folder = model_folder(name)
    model = pytest.importorskip("sentence_transformers").SentenceTransformer(str(folder), device="cpu")
    expected = model.encode(TEXTS, normalize_embeddings=False)
    ids = [model.tokenizer(text)["input_ids"] for text in TEXTS]
    server = launch(str(folder), "--dtype", "float32")
    together = embed(server, TEXTS)
    assert np.abs(together - expected).max() < 1e-5
    many = embed(server, TEXTS[::-1] * 10).reshape(10, len(TEXTS), -1)[:, ::-1]
    alone = np.concatenate([embed(server, text) for text in TEXTS])
    for other in (many, alone, embed(server, ids)):
        assert np.abs(other - together).max() < 1e-6
    assert np.abs(embed(server, ids[2]) - together[2]).max() < 1e-6
    server.stop()


def test_cross_encoder_equals_sentence_transformers(launch, random_model: Callable[..., Path]) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = random_model("BertForSequenceClassification", num_labels=1, initializer_range=0.5)
    query = "What holds back the water?"
    documents = ["A gate.", "A song about the sea and the land.", "x", "A dam " * 30]
    model = sentence_transformers.CrossEncoder(str(folder), device="cpu")
    expected = model.predict([(query, document) for document in documents])
    server = launch(str(folder), "--dtype", "float32")
    scores = server.post("/score", {"text_1": query, "text_2": documents}).json()["data"]
    np.testing.assert_allclose([row["score"] for row in scores], expected, atol=1e-4)
    ranks = server.post("/rerank", {"query": query, "documents": documents}).json()["results"]
    assert [row["index"] for row in ranks] == np.argsort(-expected, kind="stable").tolist()
    np.testing.assert_allclose([row["relevance_score"] for row in ranks], -np.sort(-expected), atol=1e-4)
    server.stop()
