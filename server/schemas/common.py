"""Pieces that request and response schemas of all dialects share.

Clients send null for an option that they leave out, and options that only other servers know: null means absent
everywhere, and unknown keys are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    WithJsonSchema,
)

from penstock.engine.params import PoolingParams

from ..request_limits import MAX_PRIORITY
from . import json_schema

Text = str | list[int]
MAX_ENTRIES: Final = 1_000_000
"""Texts or lists of ids in a body, whatever `--max-inputs-per-request` says."""
Entry = TypeVar("Entry")
Listed = Annotated[list[Entry], Field(fail_fast=True)]
"""A list whose check ends at the first wrong entry: pydantic would make an error of each, gigabytes of a large body."""
UNNAMED_MODEL: Final = "default/not-specified"
"""What Infinity's client sends where its caller named no model."""


def parse_inputs(value: Any) -> list[Text]:
    """Returns one entry per input for the four forms of OpenAI's `input`: str, [str], [int] and [[int]].

    A flat list of ids is one input. Texts, Jina's objects `{"text": ...}` and lists of ids may be mixed in one list.

    Raises:
        ValueError: Anything else; the message names the entry.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"must be a text, a list of texts or token ids, not {_kind(value)}")
    if not value:
        raise ValueError("is an empty list; give at least one text")
    kinds = set(map(type, value))
    if kinds == {str}:
        return value
    if float in kinds:
        value = whole_numbers(value)
        kinds = set(map(type, value))
    if kinds == {int}:
        return [_checked_ids(value)]
    if dict in kinds or list in kinds:
        check_length(value)
        value = [whole_numbers(entry) if type(entry) is list else parse_text(entry) for entry in value]
    inputs: list[Text] = value
    for i, entry in enumerate(value):
        is_ids = type(entry) is list and entry and set(map(type, entry)) == {int}
        if type(entry) is not str and not is_ids:
            raise ValueError(
                f'must hold texts, objects {{"text": ...}} or lists of token ids; entry {i} is {_kind(entry)}'
            )
        if is_ids:
            _checked_ids(entry)
    return inputs


def check_length(values: list[Any]) -> None:
    """Raises ValueError for a list that takes seconds to be looked at, during which nobody else is served."""
    if len(values) > MAX_ENTRIES:
        raise ValueError(f"has {len(values)} entries; no request may have more than {MAX_ENTRIES}")


def _checked_ids(ids: list[int]) -> list[int]:
    if min(ids) < 0 or max(ids) > json_schema.MAX_INTEGER:
        raise ValueError(f"holds {min(ids) if min(ids) < 0 else max(ids)}, which is no token id; they begin at 0")
    return ids


def whole_numbers(values: list[Any]) -> list[Any]:
    """Returns a list with the integers that are written as 5.0, which JSON does not tell from 5."""
    if float not in set(map(type, values)):
        return values
    return [int(value) if type(value) is float and value.is_integer() else value for value in values]


def parse_text(value: Any) -> Any:
    """Returns the text of `{"text": ...}`; anything else is left to the check for a string."""
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return value["text"]
    return value


def parse_texts(value: Any) -> list[str]:
    """Returns the texts of a list whose entries are strings or `{"text": ...}`.

    Raises:
        ValueError: The list is empty or an entry is something else; the message names it.
    """
    if not isinstance(value, list):
        raise ValueError(f"must be a list of texts, not {_kind(value)}")
    if not value:
        raise ValueError("is an empty list; give at least one text")
    check_length(value)
    texts = value if set(map(type, value)) == {str} else [parse_text(entry) for entry in value]
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f'must hold texts or objects {{"text": ...}}; entry {i} is {_kind(text)}')
    return texts


def parse_flag(value: Any) -> Any:
    """Returns true or false for the words, which RAGFlow sends."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def parse_whole_number(value: Any) -> Any:
    """Returns 5 for 5.0, which is the same in JSON, and refuses what no client means: true, "5"."""
    if isinstance(value, bool | str):
        raise ValueError(f"must be a whole number, not {value!r}")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _kind(value: Any) -> str:
    """Names a JSON value for a message: its kind, and the value itself where it is short."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        if not value:
            return "an empty list"
        odd = next((entry for entry in value if type(entry) is not int), value[0])
        return f"a list that holds {'a list' if isinstance(odd, list) else _kind(odd)}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)[:60]


Inputs = Annotated[list[Text], PlainValidator(parse_inputs), WithJsonSchema(json_schema.INPUTS)]
TextOrObject = Annotated[str, BeforeValidator(parse_text), WithJsonSchema(json_schema.TEXT)]
Texts = Annotated[list[str], PlainValidator(parse_texts), WithJsonSchema(json_schema.TEXTS)]
Count = Annotated[int, Field(ge=0, le=json_schema.MAX_INTEGER), BeforeValidator(parse_whole_number)]
Width = Annotated[int, Field(ge=1, le=json_schema.MAX_INTEGER), BeforeValidator(parse_whole_number)]
TokenLimit = Annotated[int, BeforeValidator(parse_whole_number), WithJsonSchema(json_schema.TOKEN_LIMIT)]
ModelName = Annotated[str, AfterValidator(lambda name: "" if name == UNNAMED_MODEL else name)]
Flag = StrictBool
"""true or false, and not the 0, "no" or "off" that pydantic would take for them."""
FlagOrWord = Annotated[StrictBool, BeforeValidator(parse_flag, json_schema_input_type=bool | Literal["true", "false"])]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), BeforeValidator(parse_whole_number)]
PRIORITY: Final[Any] = Field(
    None,
    description=(
        "Lower goes first; a level is worth a second of waiting. Absent: what the header x-priority says, otherwise 0."
    ),
)


class RequestBody(BaseModel):
    """Base of all request bodies.

    Attributes:
        model: Served name; the default model where it is absent or empty.
        user: Accepted and ignored.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: ModelName | None = Field(None, description="Served name; absent: the default model.")
    user: str | None = Field(None, description="Accepted and ignored.")


