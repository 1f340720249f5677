"""What a request with `input` or `messages` gives the engine to run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from penstock.engine.async_engine import AsyncEngine, RequestOptions

from ..errors.field_names import fields_named
from ..schemas.chat import ChatFields, InputFields
from ..schemas.fields.texts import Text
from .context import ServerContext

T = TypeVar("T")

Run = Callable[[list[Text], RequestOptions], Awaitable[T]]


def check_inputs(context: ServerContext, body: InputFields) -> None:
    """Raises InvalidRequestError if a request holds nothing to run, or too much."""
    body.check_given()
    context.check_count(body.input or (), "input")
    check_messages(context, body)


def check_messages(context: ServerContext, body: ChatFields) -> None:
    """Raises InvalidRequestError if a request holds more chats, or a chat more messages, than the server takes."""
    for conversation in body.messages or ():
        context.check_count(conversation, "messages")
    context.check_count(body.messages or (), "messages")


async def run_inputs(engine: AsyncEngine, body: InputFields, options: RequestOptions, run: Run[T]) -> T:
    """Renders the chats of a request, where it has some, and runs what it holds.

    Args:
        engine: Knows the chat template.
        body: Checked by `check_inputs`.
        options: Of the request. Chats go without a prompt of the model.
        run: The engine call.
    """
    if body.messages is None:
        if body.add_special_tokens is False:
            options = replace(options, add_special_tokens=False)
        return await run(body.texts(), options)
    texts: list[Text] = [*await engine.render_chats(body.messages, body.chat_options())]
    options = replace(options, prompt="", add_special_tokens=bool(body.add_special_tokens))
    with fields_named("messages"):
        return await run(texts, options)
