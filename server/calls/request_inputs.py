"""Prepares the inputs of a request for the engine: checks their number, renders chats, and truncates texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from fastapi import Request

from penstock.engine import RequestOptions

from ..schemas.chat import ChatFields, InputFields
from ..schemas.inputs import Text
from .call import Call, check_count

_MAX_CHARS_PER_TOKEN: Final = 64
_MIN_CHARS: Final = 65_536
"""Minimum number of characters to tokenize of a text before truncation: it may start with many blanks."""
_TEXTS_PER_CALL: Final = 32


def check_inputs(request: Request, body: InputFields) -> None:
    """Raises InvalidRequestError if a request has no inputs or too many."""
    body.check_given()
    check_count(request, body.input or (), "input")
    if body.messages is not None:
        check_messages(request, body)


def check_messages(request: Request, body: ChatFields) -> None:
    """Raises InvalidRequestError if a request has too many chats, or a chat too many messages."""
    for conversation in body.messages or ():
        check_count(request, conversation, "messages")
    check_count(request, body.messages or (), "messages")


async def engine_inputs(call: Call, body: InputFields, options: RequestOptions) -> tuple[list[Text], RequestOptions]:
    """Returns the texts or rendered chats of a request, and the engine options.

    Chats get no prompt of the model. Raises the errors of AsyncEngine.render_chats.
    """
    if body.messages is None:
        if body.add_special_tokens is False:
            options = replace(options, add_special_tokens=False)
        return body.texts(), options
    texts: list[Text] = [*await call.engine.render_chats(body.messages, body.chat_options())]
    return texts, replace(options, prompt="", add_special_tokens=bool(body.add_special_tokens))


async def truncate_texts(call: Call, texts: Sequence[str], max_num_tokens: int | None) -> list[str]:
    """Truncates each text to `max_num_tokens` tokens, and counts the truncated texts.

    Args:
        call: Its engine tokenizes.
        texts: Texts.
        max_num_tokens: Limit without special tokens. None or 0: no truncation. Characters far beyond the limit are not
            tokenized.
    """
    if not max_num_tokens or max_num_tokens >= call.info.max_model_len:
        return list(texts)
    max_chars = max(_MAX_CHARS_PER_TOKEN * max_num_tokens, _MIN_CHARS)
    read = [text[:max_chars] for text in texts]
    token_ids: list[list[int]] = []
    # The ids of all texts at once would take ten times the memory of the texts.
    for start in range(0, len(read), _TEXTS_PER_CALL):
        some = await call.engine.tokenize(read[start : start + _TEXTS_PER_CALL], add_special_tokens=False)
        token_ids += [ids[: max_num_tokens + 1] for ids in some]
    too_long = [i for i, ids in enumerate(token_ids) if len(ids) > max_num_tokens]
    cut = await call.engine.detokenize([token_ids[i][:max_num_tokens] for i in too_long])
    replaced = dict(zip(too_long, cut, strict=True))
    call.truncated.add(sum(i in replaced or len(read[i]) < len(text) for i, text in enumerate(texts)))
    return [replaced.get(i, text) for i, text in enumerate(read)]
