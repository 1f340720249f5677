"""The loads of the server benchmarks: the requests and their concurrency."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

WORDS = (Path(__file__).parents[1] / "server" / "bench" / "words.txt").read_text().split()


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of traffic.

    Attributes:
        name: Name in tables.
        min_words: Words of the shortest text.
        max_words: Words of the longest text.
        texts_per_request: Texts in one request.
        concurrency: Requests under way at once.
    """

    name: str
    min_words: int
    max_words: int
    texts_per_request: int
    concurrency: int

    def bodies(self, model: str, encoding_format: str, count: int = 256, seed: int = 0) -> list[bytes]:
        """Returns `count` request bodies of /v1/embeddings, the same for the same seed."""
        return [request_body(texts, model, encoding_format) for texts in self.requests(count, seed)]

    def requests(self, count: int = 256, seed: int = 0) -> list[list[str]]:
        """Returns the texts of `count` requests, the same for the same seed."""
        rng = random.Random(f"{self.name}-{seed}")
        return [[self._text(rng) for _ in range(self.texts_per_request)] for _ in range(count)]

    def _text(self, rng: random.Random) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(self.min_words, self.max_words)))


def request_body(texts: list[str], model: str, encoding_format: str) -> bytes:
    """Returns the body of /v1/embeddings that asks for `texts`."""
    return json.dumps({"model": model, "input": texts, "encoding_format": encoding_format}).encode()


LOADS = {
    load.name: load
    for load in (
        Load("query", 5, 15, 1, 16),
        Load("mixed", 5, 150, 32, 4),
        Load("long", 200, 200, 8, 4),
        Load("single", 5, 15, 1, 1),
    )
}
