"""Prompts in a model's files: around a query and a document, and around the messages of a chat.

Plain text, no tokenizer; chats are rendered by chat_renderer.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Final

_FIELDS: Final = ("instruction", "query", "document")
_KEYS: Final = ("parts", "instruction", "instruction_format")
Message = Mapping[str, Any]
Conversation = Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTemplate:
    """The prompt of a reranker for a query and a document.

    The parts are tokenized one by one, without additional special tokens, and joined. A pair that is too long loses
    tokens of the document, and of a query that exceeds its share; see ScoreTemplateEncoder.truncate.

    Attributes:
        parts: Format strings. Together they contain {query} and {document} once, {instruction} at most once.
        instruction: Value of {instruction} if the request has none.
        instruction_format: Format of the instruction of a request; a format string with {instruction}.
        stripped: Fields to strip of surrounding white space.
    """

    parts: tuple[str, ...]
    instruction: str = ""
    instruction_format: str = "{instruction}"
    stripped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [name for part in self.parts for name in fields_of(part)]
        for name in _FIELDS:
            if names.count(name) > 1 or (name != "instruction" and name not in names):
                raise ValueError(f"parts hold {{{name}}} {names.count(name)} times; they must hold it once.")
        if fields_of(self.instruction_format) != ("instruction",):
            raise ValueError(f"instruction_format is {self.instruction_format!r}; it must hold {{instruction}} once.")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ScoreTemplate:
        """Builds a template from a dictionary with `parts` (a list of texts), `instruction` and `instruction_format`.

        Raises:
            ValueError: An unknown key, a value of the wrong type, or a wrong template.
        """
        unknown = sorted(set(values) - set(_KEYS))
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r}; known keys are {', '.join(_KEYS)}.")
        parts = values.get("parts")
        if not isinstance(parts, list | tuple) or not parts or not all(isinstance(part, str) for part in parts):
            raise ValueError(f"parts is {parts!r}; it must be a list of texts.")
        for key in _KEYS[1:]:
            if not isinstance(values.get(key, ""), str):
                raise ValueError(f"{key} is {values[key]!r}; it must be a text.")
        return cls(**{**values, "parts": tuple(parts)})

    @property
    def takes_instruction(self) -> bool:
        """Whether the template has the field {instruction}."""
        return any("instruction" in fields_of(part) for part in self.parts)

    def instructed(self, instruction: str | None) -> str:
        """Returns the value of {instruction}. If the request has none, it is the template's own."""
        if not instruction:
            return self.instruction
        return self.instruction_format.format(instruction=self.cleaned("instruction", instruction))

    def cleaned(self, field: str, text: str) -> str:
        """Returns the text for `field`, stripped if the field is in `stripped`."""
        return text.strip() if field in self.stripped else text

    def filled(self, part: str, query: str, document: str, instruction: str | None) -> str:
        """Returns a part with its fields filled in."""
        return part.format(
            instruction=self.instructed(instruction),
            query=self.cleaned("query", query),
            document=self.cleaned("document", document),
        )


def fields_of(part: str) -> tuple[str, ...]:
    """Returns the names of the fields in a format string.

    Raises:
        ValueError: The format string is invalid, or has a field other than {instruction}, {query} and {document}.
    """
    known = f"known are {', '.join(f'{{{field}}}' for field in _FIELDS)}. Write {{{{ and }}}} for braces of the text."
    try:
        pieces = list(Formatter().parse(part))
    except ValueError as error:
        raise ValueError(f"{part!r} has a brace that begins or ends no field ({error}); {known}") from error
    names = []
    for _, name, spec, conversion in pieces:
        if name is None:
            continue
        if name not in _FIELDS or spec or conversion:
            raise ValueError(f"{part!r} holds the field {{{name}}}; {known}")
        names.append(name)
    return tuple(names)


def split_at(part: str, field: str) -> tuple[str, str]:
    """Returns the format strings before and after a field that occurs once in the part."""
    before, after = "", ""
    is_past = False
    for literal, name, _, _ in Formatter().parse(part):
        shown = escaped(literal) + ("" if name in (None, field) else f"{{{name}}}")
        before, after = (before, after + shown) if is_past else (before + shown, after)
        is_past = is_past or name == field
    return before, after


def escaped(text: str) -> str:
    """Returns a text as a format string without fields."""
    return text.replace("{", "{{").replace("}", "}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTemplate:
    """The text around an input.

    Attributes:
        before: Text before the input, without an instruction.
        instructed: Format string of the text before the input with {instruction}; None: there are no instructions.
        after: Text after the input.
    """

    before: str = ""
    instructed: str | None = None
    after: str = ""

    def beginning(self, instruction: str) -> str:
        """Returns the text before an input. `instruction`: empty for none."""
        if not instruction or self.instructed is None:
            return self.before
        return self.instructed.format(instruction=instruction)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPrompts:
    """The prompts of a language model that reads texts and images.

    Attributes:
        text: Prompt of an input without images.
        image: Prompt of an input with images.
        image_text: Text of one image.
        placeholder: The token in `image_text` that the tokens of the image replace.
        placeholder_id: Its id. An image is this token once for each of its rows, unless there are tiles.
        tiles: Tokens between the tiles of an image; None: images have no tiles.
        mixes: An input may have a text beside an image.
        adds_special_tokens: The tokenizer's special tokens are added around prompts.
    """

    text: PromptTemplate
    image: PromptTemplate
    image_text: str
    placeholder: str
    placeholder_id: int
    tiles: TileTokens | None = None
    mixes: bool = True
    adds_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTokens:
    """The tokens of an image in tiles (Idefics3).

    Attributes:
        num_rows: Rows of a tile in the model.
        before: Tokens before a tile and after the last one.
        full_image: Tokens before the rows of the whole image, after `before`.
        tags: Tokens before the rows of a tile, by its row and column.
        row_end: Tokens after a row of tiles.
        end: Tokens after the last row of tiles.
    """

    num_rows: int
    before: tuple[int, ...]
    full_image: tuple[int, ...]
    tags: tuple[tuple[tuple[int, ...], ...], ...]
    row_end: tuple[int, ...]
    end: tuple[int, ...]

    def image_ids(self, grid: tuple[int, int], placeholder_id: int) -> list[int]:
        """Returns the tokens of an image with rows and columns of tiles; (0, 0) for one tile."""
        rows = [placeholder_id] * self.num_rows
        ids: list[int] = []
        for row in range(grid[0]):
            for column in range(grid[1]):
                ids += [*self.before, *self.tags[row][column], *rows]
            ids += self.row_end if row + 1 < grid[0] else self.end
        return [*ids, *self.before, *self.full_image, *rows, *self.before]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """The template that renders the messages of a chat as the text that the model reads.

    Attributes:
        source: The template, in Jinja.
        special_tokens: Special tokens that the template may use, such as bos_token.
    """

    source: str
    special_tokens: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options for rendering a chat.

    Attributes:
        add_generation_prompt: End with the beginning of an assistant message.
        continue_final_message: End inside the last message, without its end marker.
        arguments: Further values that the template may read.
    """

    add_generation_prompt: bool = False
    continue_final_message: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)


def chat_template_of(tokenizer: Any) -> ChatTemplate | None:
    """Returns the chat template of a transformers tokenizer, or None. Of several templates, "default" is used."""
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
