"""Texts of a load test: from a file, or random words with a realistic distribution of lengths."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..settings import UsageError

WORDS: Final = tuple(Path(__file__).with_name("words.txt").read_text("utf-8").split())
"""Frequent English words. English tokenizers make one token of each."""
_SHARES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_LENGTHS: Final = {
    "queries": (2, 6, 7, 10, 13, 22, 29, 43, 79),
    "documents": (33, 127, 158, 204, 260, 309, 356, 473, 1541),
    "mixed": (1, 5, 10, 18, 44, 142, 366, 1424, 4096),
}
"""Words per text at _SHARES: questions of Banking77, abstracts of SciFact, human turns of ShareGPT (tokens there)."""
BUILT_IN: Final = tuple(_LENGTHS)
_MOST_TEXTS: Final = 8192
"""Distinct texts in one round, so that a cache of the server finds few of them."""
_MIN_REQUESTS: Final = 64


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a load test.

    Attributes:
        name: One of BUILT_IN, or the path of a file.
        texts_per_request: Texts, or documents of a query, in each request.
        max_words: Maximum length of the texts of a built-in workload.
        texts: The texts of the file; empty for a built-in workload.
    """

    name: str
    texts_per_request: int
    max_words: int
    texts: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def open(cls, name: str, texts_per_request: int, max_words: int) -> Workload:
        """Returns a built-in workload, or one with the texts of a file.

        Raises:
            UsageError: The file cannot be read, or a line has no text.
        """
        return cls(name, texts_per_request, max_words, () if name in BUILT_IN else _texts_of(Path(name)))

    def requests(self, seed: int) -> list[list[str]]:
        """Returns the texts of many requests, the same for the same seed."""
        rng = random.Random(f"{self.name}-{seed}")
        count = max(_MOST_TEXTS // self.texts_per_request, _MIN_REQUESTS)
        return [[self._text(rng) for _ in range(self.texts_per_request)] for _ in range(count)]

    def query(self, seed: int) -> str:
        """Returns a query for rerank requests: a text of the length of "queries"."""
        return Workload("queries", 1, self.max_words)._text(random.Random(seed))

    def longest(self) -> str:
        """Returns a text of the maximum length, which a server must accept before the load starts."""
        if self.texts:
            return max(self.texts, key=len)
        return " ".join(random.Random(0).choices(WORDS, k=min(_LENGTHS[self.name][-1], self.max_words)))

    def _text(self, rng: random.Random) -> str:
        if self.texts:
            return rng.choice(self.texts)
        length = round(float(np.interp(rng.random(), _SHARES, _LENGTHS[self.name])))
        return " ".join(rng.choices(WORDS, k=min(length, self.max_words)))


def _texts_of(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(BUILT_IN)
        raise UsageError(f"--load: {path} is not one of {known}, and cannot be read as a file: {error}") from error
    texts = [
        _json_text(line, f"--load: line {number} of {path}") if path.suffix == ".jsonl" else line
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not texts:
        raise UsageError(f"--load: {path} has no text; write one text per line")
    return tuple(texts)


def _json_text(line: str, place: str) -> str:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{place} is not JSON: {error}") from error
    text = row.get("text") if isinstance(row, dict) else row
    if not isinstance(text, str) or not text:
        raise UsageError(f'{place} has no text; write {{"text": "..."}}')
    return text
