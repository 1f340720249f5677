"""Options that bodies of all dialects share, and the usage in responses.

Clients send null for an option that they leave out: null means absent everywhere.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, StrictBool, WithJsonSchema

from penstock.engine import PoolingParams

from ..errors import shown, shown_names
from ..http.json_bodies import JsonBody
from ..http.request_head import MAX_PRIORITY
from . import json_schema

Entry = TypeVar("Entry")
Listed = Annotated[list[Entry], Field(fail_fast=True)]
"""A list whose check stops at the first wrong entry. Pydantic would make an error of each entry."""


def parse_flag(value: Any) -> Any:
    """Returns true or false for the words, which RAGFlow sends."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def parse_whole_number(value: Any) -> Any:
    """Returns 5 for 5.0, which is the same in JSON, and refuses true and "5", which no client means."""
    if isinstance(value, bool | str):
        raise ValueError(f"must be a whole number, not {shown(value)}")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def parse_width(value: Any) -> Any:
    """Returns a width as `parse_whole_number` does, and refuses one below 1."""
    return check_width(parse_whole_number(value), 1)


def parse_width_or_zero(value: Any) -> Any:
    """Returns a width as `parse_width` does, or 0."""
    return check_width(parse_whole_number(value), 0)


def check_width(value: Any, least: int) -> Any:
    """Returns a value, and raises ValueError for an integer below `least`, in the words for every width below 1."""
    if isinstance(value, int) and value < least:
        raise ValueError(f"must be at least 1, not {value}")
    return value


Count = Annotated[int, Field(ge=0, le=json_schema.MAX_INTEGER), BeforeValidator(parse_whole_number)]
Width = Annotated[int, Field(ge=1, le=json_schema.MAX_INTEGER), BeforeValidator(parse_width)]
WidthOrZero = Annotated[
    int,
    Field(ge=0, le=json_schema.MAX_INTEGER),
    BeforeValidator(parse_width_or_zero),
    WithJsonSchema(json_schema.WIDTH),
]
TokenLimit = Annotated[int, BeforeValidator(parse_whole_number), WithJsonSchema(json_schema.TOKEN_LIMIT)]
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


class RequestBody(JsonBody):
    """Base of all request bodies.

    Attributes:
        model: Served name; the default model where it is absent or empty.
        prompt_fields: Those of its fields that say which prompt its texts want, by the names that `prompt_for` knows.
    """

    prompt_fields: ClassVar[tuple[str, ...]] = ()

    model: str | None = Field(None, description="Served name; absent: the default model.")
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")] | None = Field(
        None, description="Names the request, in place of the header x-request-id: in the answer and in the log."
    )

    def request_name(self) -> str | None:
        """See JsonBody."""
        return self.request_id


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
    padding: Literal["do_not_pad"] | None = Field(
        None, description="vLLM's. Inputs are never padded, which no answer would show; other values are refused."
    )

    def pooling_params(self) -> PoolingParams:
        """Returns the pooling parameters."""
        return PoolingParams(
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            use_activation=self.use_activation,
        )


class EmbeddingBody(PoolingBody):
    """Options of the routes that embed, as vLLM names them."""

    prompt_fields: ClassVar[tuple[str, ...]] = ("prompt_name", "input_type")

    dimensions: Width | None = Field(None, description="Width of the vectors, but for sparse ones (Matryoshka).")
    normalize: Flag | None = Field(
        None, description="L2-normalise the vectors, but for sparse ones; absent: as the model does."
    )
    prompt_name: str | None = Field(None, description="Named prompt of the model to put before every text.")
    input_type: str | None = Field(
        None,
        description=(
            "What the texts are for: `query`, `document`, `classification`, `clustering` or `similarity`, in the words "
            "of Voyage, Cohere or Jina, or the name of a prompt of the model. Puts the model's prompt for it before "
            "every text, where it has one."
        ),
    )

    def pooling_params(self) -> PoolingParams:
        """Returns the pooling parameters."""
        return super().pooling_params().clone(dimensions=self.dimensions, normalize=self.normalize)


def _only_one(value: Any) -> Any:
    """Refuses an object of several keys at once: pydantic would make an error of each."""
    if isinstance(value, dict) and len(value) > 1:
        raise ValueError(f"may hold instruction alone; it has {shown_names(value)}")
    return value


InstructionKwargs = Annotated[
    dict[Literal["instruction"], str | None],
    BeforeValidator(_only_one, json_schema_input_type=dict[Literal["instruction"], str | None]),
]


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
    chat_template_kwargs: InstructionKwargs | None = Field(
        None, description="vLLM's other place of `instruction`, which wins; it may hold nothing else."
    )
    max_tokens_per_query: Count | None = Field(
        None, description="Tokens. Cut each query to this many first; 0 or absent: leave it whole."
    )
    max_tokens_per_doc: Count | None = Field(
        None, description="Tokens. Cut each document to this many first; 0 or absent: leave it whole, or cut it to fit."
    )

    def wanted_instruction(self) -> str | None:
        """Returns the instruction of the request, in whichever place it stands."""
        return (self.chat_template_kwargs or {}).get("instruction") or self.instruction


class Usage(BaseModel):
    """Tokens of the inputs as the model saw them: after truncation, with prompts and special tokens.

    A text that is embedded in windows counts once, not every window of it.
    A query counts once for every document that a cross-encoder reads it with, once for an embedding model; labels and
    examples of a classification count, too.
    """

    prompt_tokens: int = Field(examples=[12])
    total_tokens: int = Field(examples=[12])


class OpenAIResponse(BaseModel):
    """What answers in OpenAI's shape hold beside their rows."""

    id: str
    created: int
    model: str
    usage: Usage


class ListResponse(OpenAIResponse, Generic[Entry]):
    """An answer in OpenAI's shape, with a row for each input, in their order."""

    object: Literal["list"]
    data: list[Entry]


class ApiVersion(BaseModel):
    """Cohere's API version."""

    version: str


class VersionMeta(BaseModel):
    """Cohere's meta object where nothing is billed."""

    api_version: ApiVersion


class CohereTruncate(StrEnum):
    """Cohere's choice of the side of an over-long input that is cut away."""

    NONE = "NONE"
    START = "START"
    END = "END"


def parse_truncate(value: Any) -> Any:
    """Returns true, false, "START" or "END" for what any dialect says in `truncate`; "NONE" is false."""
    if isinstance(value, str):
        known: dict[str, bool | str] = {"none": False, "false": False, "true": True, "start": "START", "end": "END"}
        return known.get(value.lower(), value)
    return value


Truncate = Annotated[
    StrictBool | Literal["START", "END"],
    BeforeValidator(parse_truncate, json_schema_input_type=bool | Literal["NONE", "START", "END", "true", "false"]),
]


def truncated(params: PoolingParams, truncate: Truncate | None) -> PoolingParams:
    """Returns `params` with what `truncate` asks for; a truncate_prompt_tokens in them wins.

    Args:
        params: Pooling parameters of the request.
        truncate: True cuts inputs to fit, on the side that the tokenizer cuts; "START" and "END" cut there; False
            refuses longer inputs. None: the server's default.
    """
    if truncate is None or params.truncate_prompt_tokens is not None:
        return params
    if truncate is False:
        return params.clone(refuse_too_long=True)
    sides = {"START": "left", "END": "right"}
    side = params.truncation_side or (sides[truncate] if isinstance(truncate, str) else None)
    return params.clone(truncate_prompt_tokens=-1, truncation_side=side)
