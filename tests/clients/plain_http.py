"""The servers of the checks, and the responses that they give to plain HTTP.

It runs in the environment of each client with the standard library. tests/clients/run.py sets the variables.
"""

import json
import os
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

URL = os.environ["SERVER_URL"]
"""The embedded model."""
MODEL = "all-MiniLM-L6-v2"
WIDTH = 384

RERANKER_URL = os.environ["RERANKER_URL"]
"""A small cross-encoder with one label."""
RERANKER = "reranker"

CLASSIFIER_URL = os.environ["CLASSIFIER_URL"]
"""A small classifier with three labels."""
LABELS = {"joy", "anger", "fear"}

IMAGES_URL = os.environ["IMAGES_URL"]
"""A small CLIP model for texts and images."""
TWO_TOWER = "two-tower"

PROTECTED_URL = os.environ["PROTECTED_URL"]
"""The embedded model with an API key and a short queue."""
KEY = os.environ["PROTECTED_KEY"]

EXPECTED = json.loads(Path(os.environ["EXPECTED_FILE"]).read_text())
TEXTS: list[str] = EXPECTED["texts"]
IMAGES: list[str] = EXPECTED["images"]
"""PNG files in base64."""
MANY = [f"text number {i}" for i in range(2048)]
QUERY = "What holds back the water?"
DOCUMENTS = ["A song about the sea.", "The gate holds back the water.", "Bread is baked in an oven.", "A dam."]
TOO_LONG = "word " * 1000
REFUNDS = [("I want my money back.", "refund"), ("Please return the payment.", "refund")]


def post(path: str, body: dict[str, Any], url: str = URL) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def embed(texts: str | Sequence[Any], **fields: Any) -> list[Any]:
    """A vector for each text or list of token ids."""
    return [row["embedding"] for row in post("/v1/embeddings", {"input": texts, **fields})["data"]]


def embed_items(items: Sequence[dict[str, str]]) -> list[list[float]]:
    """A vector of TWO_TOWER for each {"text": ...} or {"image": base64}."""
    return [row["embedding"] for row in post("/v1/embeddings", {"input": items}, IMAGES_URL)["data"]]


def rerank(documents: Sequence[str] = DOCUMENTS, url: str = RERANKER_URL) -> list[tuple[int, float]]:
    """Index and score of each document for QUERY, best first."""
    results = post("/v2/rerank", {"query": QUERY, "documents": documents}, url)["results"]
    return [(row["index"], row["relevance_score"]) for row in results]


def score() -> list[float]:
    """A score of each document for QUERY."""
    return [row["score"] for row in post("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS})["data"]]


def classify(texts: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Labels and scores of each text, best first."""
    return post("/predict", {"inputs": [[text] for text in texts]}, CLASSIFIER_URL)


def assert_ranks(found: Sequence[tuple[int, float]], expected: Sequence[tuple[int, float]]) -> None:
    assert [index for index, _ in found] == [index for index, _ in expected]
    assert_close([score for _, score in found], [score for _, score in expected])


def assert_close(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Compares numbers, or nested lists of numbers."""
    if isinstance(expected, int | float):
        assert abs(found - expected) <= tolerance, f"{found} is not {expected}"
        return
    assert len(found) == len(expected), f"{len(found)} entries instead of {len(expected)}"
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, tolerance)


class Rejecting:
    """A base URL for one case of the server that rejects the first requests (`rejecting` in servers.py).

    Attributes:
        url: The base URL. The server at URL answers the requests after the first `times`.
    """

    def __init__(self, status: int, times: int, name: str) -> None:
        self.url = f"{os.environ['REJECTING_URL']}/{status}/{times}/{name}"

    def num_sent(self) -> int:
        """The number of requests since the last call."""
        with urllib.request.urlopen(self.url, timeout=60) as response:
            return int(response.read())
