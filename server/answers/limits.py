"""How many tokens, and characters of them, a request for tokens or for their texts may have."""

from __future__ import annotations

from typing import Final

from penstock.engine.protocol.errors import InvalidRequestError

FEWER_IDS: Final = "Send fewer token ids at once."
MAX_DECODED_IDS: Final = 1_000_000  # In one request: seconds of a tokenizer thread, and a few megabytes of text.
MAX_ANSWERED_TOKENS: Final = 500_000  # In an answer with tokens: 70 bytes of JSON each, and twice that to hold.
MAX_TOKENIZED_CHARS: Final = 2_000_000  # In a request for tokens: one with its place is 60 bytes of JSON and more.


def check_num_chars(num_chars: int, param: str) -> None:
    """Raises InvalidRequestError if a request has more characters than are answered with their tokens at once."""
    if num_chars > MAX_TOKENIZED_CHARS:
        raise InvalidRequestError(
            f"{param} has {num_chars} characters; the limit is {MAX_TOKENIZED_CHARS}. Send less text at once.",
            param=param,
        )


def check_num_tokens(num_tokens: int, param: str) -> None:
    """Raises InvalidRequestError if a text has more tokens than are answered with at once."""
    if num_tokens > MAX_ANSWERED_TOKENS:
        raise InvalidRequestError(
            f"{param} has {num_tokens} tokens or more; an answer holds at most {MAX_ANSWERED_TOKENS}. "
            "Send less text at once.",
            param=param,
        )


def check_num_ids(num_ids: int, param: str) -> None:
    """Raises InvalidRequestError if a request has more tokens than are turned into text at once."""
    if num_ids > MAX_DECODED_IDS:
        raise InvalidRequestError(
            f"{param} has {num_ids} tokens; the limit is {MAX_DECODED_IDS}. Send fewer at once.", param=param
        )