class PoolingBody(RequestBody):
    """Options that every task of a pooling model takes."""

    truncate_prompt_tokens: TokenLimit | None = Field(
        None,
        description="Tokens. Cut every input to this many; -1: to the longest taken; absent: as --auto-truncate says.",
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="The side that is cut away.")
    use_activation: Flag | None = Field(
        None, description="Classes and scores: apply the activation. Embeddings: newer name of `normalize`."
    )
    priority: Priority | None = PRIORITY

    def pooling_params(self) -> PoolingParams:
        """Returns what the request asks of pooling."""
        return PoolingParams(
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            use_activation=self.use_activation,
        )


class PairBody(PoolingBody):
    """Options of the routes that score a query against documents."""

    instruction: str | None = Field(
        None,
        description=(
            "What the model is to look for, for rerankers that take an instruction and for embedding models with a "
            "query prompt of the form `Instruct: ...`; other models refuse it. Absent or empty: the model's own."
        ),
        examples=["Given a question about the law, retrieve the paragraphs that answer it"],
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="vLLM's other place of `instruction`, which wins; what else it holds is ignored."
    )

    def wanted_instruction(self) -> str | None:
        """Returns the instruction of the request, in whichever place it stands."""
        instruction = (self.chat_template_kwargs or {}).get("instruction")
        return instruction if isinstance(instruction, str) else self.instruction


class Usage(BaseModel):
    """Tokens of the inputs as the model saw them: after truncation, with prompts and special tokens.

    A text that is embedded in windows counts once, not every window of it.
    A query counts once for every document that a cross-encoder reads it with, once for an embedding model; labels and
    examples of a classification count, too.
    """

    prompt_tokens: int = Field(examples=[12])
    total_tokens: int = Field(examples=[12])


def usage_of(num_tokens: int) -> dict[str, int]:
    """Returns the `usage` object of a response."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
