"""Estimates the size of a response before the engine computes it, and limits the tokens of tokenization requests.

A size has two parts: the bytes of the JSON, and the memory of the values until they are written.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.multi_vector import SparseVector

from ..admission import ResponseSize

EXPECTED_ENTRIES: Final = 512
"""Entries of a sparse vector for which memory is reserved before the model runs. Trained models give 100 to 200."""
_NUMBER: Final = 12
"""Bytes of a number in JSON."""
_NAMED_SCORE: Final = 45
"""Bytes of a score in an object of its own, without the name of its class."""
_ENTRY: Final = 36
"""Bytes of an entry of a sparse vector in JSON."""
_TOKEN: Final = 70
"""Bytes of a token with its text and its place in JSON."""
_HELD_TOKEN: Final = 200
"""Bytes of the same in Python."""


def size_of_numbers(num_values: int, *, num_forms: int = 1) -> ResponseSize:
    """Returns the size of arrays of float32, which are written in one form or in several."""
    return ResponseSize(num_forms * _NUMBER * num_values, 4 * num_values)


def size_of_tokens(num_tokens: int) -> ResponseSize:
    """Returns the size of tokens with their texts."""
    return ResponseSize(_TOKEN * num_tokens, _HELD_TOKEN * num_tokens)


def size_of_token_rows(num_rows: int, width: int, *, names_tokens: bool = False) -> ResponseSize:
    """Returns the size of rows for tokens, each with the text and the class of its token or without them."""
    rows = size_of_numbers(num_rows * width)
    return rows.plus(size_of_tokens(num_rows)) if names_tokens else rows


def size_of_classes(num_inputs: int, labels: Sequence[str], *, are_named: bool) -> ResponseSize:
    """Returns the size of the scores of all classes for each input; each score has its name, or the best one only."""
    num_scores = num_inputs * len(labels)
    kept = 4 * num_scores
    if not are_named:
        return ResponseSize(_NUMBER * num_scores + num_inputs * max(map(len, labels), default=0), kept)
    return ResponseSize(_NAMED_SCORE * num_scores + num_inputs * sum(map(len, labels)), kept)


def size_of_scores(num_scores: int) -> ResponseSize:
    """Returns the size of scores in objects of their own: of pairs, or of documents without their texts."""
    return ResponseSize(_NAMED_SCORE * num_scores, 4 * num_scores)


def size_of_texts(
    texts: Iterable[str | Mapping[str, Any]], most: int | None = None, *, num_forms: int = 1
) -> ResponseSize:
    """Returns the size of the texts in a response, which stay in memory until it is read.

    Args:
        texts: Texts, or documents that are objects.
        most: How many of them it holds; None: all.
        num_forms: How often they are written.
    """
    sizes = [text.__sizeof__() if isinstance(text, str) else len(orjson.dumps(text)) for text in texts]
    num_bytes = sum(heapq.nlargest(most, sizes) if most is not None and most < len(sizes) else sizes)
    return ResponseSize(num_forms * num_bytes, num_bytes)


def size_of_sparse(num_inputs: int) -> ResponseSize:
    """Returns the size of sparse vectors to reserve before it is known; see `size_beyond_expected`."""
    return _entries(EXPECTED_ENTRIES * num_inputs)


def size_beyond_expected(vectors: Sequence[SparseVector]) -> ResponseSize:
    """Returns the size of the entries of sparse vectors beyond the expected number."""
    return _entries(max(sum(vector.values.size for vector in vectors) - EXPECTED_ENTRIES * len(vectors), 0))


def _entries(number: int) -> ResponseSize:
    return ResponseSize(_ENTRY * number, 8 * number)


FEWER_IDS: Final = "Send fewer token ids at once."
MAX_DECODED_IDS: Final = 1_000_000  # In one request: seconds of a tokenizer thread, and a few megabytes of text.
MAX_ANSWERED_TOKENS: Final = 500_000  # In a response with tokens: 70 bytes of JSON and 200 of memory each.
MAX_TOKENIZED_CHARS: Final = 2_000_000  # In a request for tokens: one with its place is 60 bytes of JSON and more.


def check_num_chars(num_chars: int, param: str) -> None:
    """Raises InvalidRequestError if a request for tokens has too many characters."""
    if num_chars > MAX_TOKENIZED_CHARS:
        raise InvalidRequestError(
            f"{param} has {num_chars} characters; the limit is {MAX_TOKENIZED_CHARS}. Send less text at once.",
            param=param,
        )


def check_num_tokens(num_tokens: int, param: str) -> None:
    """Raises InvalidRequestError if a response would hold too many tokens."""
    if num_tokens > MAX_ANSWERED_TOKENS:
        raise InvalidRequestError(
            f"{param} has {num_tokens} tokens or more; an answer holds at most {MAX_ANSWERED_TOKENS}. "
            "Send less text at once.",
            param=param,
        )


def check_num_ids(num_ids: int, param: str) -> None:
    """Raises InvalidRequestError if a request has too many tokens to decode."""
    if num_ids > MAX_DECODED_IDS:
        raise InvalidRequestError(
            f"{param} has {num_ids} tokens; the limit is {MAX_DECODED_IDS}. Send fewer at once.", param=param
        )
