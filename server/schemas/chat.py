"""Inputs of a pooling request as in vLLM: texts, token ids, or chat messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.templates import ChatOptions

from ..errors import quote
from . import json_schema
from .images import INPUT_KEYS, OBJECT_KEYS, ImageChat, ImageSource, parse_image_part
from .inputs import Input, Inputs
from .json_schema import Parsed
from .options import Flag, RequestBody

Chat = list[dict[str, Any]]
Chats = list[Chat | ImageChat]


def parse_chats(value: Any) -> Chats:
    """Returns a list of chats. `messages` is the list of messages of one chat, or a list of such lists.

    A chat with images becomes an ImageChat.
    """
    if not isinstance(value, list):
        raise ValueError('must be a list of messages {"role": ..., "content": ...}')
    if not value:
        raise ValueError("is an empty list; give at least one message")
    if not isinstance(value[0], list):
        return [_chat(value, "", "")]
    for i, entry in enumerate(value):
        if not isinstance(entry, list) or not entry:
            raise ValueError(f"holds chats, so every entry must be a list of messages; entry {i} is {quote(entry)}")
    return [_chat(entry, f" of chat {i}", f"[{i}]") for i, entry in enumerate(value)]


def _chat(entries: list[Any], where: str, path: str) -> Chat | ImageChat:
    images: list[ImageSource] = []
    messages = [_message(entry, f"message {i}{where}", f"{path}[{i}]", images) for i, entry in enumerate(entries)]
    if not images:
        return messages
    return ImageChat(path, messages, tuple(images), is_single=len(images) == 1 and not any(map(_has_text, messages)))


def _has_text(message: dict[str, Any]) -> bool:
    content = message["content"]
    texts = [content or ""] if not isinstance(content, list) else [part.get("text", "") for part in content]
    return any(map(str.strip, texts))


def _message(entry: Any, name: str, path: str, images: list[ImageSource]) -> dict[str, Any]:
    """Returns a message with its texts and a part of type "image" for each image, which is added to `images`."""
    if not isinstance(entry, dict):
        raise ValueError(f"holds {quote(entry)}, but {name} must be an object with role and content")
    if not isinstance(entry.get("role"), str):
        raise ValueError(f"holds a message without a role; {name} must be an object with role and content")
    content = entry.get("content")
    if content is None or isinstance(content, str):
        return {**entry, "content": content}
    if not isinstance(content, list) or not content:
        raise ValueError(f"must hold a text or a list of parts as content; {name} does not")
    texts: list[dict[str, str]] = []
    for i, part in enumerate(content):
        image = parse_image_part(part, f"{path}.content[{i}]")
        if image is None:
            texts.append(_text_part(part, name))
        else:
            texts.append({"type": "image"})
            images.append(image)
    return {**entry, "content": texts}


def _text_part(part: Any, name: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise ValueError(f"may hold texts and images; {name} has a part of type {kind[:40]!r}")
    if kind is None or not isinstance(part.get("text"), str):
        raise ValueError(f'must hold parts {{"type": "text", "text": ...}}; {name} has another')
    return {"type": "text", "text": part["text"]}


Messages = Annotated[Chats, Parsed(parse_chats, json_schema.CHATS)]


class ChatFields(RequestBody):
    """Chat messages and options for the model's chat template."""

    messages: Messages | None = Field(
        None,
        description=(
            "The messages of one chat, or a list of chats. The model's chat template renders each chat to one text. No "
            "prompt of the model is put before it. Models with separate encoders of texts and of images (CLIP, SigLIP) "
            "accept a chat that holds one image and nothing else."
        ),
    )
    add_special_tokens: Flag | None = Field(
        None,
        description=(
            "Add the tokenizer's special tokens to every text. Absent: true for texts and false for messages, because "
            "chat templates contain special tokens."
        ),
    )
    add_generation_prompt: Flag | None = Field(None, description="Append the start of an assistant message.")
    continue_final_message: Flag | None = Field(None, description="Leave the last message open instead of ending it.")
    chat_template: str | None = Field(None, description="Rejected: only the model's own template is used.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Additional variables for the chat template.")

    def chat_options(self) -> ChatOptions:
        """Returns the options for the chat template.

        Raises:
            InvalidRequestError: The request contains a template.
        """
        if self.chat_template is not None:
            raise InvalidRequestError(
                "chat_template is not taken from requests. Leave it out: chats are rendered with the template in "
                "the model's folder (chat_template.jinja or tokenizer_config.json).",
                param="chat_template",
            )
        return ChatOptions(
            add_generation_prompt=bool(self.add_generation_prompt),
            continue_final_message=bool(self.continue_final_message),
            arguments=self.chat_template_kwargs or {},
        )


class InputFields(ChatFields):
    """The fields `input` and `messages`. A body has one of the two."""

    nested_keys: ClassVar[Mapping[str, Collection[str]]] = {"input": dict.fromkeys((*OBJECT_KEYS, *INPUT_KEYS))}

    input: Inputs | None = Field(
        None,
        description=(
            'A text, a list of texts, of {"text": ...} or of {"image": ...}, the token ids of one text, or a list of '
            "such lists. An entry may also be a content part or a list of content parts."
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def find_chats(cls, body: Any) -> Any:
        """Moves chats from `input` to `messages`, and marks the texts of Infinity's `modality: image` as images."""
        if isinstance(body, dict) and body.get("messages") is None and _holds_messages(body.get("input")):
            return {**body, "input": None, "messages": body["input"]}
        if isinstance(body, dict) and body.get("modality") == "image" and "modality" in cls.model_fields:
            return {**body, "input": _as_images(body.get("input"))}
        return body

    def field_names(self) -> Mapping[str, str]:
        """Names `messages` in errors about the input if the body has chats only."""
        return {"input": "messages"} if self.input is None and self.messages is not None else {}

    def texts(self) -> list[Input]:
        """Returns the inputs that are not chats."""
        return list(self.input or ())

    def num_inputs(self) -> int:
        """Returns the number of inputs, which is the number of rows of the response."""
        return len(self.texts() or self.messages or ())

    def check_input_fields(self) -> None:
        """Raises InvalidRequestError unless the body has exactly one of `input` and `messages`."""
        if self.input is not None and self.messages is not None:
            raise InvalidRequestError("Give one of input and messages; the body has both.", param="input")
        if self.input is None and self.messages is None:
            what = "null" if "input" in self.model_fields_set else "missing"
            raise InvalidRequestError(
                f"input is {what}; give texts or token ids as input, or a chat as messages.", param="input"
            )


def _as_images(value: Any) -> Any:
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list):
        return value
    return [{"image": entry} if isinstance(entry, str) else entry for entry in entries]


def _holds_messages(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, list) and first:
        first = first[0]
    return isinstance(first, dict) and "role" in first
