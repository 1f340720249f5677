"""Pieces that request and response schemas of all dialects share.

Clients send null for an option that they leave out, and options that only other servers know: null means absent
everywhere, and unknown keys are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from penstock.engine.params import PoolingParams

from ..request_limits import MAX_PRIORITY

Text = str | list[int]


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
    if kinds == {int}:
        return [value]
    if dict in kinds:
        value = [parse_text(entry) for entry in value]
    inputs: list[Text] = value
    for i, entry in enumerate(value):
        is_ids = type(entry) is list and entry and set(map(type, entry)) == {int}
        if type(entry) is not str and not is_ids:
            raise ValueError(
                f'must hold texts, objects {{"text": ...}} or lists of token ids; entry {i} is {_kind(entry)}'
            )
    return inputs


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
    texts = value if set(map(type, value)) == {str} else [parse_text(entry) for entry in value]
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f'must hold texts or objects {{"text": ...}}; entry {i} is {_kind(text)}')
    return texts


def parse_whole_number(value: Any) -> Any:
    """Refuses what pydantic would turn into an integer although no client means it: true, "5"."""
    if isinstance(value, bool | str):
        raise ValueError(f"must be a whole number, not {value!r}")
    return value


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


_TEXT_SCHEMA: Final = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    ]
}
_TEXTS_SCHEMA: Final = {"type": "array", "minItems": 1, "items": _TEXT_SCHEMA}
_INPUTS_SCHEMA: Final = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
        },
    ]
}

Inputs = Annotated[list[Text], PlainValidator(parse_inputs), WithJsonSchema(_INPUTS_SCHEMA)]
TextOrObject = Annotated[str, BeforeValidator(parse_text)]
Texts = Annotated[list[str], PlainValidator(parse_texts), WithJsonSchema(_TEXTS_SCHEMA)]
WholeNumber = Annotated[int, BeforeValidator(parse_whole_number)]
Count = Annotated[int, Field(ge=0), BeforeValidator(parse_whole_number)]
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

    model: str | None = Field(None, description="Served name; absent: the default model.")
    user: str | None = Field(None, description="Accepted and ignored.")


class PoolingBody(RequestBody):
    """Options that every task of a pooling model takes."""

    truncate_prompt_tokens: WholeNumber | None = Field(
        None, description="Tokens. Cut every input to this many; -1: to the longest taken; absent: refuse long ones."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="The side that is cut away.")
    use_activation: bool | None = Field(
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


class ErrorDetail(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The error body of all routes: OpenAI clients read `error`, Cohere clients `message`, Jina clients `detail`."""

    error: ErrorDetail
    message: str
    detail: str


ERROR_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    400: {"model": ErrorBody, "description": "The request is wrong; the message names the field and the value."},
    401: {"model": ErrorBody, "description": "The API key is missing or wrong."},
    404: {"model": ErrorBody, "description": "No such model."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    415: {"model": ErrorBody, "description": "The body is not JSON."},
    429: {"model": ErrorBody, "description": "The queue is full; Retry-After says when to come back."},
    500: {"model": ErrorBody, "description": "The server failed; its log has the details under x-request-id."},
    503: {"model": ErrorBody, "description": "The engine is starting or shutting down."},
    504: {"model": ErrorBody, "description": "The deadline passed."},
    "default": {"model": ErrorBody, "description": "Any other error."},
}


def usage_of(num_tokens: int) -> dict[str, int]:
    """Returns the `usage` object of a response."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
