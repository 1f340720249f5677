"""Body options that all dialects share, and the usage in responses.

Clients send null for omitted options, so null means absent everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, StrictBool, WithJsonSchema

from penstock.engine import PoolingParams
from penstock.engine.protocol.errors import InvalidRequestError

from ..errors import quote, quote_names
from ..http.json_body import JsonBody
from ..http.request_head import MAX_PRIORITY
from . import json_schema

Entry = TypeVar("Entry")
Value = TypeVar("Value")
FailFastList = Annotated[list[Entry], Field(fail_fast=True)]
"""A list whose check stops at the first wrong entry. By default pydantic makes an error for each entry."""


def parse_flag(value: Any) -> Any:
    """Returns a bool for the texts "true" and "false", which RAGFlow sends."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def parse_integer(value: Any) -> Any:
    """Returns 5 for 5.0, which is the same number in JSON. Raises ValueError for true and "5"."""
    if isinstance(value, bool | str):
        raise ValueError(f"must be a whole number, not {quote(value)}")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def parse_width(value: Any) -> Any:
    """Like `parse_integer`, and raises ValueError for integers below 1."""
    return check_width(parse_integer(value), 1)


def parse_width_or_zero(value: Any) -> Any:
    """Like `parse_width`, but allows 0."""
    return check_width(parse_integer(value), 0)


def check_width(value: Any, min_width: int) -> Any:
    """Returns the value. Raises ValueError, with one message for all widths, if it is an integer below `min_width`."""
    if isinstance(value, int) and value < min_width:
        raise ValueError(f"must be at least 1, not {value}")
    return value


def contradiction(name: str, value: object, other_name: str, other: object) -> InvalidRequestError:
    """Returns the error for two fields that set the same option to different values."""
    return InvalidRequestError(
        f"{name} is {quote(value)}, but {other_name} is {quote(other)}: both set the same option. Send one of them.",
        param=other_name,
    )


def one_value(fields: Mapping[str, Value | None]) -> Value | None:
    """Returns the value of an option that has several names; None if no field is set.

    Raises:
        InvalidRequestError: Two fields have different values.
    """
    given = [(name, value) for name, value in fields.items() if value is not None]
    for name, value in given[1:]:
        if value != given[0][1]:
            raise contradiction(*given[0], name, value)
    return given[0][1] if given else None


Count = Annotated[int, Field(ge=0, le=json_schema.MAX_INTEGER), BeforeValidator(parse_integer)]
Width = Annotated[int, Field(ge=1, le=json_schema.MAX_INTEGER), BeforeValidator(parse_width)]
WidthOrZero = Annotated[
    int,
    Field(ge=0, le=json_schema.MAX_INTEGER),
    BeforeValidator(parse_width_or_zero),
    WithJsonSchema(json_schema.WIDTH),
]
TokenLimit = Annotated[int, BeforeValidator(parse_integer), WithJsonSchema(json_schema.TOKEN_LIMIT)]
Flag = StrictBool
"""true or false. Unlike pydantic's bool it does not accept 0, "no" or "off"."""
FlagOrText = Annotated[StrictBool, BeforeValidator(parse_flag, json_schema_input_type=bool | Literal["true", "false"])]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), BeforeValidator(parse_integer)]
PRIORITY: Final[Any] = Field(
    None,
    description=(
        "Lower values run first. One level counts like one second of waiting. Absent: the header x-priority, or 0."
    ),
)


class RequestBody(JsonBody):
    """Base of all request bodies.

    Attributes:
        model: Served name. Absent or empty: the default model.
        prompt_fields: Names of the fields that select the prompt: parameters of `prompt_for`.
    """

    prompt_fields: ClassVar[tuple[str, ...]] = ()

    model: str | None = Field(None, description="Served name; absent: the default model.")
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")] | None = Field(
        None, description="Request id for response and log. It replaces the header x-request-id."
    )

    def body_request_id(self) -> str | None:
        """Returns the field `request_id`, or None."""
        return self.request_id


class PoolingBody(RequestBody):
    """Options of all tasks of pooling models."""

    truncate_prompt_tokens: TokenLimit | None = Field(
        None,
        description=(
            "Truncate every input to this many tokens. -1: the maximum length of the model. "
            "Absent: see --auto-truncate."
        ),
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="Side at which inputs are truncated.")
    use_activation: Flag | None = Field(
        None, description="For classes and scores: apply the activation. For embeddings: a newer name for `normalize`."
    )
    priority: Priority | None = PRIORITY
    padding: Literal["do_not_pad"] | None = Field(
        None,
        description="Field of vLLM. Inputs are never padded, which does not affect results. Other values are rejected.",
    )

    def pooling_params(self) -> PoolingParams:
        """Returns PoolingParams with the token limit, the truncated side and the activation of the request."""
        return PoolingParams(
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            use_activation=self.use_activation,
        )


