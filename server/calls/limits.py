"""Limits on the number of inputs, characters and tokens of a request.

Routes check the body before ModelCall.start, so that an invalid body loads no model.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Final

from fastapi import Request

from penstock.engine.protocol.errors import InvalidRequestError

from ..schemas.chat import ChatFields, InputFields
from .context import context_of

MAX_DECODED_IDS: Final = 1_000_000  # Per request: takes seconds in a tokenizer thread; a few megabytes of text.
MAX_RESPONSE_TOKENS: Final = 500_000  # Per response: each token takes 70 bytes of JSON and 200 bytes of memory.
MAX_TOKENIZED_CHARS: Final = 2_000_000  # Per tokenization request: each token takes at least 60 bytes of JSON.


def check_num_inputs(request: Request, inputs: Sized, param: str) -> None:
    """Raises InvalidRequestError if a request has more than `max_inputs_per_request` inputs."""
    limit = context_of(request).settings.max_inputs_per_request
    if len(inputs) > limit:
        raise InvalidRequestError(f"{param} has {len(inputs)} entries; the limit is {limit}.", param=param)


def check_input_limits(request: Request, body: InputFields) -> None:
    """Raises InvalidRequestError if a request has no inputs or too many."""
    body.check_input_fields()
    check_num_inputs(request, body.input or (), "input")
    if body.messages is not None:
        check_messages(request, body)


def check_messages(request: Request, body: ChatFields) -> None:
    """Raises InvalidRequestError if a request has too many chats, or a chat too many messages."""
    for chat in body.messages or ():
        if isinstance(chat, list):
            check_num_inputs(request, chat, "messages")
    check_num_inputs(request, body.messages or (), "messages")


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


def check_num_named_tokens(num_ids: int, param: str) -> None:
    """Raises InvalidRequestError if the texts of too many tokens are requested."""
    if num_ids > MAX_DECODED_IDS:
        raise InvalidRequestError(
            f"{param} has {num_ids} tokens; the limit is {MAX_DECODED_IDS}. Send fewer at once.", param=param
        )
