"""Estimates the size of a response before the engine computes it, and limits the tokens of tokenization requests.

A size has two parts: the bytes of JSON, and the memory of the values until they are serialised.
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
_NUMBER_BYTES: Final = 12
"""Bytes of a number in JSON."""
_SCORE_BYTES: Final = 45
"""Bytes of a JSON object with one score, without the class name."""
_ENTRY_BYTES: Final = 36
"""Bytes of an entry of a sparse vector in JSON."""
_TOKEN_BYTES: Final = 70
"""Bytes of a token with its text and offsets in JSON."""
_TOKEN_MEMORY: Final = 200
"""Bytes of a token with its text and offsets as Python objects."""


def size_of_numbers(num_values: int, *, num_encodings: int = 1) -> ResponseSize:
    """Returns the size of float32 arrays that are written in one or several formats."""
    return ResponseSize(num_encodings * _NUMBER_BYTES * num_values, 4 * num_values)


def size_of_tokens(num_tokens: int) -> ResponseSize:
    """Returns the size of tokens with their texts."""
    return ResponseSize(_TOKEN_BYTES * num_tokens, _TOKEN_MEMORY * num_tokens)


def size_of_token_rows(num_rows: int, width: int, *, names_tokens: bool = False) -> ResponseSize:
    """Returns the size of one row per token, with the token's text and class if `names_tokens` is true."""
    rows = size_of_numbers(num_rows * width)
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


FEWER_IDS: Final = "Send fewer token ids at once."
MAX_DECODED_IDS: Final = 1_000_000  # Per request: takes seconds in a tokenizer thread; a few megabytes of text.
MAX_RESPONSE_TOKENS: Final = 500_000  # Per response: each token takes 70 bytes of JSON and 200 bytes of memory.
MAX_TOKENIZED_CHARS: Final = 2_000_000  # Per tokenization request: each token takes at least 60 bytes of JSON.


def check_num_chars(num_chars: int, param: str) -> None:
    """Raises InvalidRequestError if a tokenization request has too many characters."""
    if num_chars > MAX_TOKENIZED_CHARS:
        raise InvalidRequestError(
            f"{param} has {num_chars} characters; the limit is {MAX_TOKENIZED_CHARS}. Send less text at once.",
            param=param,
        )


def check_num_tokens(num_tokens: int, param: str) -> None:
    """Raises InvalidRequestError if a response would have too many tokens."""
    if num_tokens > MAX_RESPONSE_TOKENS:
        raise InvalidRequestError(
            f"{param} has {num_tokens} tokens or more; a response has at most {MAX_RESPONSE_TOKENS}. "
            "Send less text at once.",
            param=param,
        )


def check_num_ids(num_ids: int, param: str) -> None:
    """Raises InvalidRequestError if a request has too many tokens to decode."""
    if num_ids > MAX_DECODED_IDS:
        raise InvalidRequestError(
            f"{param} has {num_ids} tokens; the limit is {MAX_DECODED_IDS}. Send fewer at once.", param=param
        )
