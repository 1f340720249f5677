"""Derives the prompts around texts and images from the chat template of a language model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from ...families.vision_language import (
    NUM_EXPANSIONS,
    VISION_LANGUAGE,
    ImageProcessor,
    PagePrompts,
    vision_part,
)
from ...model_files.image_processor import PROCESSOR_FILE
from ...model_files.model_folder import read_object
from ...protocol.errors import InvalidRequestError, UnsupportedModelError
from ...protocol.model_info import ModelInfo, PairChat
from ...protocol.templates import ChatOptions, ChatTemplate, InputPrompts, PromptTemplate, TileTokens, escaped
from ...tokenization.chat_renderer import ChatRenderer

# Characters of the private use area: templates do not contain them.
_INSTRUCTION: Final = "\ue0a1"
_CONTENT: Final = "\ue0a2"
_IMAGE_TOKENS: Final = {"boi_token_id": 255_999, "image_token_id": 258_880, "eoi_token_id": 258_882}
"""Keys and defaults of EmbeddingGemma2Config: before, in and after an image."""
_GENERATES: Final = "add_generation_prompt"


def input_prompts(
    info: ModelInfo, backend: Tokenizer, template: ChatTemplate | None, special_tokens: Mapping[str, str]
) -> InputPrompts | None:
    """Returns the prompts of a language model that reads images; None for other models.

    Args:
        info: The model.
        backend: Its tokenizer.
        template: Its chat template.
        special_tokens: Its named special tokens, such as bos_token.

    Raises:
        UnsupportedModelError: The tokenizer has no token for images, or the chat template does not render an
            instruction and an input.
    """
    if info.image_spec is None or (family := VISION_LANGUAGE.get(info.model_type)) is None:
        return None
    part = vision_part(info.config)
    image_text, placeholder = family.image_text, family.placeholder
    if not placeholder:
        image_text, placeholder = _tokens_of_config(info, backend)
    placeholder_id = backend.token_to_id(placeholder)
    expected = part.get("image_token_id", part.get("image_token_index", placeholder_id))
    if placeholder_id is None or expected != placeholder_id:
        raise UnsupportedModelError(
            f"The token {placeholder!r} of {info.name} has the id {placeholder_id} in tokenizer.json, but "
            f"image_token_id in config.json is {expected}."
        )
    if family.pages is not None:
        text, image = _page_prompts(info, family.pages, image_text, special_tokens)
    elif not family.has_chat:
        text = PromptTemplate(instructed="{instruction}")
        image = PromptTemplate()
    else:
        text = image = PromptTemplate() if info.input_chat is None else _chat_prompt(info, info.input_chat, template)
    return InputPrompts(
        text=text,
        image=image,
        image_text=image_text,
        placeholder=placeholder,
        placeholder_id=placeholder_id,
        tiles=_tile_tokens(info, backend) if family.processor is ImageProcessor.IDEFICS3 else None,
        mixes=family.pages is None,
        adds_special_tokens=family.pages is None or family.pages.adds_special_tokens,
    )


def _tokens_of_config(info: ModelInfo, backend: Tokenizer) -> tuple[str, str]:
    """Returns the text of an image, and its placeholder, by the ids in config.json (Gemma 4)."""
    tokens: list[str] = []
    for key, default in _IMAGE_TOKENS.items():
        number = info.config.get(key, default)
        token = backend.id_to_token(number) if type(number) is int and number >= 0 else None
        if token is None:
            raise UnsupportedModelError(f"{key} of {info.name} is {number!r}, which is no token of tokenizer.json.")
        tokens.append(token)
    return "".join(tokens), tokens[1]


def _page_prompts(
    info: ModelInfo, pages: PagePrompts, image_text: str, special_tokens: Mapping[str, str]
) -> tuple[PromptTemplate, PromptTemplate]:
    """Returns the prompts of a query and of a page, with the prefixes of processor_config.json."""
    settings = read_object(Path(info.path) / PROCESSOR_FILE)
    expansion = pages.expansion or special_tokens.get("pad_token")
    if expansion is None:
        raise UnsupportedModelError(f"The tokenizer of {info.name} has no pad_token, which is added to queries.")
    bos = special_tokens.get("bos_token", "")
    query = pages.query.format(bos=bos, prefix=settings.get("query_prefix") or pages.query_prefix)
    prefix = settings.get("visual_prompt_prefix") or pages.prefix
    before, found, after = pages.page.format(image=image_text, bos=bos, prefix=prefix).partition(image_text)
    if not found:
        raise UnsupportedModelError(
            f"visual_prompt_prefix of {info.name} is {prefix!r}; penstock supports a prompt with one {image_text}."
        )
    text = PromptTemplate(before=query, after=expansion * NUM_EXPANSIONS + pages.after_query)
    return text, PromptTemplate(before=before, after=after)


def _tile_tokens(info: ModelInfo, backend: Tokenizer) -> TileTokens:
    """Returns the tokens of tiles, as Idefics3's processor writes them."""
    assert info.image_spec is not None, "the model reads images"
    edge = -(-info.image_spec.size[0] // info.image_spec.patch_size)
    part = vision_part(info.config)
    vision = part.get("vision_config") or {}
    side = info.image_spec.patch_size // vision.get("patch_size", 16)
    num_rows = side**2 // part.get("pixel_shuffle_factor", 4) ** 2

    def ids(text: str) -> tuple[int, ...]:
        return tuple(backend.encode(text, add_special_tokens=False).ids)

    tags = tuple(tuple(ids(f"<row_{row + 1}_col_{column + 1}>") for column in range(edge)) for row in range(edge))
    return TileTokens(
        num_rows=num_rows,
        before=ids("<fake_token_around_image>"),
        full_image=ids("<global-img>"),
        tags=tags,
        row_end=ids("\n"),
        end=ids("\n\n"),
    )


def _chat_prompt(info: ModelInfo, chat: PairChat, template: ChatTemplate | None) -> PromptTemplate:
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
        plain = rendered({"user": _CONTENT})
        instructed = rendered({"system": _INSTRUCTION, "user": _CONTENT})
    except InvalidRequestError as error:
        raise _unsupported(info, str(error)) from error
    before, found, after = plain.partition(_CONTENT)
    before_instructed, found_instructed, after_instructed = instructed.partition(_CONTENT)
    if not found or not found_instructed or after != after_instructed or before_instructed.count(_INSTRUCTION) != 1:
        raise _unsupported(info, "it changes the texts")
    return PromptTemplate(
        before=before,
        instructed=_with_instruction(before_instructed),
        after=after,
    )


def _with_instruction(text: str) -> str:
    return escaped(text).replace(_INSTRUCTION, "{instruction}")


def _unsupported(info: ModelInfo, problem: str) -> UnsupportedModelError:
    message = f"The chat template of {info.name} does not render a system message and a message of the user"
    return UnsupportedModelError(f"{message}: {problem}. Replace it with --chat-template.")
