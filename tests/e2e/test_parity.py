"""Trained embedding models over HTTP, float32: the vectors of sentence-transformers, whatever a text travels with."""

import base64
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

TEXTS = [
    "",
    "a",
    "What holds back the water?",
    "naïve café — 東京 🚀 Ünïcödé",
    "0-dimensional biomaterials show inductive properties.",
    *("The gate of the dam lets water through when the river is high. " * n for n in (1, 3, 8, 14)),
    *(" ".join(f"word{i * 7 % 101}" for i in range(n)) for n in (2, 13, 47, 80)),
]


def embed(url: str, inputs: Any) -> np.ndarray:
    body = {"input": inputs, "encoding_format": "base64"}
    answer = httpx.post(f"{url}/v1/embeddings", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return np.stack([np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in answer.json()["data"]])


@pytest.mark.parametrize("name", ["minilm", "gte-small"])
def test_vectors_are_those_of_sentence_transformers(launch, model_folder: Callable[[str], Path], name: str) -> None:
    folder = model_folder(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = pytest.importorskip("sentence_transformers").SentenceTransformer(str(folder), device="cpu")
        expected = model.encode(TEXTS, normalize_embeddings=False)
        ids = [model.tokenizer(text)["input_ids"] for text in TEXTS]
    server = launch(str(folder), "--dtype", "float32")
    try:
        together = embed(server.url, TEXTS)
        assert np.abs(together - expected).max() < 1e-5
        alone = np.concatenate([embed(server.url, text) for text in TEXTS])
        assert np.abs(alone - together).max() < 1e-6
        assert np.abs(embed(server.url, ids) - together).max() < 1e-6
        assert np.abs(embed(server.url, ids[2]) - together[2]).max() < 1e-6
        crowd = embed(server.url, TEXTS[::-1] * 10)
        assert np.abs(crowd.reshape(10, len(TEXTS), -1)[:, ::-1] - together).max() < 1e-6
    finally:
        server.stop()
