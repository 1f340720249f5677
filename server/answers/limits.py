"""How large an answer with something for every token may grow."""

from __future__ import annotations

from typing import Final

from penstock.engine.protocol.errors import InvalidRequestError

from ..wire.json_pieces import LARGE_VALUES

MAX_TOKEN_VALUES: Final = 20_000_000  # Numbers in an answer with rows for every token: about 250 MB of JSON.

MAX_DECODED_IDS: Final = 1_000_000  # In one request: seconds of a tokenizer thread, and a few megabytes of text.
MAX_ANSWERED_TOKENS: Final = 500_000  # In an answer with tokens: 70 bytes of JSON each, and twice that to hold.
BYTES_PER_NUMBER: Final = 4  # That an answer holds where it is written piece by piece as it goes out.
BYTES_PER_WRITTEN_NUMBER: Final = 12  # In JSON, as smaller answers hold them.
BYTES_PER_TOKEN: Final = 200  # The same for a token with its text and its place.
VALUES_PER_TOKEN: Final = 6  # Numbers that take as long to write as a token with its text and its place.
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


def held_bytes(num_values: int) -> int:
    """Returns the bytes that an answer of so many numbers holds until its client has read it."""
    return num_values * (BYTES_PER_WRITTEN_NUMBER if num_values < LARGE_VALUES else BYTES_PER_NUMBER)


def check_num_ids(num_ids: int, param: str) -> None:
    """Raises InvalidRequestError if a request has more tokens than are turned into text at once."""
    if num_ids > MAX_DECODED_IDS:
        raise InvalidRequestError(
            f"{param} has {num_ids} tokens; the limit is {MAX_DECODED_IDS}. Send fewer at once.", param=param
        )


def check_token_values(num_rows: int, width: int, param: str) -> None:
    """Raises InvalidRequestError if an answer with rows for every token would be too large.

    Args:
        num_rows: Tokens of all inputs that have a row.
        width: Numbers of a row.
        param: The request field that holds the inputs.
    """
    num_values = num_rows * width
    if num_values > MAX_TOKEN_VALUES:
        raise InvalidRequestError(
            f"The answer would hold {num_values} numbers for {num_rows} tokens; the limit is {MAX_TOKEN_VALUES}. "
            "Send fewer inputs at once.",
            param=param,
        )
