"""The servers that the checks ask, and what plain HTTP gets of them: what every client must give too.

Runs in each client's environment: the standard library alone. tests/clients/run.py sets the variables.
"""

import json
import os
import urllib.request
from collections.abc import Sequence
from typing import Any

URL = os.environ["SERVER_URL"]
"""`penstock serve`: the embedded model."""
MODEL = "all-MiniLM-L6-v2"
WIDTH = 384

RERANKER_URL = os.environ["RERANKER_URL"]
"""A small cross-encoder of one label."""
RERANKER = "reranker"

CLASSIFIER_URL = os.environ["CLASSIFIER_URL"]
"""A small classifier of three labels."""
CLASSIFIER = "classifier"
LABELS = {"joy", "anger", "fear"}

PROTECTED_URL = os.environ["PROTECTED_URL"]
"""The embedded model again, for those who have the key, and with room for few tokens at once."""
KEY = os.environ["PROTECTED_KEY"]

TEXTS = [
    "A gate holds the water.",
    "short",
    "naïve café 東京 😀",
    "A longer text that goes on about pipes, gates, dams and the people who look after them. " * 6,
]
MANY = [f"text number {i}" for i in range(2048)]
QUERY = "What holds back the water?"
DOCUMENTS = ["A song about the sea.", "The gate holds back the water.", "Bread is baked in an oven.", "A dam."]
TOO_LONG = "word " * 1000


def post(path: str, body: dict[str, Any], url: str = URL) -> Any:
    """The answer to a body."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def embed(texts: Sequence[str] | Sequence[list[int]], **fields: Any) -> list[list[float]]:
    """A vector for each text or list of token ids."""
    return [row["embedding"] for row in post("/v1/embeddings", {"input": texts, **fields})["data"]]


def rerank(documents: Sequence[str] = DOCUMENTS, url: str = RERANKER_URL) -> list[tuple[int, float]]:
    """Index and score of each document, best first, for QUERY."""
    results = post("/v2/rerank", {"query": QUERY, "documents": documents}, url)["results"]
    return [(row["index"], row["relevance_score"]) for row in results]


def assert_ranks(found: Sequence[tuple[int, float]], expected: Sequence[tuple[int, float]]) -> None:
    """The same documents in the same order, and the same scores."""
    assert [index for index, _ in found] == [index for index, _ in expected]
    assert_close([score for _, score in found], [score for _, score in expected])


def assert_close(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Numbers, or lists of them to any depth, are equal but for float32's rounding."""
    if isinstance(expected, int | float):
        assert abs(found - expected) <= tolerance, f"{found} is not {expected}"
        return
    assert len(found) == len(expected), f"{len(found)} entries instead of {len(expected)}"
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, tolerance)
