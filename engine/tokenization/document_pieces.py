"""Scoring of documents that are longer than the model reads: in pieces, of which the best counts.

A document that fits is its own only piece. Others are cut at the beginning of a word, where there is one in the last
quarter of a piece, and what lies behind the last allowed piece is left out. Plain Python and numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..protocol.results import ScoreResult

Offsets = Sequence[tuple[int, int]]

MIN_ROOM = 16
"""Tokens. With less left beside the query, documents are cut instead."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of several documents.

    Attributes:
        texts: All pieces, in the order of the documents.
        owners: The document that each piece belongs to.
        cut_document: The first document that is not in its pieces as a whole; None where there is none.
    """

    texts: list[str]
    owners: list[int]
    cut_document: int | None = None

    @classmethod
    def of(
        cls, documents: Sequence[str], offsets: Sequence[Offsets], rooms: Sequence[int], limit: int, *, spare: int = 0
    ) -> Pieces:
        """Cuts documents.

        Args:
            documents: Texts.
            offsets: Where the tokens of each stand, from and to.
            rooms: Tokens that a piece of each may have; below MIN_ROOM the document is left whole.
            limit: Pieces of a document at most.
            spare: Tokens that the pieces of a document leave free, since each may have some more by itself.
        """
        texts: list[str] = []
        owners: list[int] = []
        cut_document: int | None = None
        for i, (document, places, room) in enumerate(zip(documents, offsets, rooms, strict=True)):
            is_whole = room < MIN_ROOM or len(places) <= room
            pieces = [document] if is_whole else split_text(document, places, room - spare, limit + 1)
            if len(pieces) > limit and cut_document is None:
                cut_document = i
            texts += pieces[:limit]
            owners += [i] * len(pieces[:limit])
        return cls(texts, owners, cut_document)

    def join(self, result: ScoreResult) -> ScoreResult:
        """Returns the best score and the tokens of all pieces for each document."""
        scores = np.full(self.owners[-1] + 1, -np.inf, np.float32)
        np.maximum.at(scores, self.owners, result.scores)
        num_tokens = [0] * len(scores)
        for owner, count in zip(self.owners, result.num_tokens, strict=True):
            num_tokens[owner] += count
        return ScoreResult(scores, num_tokens)


def split_text(text: str, offsets: Offsets, room: int, limit: int) -> list[str]:
    """Returns `limit` pieces of at most `room` tokens; `offsets` are the places of the tokens, from and to."""
    if len(offsets) <= room:
        return [text]
    pieces: list[str] = []
    first = 0
    while first < len(offsets) and len(pieces) < limit:
        last = min(first + room, len(offsets))
        if last < len(offsets):
            last = next((k for k in range(last, last - room // 4, -1) if _begins_word(text, offsets[k][0])), last)
        pieces.append(text[offsets[first][0] : offsets[last - 1][1]])
        first = last
    return pieces


def _begins_word(text: str, place: int) -> bool:
    return text[place : place + 1].isspace() or text[max(place - 1, 0) : place].isspace()
