"""Derives the prompts around texts and images from the chat template of a language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tokenizers import Tokenizer

from ...families.vision_language import VISION_LANGUAGE
from ...protocol.errors import InvalidRequestError, UnsupportedModelError
from ...protocol.model_info import ModelInfo, PairChat
from ...protocol.templates import ChatOptions, ChatTemplate, Frame, InputFrames, escaped
from ...tokenization.chat_renderer import ChatRenderer

# Characters of the private use area: templates do not contain them.
_INSTRUCTION: Final = "\ue0a1"
_CONTENT: Final = "\ue0a2"
_GENERATES: Final = "add_generation_prompt"


def input_frames(info: ModelInfo, backend: Tokenizer, template: ChatTemplate | None) -> InputFrames | None:
    """Returns the prompts of a language model that reads images; None for other models.

    Args:
        info: The model.
        backend: Its tokenizer.
        template: Its chat template.

    Raises:
        UnsupportedModelError: The tokenizer has no token for images, or the chat template does not render an
            instruction and an input.
    """
    if info.image_spec is None or (family := VISION_LANGUAGE.get(info.model_type)) is None:
        return None
    placeholder_id = backend.token_to_id(family.placeholder)
    if placeholder_id is None or info.config.get("image_token_id", placeholder_id) != placeholder_id:
        raise UnsupportedModelError(
            f"The token {family.placeholder!r} of {info.name} has the id {placeholder_id} in tokenizer.json, but "
            f"image_token_id in config.json is {info.config.get('image_token_id')}."
        )
    frame = Frame() if info.input_chat is None else _chat_frame(info, info.input_chat, template)
    return InputFrames(
        text=frame,
        image=frame,
        image_text=family.image_text,
        placeholder=family.placeholder,
        placeholder_id=placeholder_id,
    )


def _chat_frame(info: ModelInfo, chat: PairChat, template: ChatTemplate | None) -> Frame:
    if template is None:
        raise UnsupportedModelError(
            f"{info.name} reads inputs as chats, but has no chat template. Add chat_template.jinja to {info.path}."
        )
    renderer = ChatRenderer(template)
    arguments = dict(chat.arguments)
    options = ChatOptions(add_generation_prompt=bool(arguments.pop(_GENERATES, False)), arguments=arguments)

    def rendered(messages: Mapping[str, str]) -> str:
        contents = {role: [{"type": "text", "text": t}] if chat.is_structured else t for role, t in messages.items()}
        return renderer.render([{"role": role, "content": content} for role, content in contents.items()], options)

    try:
        plain, instructed = rendered({"user": _CONTENT}), rendered({"system": _INSTRUCTION, "user": _CONTENT})
    except InvalidRequestError as error:
        raise _unsupported(info, str(error)) from error
    before, found, after = plain.partition(_CONTENT)
    before_instructed, found_instructed, after_instructed = instructed.partition(_CONTENT)
    if not found or not found_instructed or after != after_instructed or before_instructed.count(_INSTRUCTION) != 1:
        raise _unsupported(info, "it changes the texts")
    return Frame(
        before=before,
        instructed=_with_instruction(before_instructed),
        after=after,
    )


def _with_instruction(text: str) -> str:
    return escaped(text).replace(_INSTRUCTION, "{instruction}")


def _unsupported(info: ModelInfo, problem: str) -> UnsupportedModelError:
    message = f"The chat template of {info.name} does not render a system message and a message of the user"
    return UnsupportedModelError(f"{message}: {problem}. Replace it with --chat-template.")
