"""How large an answer will be: what is told of it, and held for it, before it is made.

One number is what stands in the JSON, the other what its values take in memory while they wait to be written.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from penstock.engine.protocol.vectors import SparseVector

from ..admission import AnswerSize

EXPECTED_ENTRIES: Final = 512
"""Entries of a sparse vector for which there is room before the model runs. Trained models give a hundred or two."""
_NUMBER: Final = 12
"""Bytes of a number in JSON."""
_NAMED_SCORE: Final = 45
"""Of a score in an object of its own, but for the name of its class."""
_ENTRY: Final = 36
"""Of an entry of a sparse vector."""
_TOKEN: Final = 70
"""Of a token with its text and its place."""
_HELD_TOKEN: Final = 200
"""The same in Python."""


def of_numbers(num_values: int, *, num_forms: int = 1) -> AnswerSize:
    """Returns the size of arrays of float32, which are written in one form or in several."""
    return AnswerSize(num_forms * _NUMBER * num_values, 4 * num_values)


def of_tokens(num_tokens: int) -> AnswerSize:
    """Returns the size of tokens with their texts."""
    return AnswerSize(_TOKEN * num_tokens, _HELD_TOKEN * num_tokens)


def of_token_rows(num_rows: int, width: int, *, names_tokens: bool = False) -> AnswerSize:
    """Returns the size of rows for tokens, each with the text and the class of its token or without them."""
    rows = of_numbers(num_rows * width)
    return rows.plus(of_tokens(num_rows)) if names_tokens else rows


def of_classes(num_inputs: int, labels: Sequence[str], *, are_named: bool) -> AnswerSize:
    """Returns the size of the scores of all classes for each input; the name stands with each of them, or of one."""
    num_scores = num_inputs * len(labels)
    kept = 4 * num_scores
    if not are_named:
        return AnswerSize(_NUMBER * num_scores + num_inputs * max(map(len, labels), default=0), kept)
    return AnswerSize(_NAMED_SCORE * num_scores + num_inputs * sum(map(len, labels)), kept)


def of_scores(num_scores: int) -> AnswerSize:
    """Returns the size of scores in objects of their own: of pairs, or of documents without their texts."""
    return AnswerSize(_NAMED_SCORE * num_scores, 4 * num_scores)


def of_texts(texts: Iterable[str | Mapping[str, Any]], most: int | None = None, *, num_forms: int = 1) -> AnswerSize:
    """Returns the size of texts that an answer holds, those of its request too: they wait for its reader.

    Args:
        texts: Texts, or documents that are objects.
        most: How many of them it holds; None: all.
        num_forms: How often they are written.
    """
    sizes = [text.__sizeof__() if isinstance(text, str) else len(orjson.dumps(text)) for text in texts]
    num_bytes = sum(heapq.nlargest(most, sizes) if most is not None and most < len(sizes) else sizes)
    return AnswerSize(num_forms * num_bytes, num_bytes)


def of_sparse(num_inputs: int) -> AnswerSize:
    """Returns the size for which there is room before it is known; see `beyond_expected`."""
    return _entries(EXPECTED_ENTRIES * num_inputs)


def beyond_expected(vectors: Sequence[SparseVector]) -> AnswerSize:
    """Returns by how much sparse vectors are larger than expected."""
    return _entries(max(sum(vector.values.size for vector in vectors) - EXPECTED_ENTRIES * len(vectors), 0))


def _entries(number: int) -> AnswerSize:
    return AnswerSize(_ENTRY * number, 8 * number)
