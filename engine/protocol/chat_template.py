"""What a model's chat template is, and what a request may ask of it. Rendering is the job of chat_renderer.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
Conversation = Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """The template that turns the messages of a chat into the text that the model reads.

    Attributes:
        source: The template, in Jinja.
        special_tokens: What it may call by name, such as bos_token.
    """

    source: str
    special_tokens: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a chat is rendered.

    Attributes:
        add_generation_prompt: End with the head of an answer.
        continue_final_message: End within the last message, as if it were still being written.
        arguments: Further values that the template may read.
    """

    add_generation_prompt: bool = False
    continue_final_message: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)


def chat_template_of(tokenizer: Any) -> ChatTemplate | None:
    """Returns the chat template of a transformers tokenizer; None where it has none.

    Of several templates it is the one named "default".
    """
    source = getattr(tokenizer, "chat_template", None)
    if isinstance(source, Mapping):
        source = source.get("default")
    if not isinstance(source, str) or not source:
        return None
    return ChatTemplate(source=source, special_tokens=_plain(tokenizer.special_tokens_map))


def _plain(value: Any) -> Any:
    """Returns special tokens as texts."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else str(value)
