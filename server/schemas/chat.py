"""Inputs of a pooling request as vLLM takes them: texts, token ids, or the messages of chats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.templates import ChatOptions

from ..errors import shown
from . import json_schema
from .inputs import Inputs, Text
from .options import Flag, RequestBody

Conversations = list[list[dict[str, Any]]]


def parse_conversations(value: Any) -> Conversations:
    """Returns a list of chats for `messages`, which is the messages of one chat, or a list of such lists."""
    if not isinstance(value, list):
        raise ValueError('must be a list of messages {"role": ..., "content": ...}')
    if not value:
        raise ValueError("is an empty list; give at least one message")
    if not isinstance(value[0], list):
        return [_messages(value, "")]
    for i, entry in enumerate(value):
        if not isinstance(entry, list) or not entry:
            raise ValueError(f"holds chats, so every entry must be a list of messages; entry {i} is {shown(entry)}")
    return [_messages(entry, f" of chat {i}") for i, entry in enumerate(value)]


def _messages(entries: list[Any], where: str) -> list[dict[str, Any]]:
    return [_message(entry, f"message {i}{where}") for i, entry in enumerate(entries)]


def _message(entry: Any, name: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError(f"holds {shown(entry)}, but {name} must be an object with role and content")
    if not isinstance(entry.get("role"), str):
        raise ValueError(f"holds a message without a role; {name} must be an object with role and content")
    content = entry.get("content")
    if content is None or isinstance(content, str):
        return {**entry, "content": content}
    if not isinstance(content, list) or not content:
        raise ValueError(f"must hold a text or a list of parts as content; {name} does not")
    return {**entry, "content": [_part(part, name) for part in content]}


def _part(part: Any, name: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise ValueError(f"may hold text only; {name} has a part of type {kind[:40]!r}")
    if kind is None or not isinstance(part.get("text"), str):
        raise ValueError(f'must hold parts {{"type": "text", "text": ...}}; {name} has another')
    return {"type": "text", "text": part["text"]}


Messages = Annotated[Conversations, PlainValidator(parse_conversations), WithJsonSchema(json_schema.CHATS)]


class ChatFields(RequestBody):
    """Messages, and how the model's chat template is to render them."""

    messages: Messages | None = Field(
        None,
        description=(
            "The messages of a chat, rendered by the model's chat template into one text; or a list of chats. No "
            "prompt of the model is put before it."
        ),
    )
    add_special_tokens: Flag | None = Field(
        None,
        description=(
            "Put the tokenizer's special tokens around every text. Absent: for texts yes, for messages no, because "
            "chat templates spell their own."
        ),
    )
    add_generation_prompt: Flag | None = Field(None, description="End the chat with the head of an answer.")
    continue_final_message: Flag | None = Field(None, description="End the chat within its last message.")
    chat_template: str | None = Field(None, description="Refused: chats are rendered by the model's own template.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further values for the chat template.")

    def chat_options(self) -> ChatOptions:
        """Returns how the messages are to be rendered.

        Raises:
            InvalidRequestError: The request brings a template.
        """
        if self.chat_template is not None:
            raise InvalidRequestError(
                "chat_template is not taken from requests: leave it out, and chats are rendered by the template in "
                "the model's folder (chat_template.jinja or tokenizer_config.json).",
                param="chat_template",
            )
        return ChatOptions(
            add_generation_prompt=bool(self.add_generation_prompt),
            continue_final_message=bool(self.continue_final_message),
            arguments=self.chat_template_kwargs or {},
        )


class InputFields(ChatFields):
    """`input` or `messages`, one of them."""

    input: Inputs | None = Field(
        None,
        description='A text, a list of texts or of {"text": ...}, the token ids of one text, or a list of such lists.',
    )

    @model_validator(mode="before")
    @classmethod
    def find_chats(cls, body: Any) -> Any:
        """Moves chats that came as `input` to `messages`."""
        if isinstance(body, dict) and body.get("messages") is None and _holds_messages(body.get("input")):
            return {**body, "input": None, "messages": body["input"]}
        return body

    def field_names(self) -> Mapping[str, str]:
        """See JsonBody."""
        return {"input": "messages"} if self.input is None and self.messages is not None else {}

    def texts(self) -> list[Text]:
        """Returns the inputs that are not chats."""
        return list(self.input or ())

    def num_inputs(self) -> int:
        """Returns how many rows the answer will have."""
        return len(self.texts() or self.messages or ())

    def check_given(self) -> None:
        """Raises InvalidRequestError unless exactly one of `input` and `messages` is there."""
        if self.input is not None and self.messages is not None:
            raise InvalidRequestError("Give one of input and messages; the body has both.", param="input")
        if self.input is None and self.messages is None:
            what = "null" if "input" in self.model_fields_set else "missing"
            raise InvalidRequestError(
                f"input is {what}; give texts or token ids as input, or a chat as messages.", param="input"
            )


def _holds_messages(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, list) and first:
        first = first[0]
    return isinstance(first, dict) and "role" in first