class EmbeddingBody(PoolingBody):
    """Options of the embedding routes, with vLLM's names."""

    prompt_fields: ClassVar[tuple[str, ...]] = ("prompt_name", "input_type")

    dimensions: Width | None = Field(
        None, description="Number of dimensions of the vectors (Matryoshka). Sparse vectors ignore it."
    )
    normalize: Flag | None = Field(
        None, description="L2-normalise the vectors. Sparse vectors ignore it. Absent: as the model's files state."
    )
    prompt_name: str | None = Field(
        None, description="Name of a prompt of the model. The prompt is put before every text."
    )
    input_type: str | None = Field(
        None,
        description=(
            "Purpose of the texts: `query`, `document`, `classification`, `clustering` or `similarity`, or the terms "
            "of Voyage, Cohere or Jina, or the name of a prompt. If the model has a prompt for the purpose, it is put "
            "before every text."
        ),
    )

    def pooling_params(self) -> PoolingParams:
        """Adds the number of dimensions and the normalisation to the parameters of PoolingBody."""
        return super().pooling_params().clone(dimensions=self.dimensions, normalize=self.normalize)


def _only_one(value: Any) -> Any:
    """Rejects an object of several keys with one error: pydantic makes an error for each key."""
    if isinstance(value, dict) and len(value) > 1:
        raise ValueError(f"may hold instruction alone; it has {quote_names(value)}")
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
            "Ranking instruction, for rerankers that take an instruction and embedding models with a query prompt of "
            "the form `Instruct: ...`. Other models reject it. Absent or empty: the model's own instruction."
        ),
        examples=["Given a question about the law, retrieve the paragraphs that answer it"],
    )
    chat_template_kwargs: InstructionKwargs | None = Field(
        None, description="vLLM's other place for `instruction`. It allows no other key."
    )
    max_tokens_per_query: Count | None = Field(
        None, description="Truncate each query to this many tokens first. 0 or absent: do not truncate it."
    )
    max_tokens_per_doc: Count | None = Field(
        None,
        description="Truncate each document to this many tokens first. 0 or absent: truncate it only to fit the model.",
    )

    def instructions(self) -> dict[str, str | None]:
        """Returns the instruction by the names of the fields that may hold it. None: absent or empty."""
        in_kwargs = (self.chat_template_kwargs or {}).get("instruction")
        return {"instruction": self.instruction or None, "chat_template_kwargs.instruction": in_kwargs or None}

    def requested_instruction(self) -> str | None:
        """Returns the instruction of the request. Raises InvalidRequestError if two fields hold different ones."""
        return one_value(self.instructions())


class Usage(BaseModel):
    """Number of input tokens after truncation, with prompts and special tokens.

    A text that is embedded in windows counts once.
    A query counts once per document with a cross-encoder, and once with an embedding model. Labels and examples of a
    classification count too.
    """

    prompt_tokens: int = Field(examples=[12])
    total_tokens: int = Field(examples=[12])


class OpenAIResponse(BaseModel):
    """Fields of OpenAI's responses without the rows."""

    id: str
    created: int
    model: str
    usage: Usage


class ListResponse(OpenAIResponse, Generic[Entry]):
    """A response in OpenAI's format, with one row per input, in input order."""

    object: Literal["list"]
    data: list[Entry]


class ApiVersion(BaseModel):
    """Cohere's API version."""

    version: str


class VersionMeta(BaseModel):
    """Cohere's meta object without billed units."""

    api_version: ApiVersion
    warnings: list[str] | None = Field(None, description="States how many inputs were truncated; absent if none were.")


class CohereTruncate(StrEnum):
    """Cohere's choice of the side at which long inputs are truncated."""

    NONE = "NONE"
    START = "START"
    END = "END"


def parse_truncate(value: Any) -> Any:
    """Returns true, false, "START" or "END" for the `truncate` values of all dialects. "NONE" becomes false."""
    if isinstance(value, str):
        known: dict[str, bool | str] = {"none": False, "false": False, "true": True, "start": "START", "end": "END"}
        return known.get(value.lower(), value)
    return value


Truncate = Annotated[
    StrictBool | Literal["START", "END"],
    BeforeValidator(parse_truncate, json_schema_input_type=bool | Literal["NONE", "START", "END", "true", "false"]),
]


def with_raw_scores(params: PoolingParams, raw_scores: bool | None) -> PoolingParams:
    """Applies `raw_scores` to the parameters. True is the same as `use_activation: false`.

    Raises:
        InvalidRequestError: `use_activation` contradicts it.
    """
    if raw_scores is None:
        return params
    if params.use_activation is raw_scores:
        raise contradiction("raw_scores", raw_scores, "use_activation", raw_scores)
    return params.clone(use_activation=False) if raw_scores else params


def truncated(params: PoolingParams, truncate: Truncate | None, name: str = "truncate") -> PoolingParams:
    """Applies `truncate` to the parameters. A limit in `params.truncate_prompt_tokens` stays.

    Args:
        params: Pooling parameters of the request.
        truncate: True truncates inputs at the tokenizer's side, "START" and "END" at that side. False rejects longer
            inputs, unless there is a limit. None: the server's default.
        name: The field that has `truncate`.

    Raises:
        InvalidRequestError: `truncation_side` contradicts `truncate`.
    """
    sides = {"START": "left", "END": "right"}
    side = sides[truncate] if isinstance(truncate, str) else None
    if None not in (side, params.truncation_side) and side != params.truncation_side:
        raise contradiction(name, truncate, "truncation_side", params.truncation_side)
    limit = params.truncate_prompt_tokens
    if truncate is None or (truncate is False and limit is not None):
        return params
    if truncate is False:
        return params.clone(reject_too_long=True)
    side = params.truncation_side or side
    return params.clone(truncate_prompt_tokens=-1 if limit is None else limit, truncation_side=side)
