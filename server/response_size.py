"""Estimates the size of a response from its number of values, before the values exist.

AdmissionController reserves memory for this size.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson
from starlette.types import Scope

from penstock.engine.protocol.multi_vector import SparseVector

from .request_state import state_of

LARGE_RESPONSE_BYTES: Final = 6_000_000
"""Bytes of JSON above which a response is sent in parts: half a million numbers, which take 50 ms to serialise."""
EXPECTED_ENTRIES: Final = 512
"""Entries of a sparse vector for which memory is reserved before the model runs. Trained models give 100 to 200."""
_NUMBER_BYTES: Final = 12
"""Bytes of a number in JSON."""
_SCORE_BYTES: Final = 45
"""Bytes of a JSON object with one score, without the class name."""
_ENTRY_BYTES: Final = 36
"""Bytes of an entry of a sparse vector in JSON."""
_TOKEN_JSON_BYTES: Final = 70
"""Bytes of a token with its text and offsets in JSON."""
_TOKEN_VALUE_BYTES: Final = 200
"""Bytes of a token with its text and offsets as Python objects."""


class ResponseSize(NamedTuple):
    """Estimated size of a response or a part of it.

    Attributes:
        json_bytes: Bytes of its JSON.
        value_bytes: Bytes of the values before serialisation.
    """

    json_bytes: int
    value_bytes: int

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory until the client has read the response: the values, or the JSON of a small response."""
        return self.value_bytes if self.json_bytes >= LARGE_RESPONSE_BYTES else self.json_bytes

    def plus(self, other: ResponseSize) -> ResponseSize:
        """Returns the sum of two sizes."""
        return ResponseSize(self.json_bytes + other.json_bytes, self.value_bytes + other.value_bytes)


def has_large_response(scope: Scope) -> bool:
    """Returns whether the response to a request is serialised in parts."""
    size = state_of(scope).response_size
    return size is not None and size.json_bytes >= LARGE_RESPONSE_BYTES


def size_of_numbers(num_values: int, *, num_encodings: int = 1) -> ResponseSize:
    """Returns the size of float32 arrays that are written in one or several formats."""
    return ResponseSize(num_encodings * _NUMBER_BYTES * num_values, 4 * num_values)


def size_of_tokens(num_tokens: int) -> ResponseSize:
    """Returns the size of tokens with their texts."""
    return ResponseSize(_TOKEN_JSON_BYTES * num_tokens, _TOKEN_VALUE_BYTES * num_tokens)


def size_of_token_rows(
    num_rows: int, width: int, *, num_encodings: int = 1, names_tokens: bool = False
) -> ResponseSize:
    """Returns the size of one row per token, with the token's text and class if `names_tokens` is true."""
    rows = size_of_numbers(num_rows * width, num_encodings=num_encodings)
    return rows.plus(size_of_tokens(num_rows)) if names_tokens else rows


def size_of_classes(num_inputs: int, labels: Sequence[str], *, are_named: bool) -> ResponseSize:
    """Returns the size of all class scores per input, with the name of every class or only of the best class."""
    num_scores = num_inputs * len(labels)
    value_bytes = 4 * num_scores
    if not are_named:
        return ResponseSize(_NUMBER_BYTES * num_scores + num_inputs * max(map(len, labels), default=0), value_bytes)
    return ResponseSize(_SCORE_BYTES * num_scores + num_inputs * sum(map(len, labels)), value_bytes)


def size_of_scores(num_scores: int) -> ResponseSize:
    """Returns the size of objects with one score each, without document texts."""
    return ResponseSize(_SCORE_BYTES * num_scores, 4 * num_scores)


def size_of_texts(
    texts: Iterable[str | Mapping[str, Any]], max_texts: int | None = None, *, num_encodings: int = 1
) -> ResponseSize:
    """Returns the size of texts in a response. They stay in memory until the client has read it.

    Args:
        texts: Texts, or documents that are objects.
        max_texts: Maximum number of texts in the response; None: all.
        num_encodings: How often each text is written.
    """
    sizes = [text.__sizeof__() if isinstance(text, str) else len(orjson.dumps(text)) for text in texts]
    num_bytes = sum(heapq.nlargest(max_texts, sizes) if max_texts is not None and max_texts < len(sizes) else sizes)
    return ResponseSize(num_encodings * num_bytes, num_bytes)


def size_of_sparse(num_inputs: int) -> ResponseSize:
    """Returns the expected size of sparse vectors, to reserve before the model runs; see `size_beyond_expected`."""
    return _entries(EXPECTED_ENTRIES * num_inputs)


def size_beyond_expected(vectors: Sequence[SparseVector]) -> ResponseSize:
    """Returns the size of the entries of sparse vectors beyond the expected number."""
    return _entries(max(sum(vector.values.size for vector in vectors) - EXPECTED_ENTRIES * len(vectors), 0))


def _entries(number: int) -> ResponseSize:
    return ResponseSize(_ENTRY_BYTES * number, 8 * number)
