"""Where the chunks of a prompt begin and end. Plain Python."""

from __future__ import annotations

from ..protocol.errors import InvalidRequestError
from .chunked_prefill_types import Tokens


def chunk_prompt(tokens: Tokens, chunk_size: int) -> list[Tokens]:
    """Cuts tokens into chunks of `chunk_size`; the last may be shorter.

    Raises:
        InvalidRequestError: `chunk_size` is less than 1.
    """
    if chunk_size < 1:
        raise InvalidRequestError(f"chunk_size is {chunk_size}; it must be at least 1.", param="chunk_size")
    return [tokens[start:end] for start, end in boundaries(len(tokens), chunk_size)]


def boundaries(total_tokens: int, size: int) -> list[tuple[int, int]]:
    """Returns where each chunk of `size` tokens begins and ends (not included); the last may be shorter."""
    return [(start, min(start + size, total_tokens)) for start in range(0, total_tokens, size)]
