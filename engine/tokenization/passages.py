"""Splits documents that are longer than the model reads into passages. The best passage of a document gives its score.

A document that fits is one passage. Passages end at the beginning of a word if there is one in the last quarter of the
passage. Text behind the last allowed passage is dropped. Plain Python and numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..protocol.results import ScoreResult

Offsets = Sequence[tuple[int, int]]

MIN_PASSAGE_TOKENS: Final = 16
"""If the query leaves fewer tokens than this, documents are not split."""


@dataclass(frozen=True, slots=True)
class Passages:
    """The passages of several documents.

    Attributes:
        texts: All passages, in the order of the documents.
        owners: The document of each passage.
        cut_document: The first document of which text was dropped; None if there is none.
    """

    texts: list[str]
    owners: list[int]
    cut_document: int | None = None

    @classmethod
    def of(
        cls, documents: Sequence[str], offsets: Sequence[Offsets], sizes: Sequence[int], limit: int, *, spare: int = 0
    ) -> Passages:
        """Splits documents.

        Args:
            documents: Texts.
            offsets: First character and end of each token, per document.
            sizes: Tokens that fit into a passage, per document; below MIN_PASSAGE_TOKENS the document is not split.
            limit: Largest number of passages per document.
            spare: Tokens that each passage leaves free, because a passage tokenized alone may have a few more.
        """
        texts: list[str] = []
        owners: list[int] = []
        cut_document: int | None = None
        for i, (document, places, size) in enumerate(zip(documents, offsets, sizes, strict=True)):
            is_whole = size < MIN_PASSAGE_TOKENS or len(places) <= size
            passages = [document] if is_whole else split_text(document, places, size - spare, limit + 1)
            if len(passages) > limit and cut_document is None:
                cut_document = i
            texts += passages[:limit]
            owners += [i] * len(passages[:limit])
        return cls(texts, owners, cut_document)

    def join(self, result: ScoreResult) -> ScoreResult:
        """Returns the best score and the summed token count of each document."""
        scores = np.full(self.owners[-1] + 1, -np.inf, np.float32)
        np.maximum.at(scores, self.owners, result.scores)
        num_tokens = [0] * len(scores)
        for owner, count in zip(self.owners, result.num_tokens, strict=True):
            num_tokens[owner] += count
        return ScoreResult(scores, num_tokens)


def split_text(text: str, offsets: Offsets, size: int, limit: int) -> list[str]:
    """Returns up to `limit` passages of at most `size` tokens. `offsets`: first character and end of each token."""
    if len(offsets) <= size:
        return [text]
    passages: list[str] = []
    first = 0
    while first < len(offsets) and len(passages) < limit:
        last = min(first + size, len(offsets))
        if last < len(offsets):
            last = next((k for k in range(last, last - size // 4, -1) if _begins_word(text, offsets[k][0])), last)
        passages.append(text[offsets[first][0] : offsets[last - 1][1]])
        first = last
    return passages


def _begins_word(text: str, place: int) -> bool:
    return text[place : place + 1].isspace() or text[max(place - 1, 0) : place].isspace()
