"""How large an answer with something for every token may grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.engine.protocol.errors import InvalidRequestError

MAX_TOKEN_VALUES: Final = 20_000_000  # Numbers in an answer with rows for every token: about 250 MB of JSON.

MAX_DECODED_IDS: Final = 1_000_000  # In one request: seconds of a tokenizer thread, and a few megabytes of text.
MAX_TOKENIZED_CHARS: Final = 2_000_000  # In a request for tokens: one with its place is 60 bytes of JSON and more.


def check_num_chars(num_chars: int, param: str) -> None:
    """Raises InvalidRequestError if a request has more characters than are answered with their tokens at once."""
    if num_chars > MAX_TOKENIZED_CHARS:
        raise InvalidRequestError(
            f"{param} has {num_chars} characters; the limit is {MAX_TOKENIZED_CHARS}. Send less text at once.",
            param=param,
        )


def check_num_ids(num_ids: int, param: str) -> None:
    """Raises InvalidRequestError if a request has more tokens than are turned into text at once."""
    if num_ids > MAX_DECODED_IDS:
        raise InvalidRequestError(
            f"{param} has {num_ids} tokens; the limit is {MAX_DECODED_IDS}. Send fewer at once.", param=param
        )


def check_token_values(rows: Sequence[NDArray[np.float32]], num_tokens: int, param: str) -> None:
    """Raises InvalidRequestError if an answer with rows for every token would be too large.

    Args:
        rows: [L_i, D] each.
        num_tokens: Tokens of all inputs.
        param: The request field that holds the inputs.
    """
    num_values = sum(row.size for row in rows)
    if num_values > MAX_TOKEN_VALUES:
        raise InvalidRequestError(
            f"The answer would hold {num_values} numbers for {num_tokens} tokens; the limit is {MAX_TOKEN_VALUES}. "
            "Send fewer inputs at once.",
            param=param,
        )
