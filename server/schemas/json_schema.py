"""JSON Schemas for body parsers, which pydantic cannot derive, and example bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, JsonValue
from pydantic_core import CoreSchema, core_schema

from ..http.json_body import NO_UNKNOWN_KEYS
from .images import INPUT_KEYS

JsonSchema = dict[str, JsonValue]

MAX_INTEGER: Final = 2**53 - 1
"""The largest integer that every JSON parser reads exactly."""

_NULL: Final[JsonSchema] = {"type": "null"}
_STRING: Final[JsonSchema] = {"type": "string"}
NON_EMPTY_STRING: Final[JsonSchema] = {"type": "string", "minLength": 1}
_TEXT_OBJECT: Final[JsonSchema] = {
    "type": "object",
    "required": ["text"],
    "properties": {"text": _STRING},
    **NO_UNKNOWN_KEYS,
}
_NON_EMPTY_TEXT_OBJECT: Final[JsonSchema] = {**_TEXT_OBJECT, "properties": {"text": NON_EMPTY_STRING}}
_TEXT_PART: Final[JsonSchema] = {
    "type": "object",
    "required": ["text"],
    "properties": {"type": {"const": "text"}, "text": _STRING},
}


def list_of(*entries: JsonSchema) -> JsonSchema:
    """Returns the schema of a non-empty list whose entries each match one of `entries`."""
    return {"type": "array", "minItems": 1, "items": one_of(*entries)}


def one_of(*choices: JsonSchema) -> JsonSchema:
    """Returns the schema of a value that is one of `choices`."""
    return choices[0] if len(choices) == 1 else {"anyOf": [*choices]}


TEXT: Final = one_of(_STRING, _TEXT_OBJECT)
TEXTS: Final = list_of(_STRING, _TEXT_OBJECT)
TEXT_OR_TEXTS: Final = one_of(_STRING, _TEXT_OBJECT, TEXTS)
TOKEN_ID: Final[JsonSchema] = {"type": "integer", "minimum": 0, "maximum": MAX_INTEGER}
TOKEN_IDS: Final = list_of(TOKEN_ID)
ANY_TOKEN_IDS: Final[JsonSchema] = {"type": "array", "items": TOKEN_ID}
WIDTH: Final[JsonSchema] = {"type": "integer", "minimum": 1, "maximum": MAX_INTEGER}
TOKEN_LIMIT: Final = one_of(WIDTH, {"const": -1})
NON_EMPTY_INPUTS: Final = one_of(
    NON_EMPTY_STRING, list_of(NON_EMPTY_STRING, _NON_EMPTY_TEXT_OBJECT, TOKEN_IDS), TOKEN_IDS
)
_IMAGE: Final[JsonSchema] = {
    "type": "string",
    "minLength": 1,
    "description": "A data URI, base64, or an https URL if --allowed-media-domains has its host.",
}


def _image_object(key: str, others: Sequence[str] = ()) -> JsonSchema:
    """Returns the schema of an object with an image in `key`, and optionally with a text and images in `others`."""
    optional = {"text": one_of(_STRING, _NULL), **dict.fromkeys(others, one_of(_IMAGE, _NULL))}
    return {"type": "object", "required": [key], "properties": {**optional, key: _IMAGE}, **NO_UNKNOWN_KEYS}


_IMAGE_OBJECT: Final = _image_object("image")
_INPUT_IMAGE_OBJECTS: Final = [_image_object(key, INPUT_KEYS) for key in INPUT_KEYS]
IMAGES: Final[JsonSchema] = {"type": "array", "items": _IMAGE}
PIXEL: Final = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEAAAAALAAAAAABAAEAAAICRAEAOw=="
"""An image of one pixel, for examples."""
_IMAGE_URL_PART: Final[JsonSchema] = {
    "type": "object",
    "required": ["type", "image_url"],
    "properties": {
        "type": {"const": "image_url"},
        "image_url": one_of(_IMAGE, {"type": "object", "required": ["url"], "properties": {"url": _IMAGE}}),
    },
}
_IMAGE_BASE64_PART: Final[JsonSchema] = {
    "type": "object",
    "required": ["type", "image_base64"],
    "properties": {"type": {"const": "image_base64"}, "image_base64": _IMAGE},
}
PARTS: Final = list_of(_TEXT_PART, _IMAGE_URL_PART, _IMAGE_BASE64_PART)
CONTENT_OBJECT: Final[JsonSchema] = {
    "type": "object",
    "required": ["content"],
    "properties": {"content": one_of(_STRING, PARTS)},
    **NO_UNKNOWN_KEYS,
}
INPUTS: Final = one_of(
    _STRING,
    list_of(
        _STRING,
        _TEXT_OBJECT,
        *_INPUT_IMAGE_OBJECTS,
        {**_IMAGE_URL_PART, **NO_UNKNOWN_KEYS},
        CONTENT_OBJECT,
        PARTS,
        TOKEN_IDS,
    ),
    TOKEN_IDS,
)
SCORE_SIDE: Final = one_of(
    _STRING, _TEXT_OBJECT, CONTENT_OBJECT, list_of(_STRING, _TEXT_OBJECT, _IMAGE_OBJECT, CONTENT_OBJECT)
)
QUERY: Final = one_of(_STRING, _TEXT_OBJECT, _IMAGE_OBJECT, CONTENT_OBJECT)
CONTENTS: Final = list_of(CONTENT_OBJECT)
DOCUMENTS: Final = one_of(
    list_of(
        _STRING, {"type": "object", "properties": {"text": one_of(_STRING, _NULL), "image": one_of(_IMAGE, _NULL)}}
    ),
    {"type": "object", "required": ["content"], "properties": {"content": PARTS}},
)
_SEQUENCE: Final[JsonSchema] = {
    "type": "array",
    "items": _STRING,
    "contains": NON_EMPTY_STRING,
    "minItems": 1,
    "maxItems": 2,
}
SEQUENCES: Final = one_of(NON_EMPTY_STRING, _SEQUENCE, list_of(_SEQUENCE))
ID_BATCHES: Final = one_of(TOKEN_IDS, list_of(TOKEN_IDS))
_CHAT: Final = list_of(
    {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": _STRING,
            "content": one_of(_STRING, list_of(_STRING, _TEXT_PART, _IMAGE_URL_PART, _IMAGE_BASE64_PART), _NULL),
        },
    }
)
CHATS: Final = one_of(_CHAT, list_of(_CHAT))


def body_config(
    *examples: JsonSchema, exactly_one: Sequence[str | tuple[str, ...]] = (), named_by: Sequence[str] = ()
) -> ConfigDict:
    """Returns the model configuration with the examples and the field rules of a body for OpenAPI.

    Args:
        examples: Example bodies.
        exactly_one: Fields, or groups of fields. Exactly one must be present. Null counts as absent.
        named_by: Fields. At least one must be present. Null, an empty text and an empty list count as absent.
    """
    groups = [(choice,) if isinstance(choice, str) else choice for choice in exactly_one]
    rules: list[JsonValue] = []
    if groups:
        rules.append({"oneOf": [{"required": [*g], "properties": dict.fromkeys(g, _NOT_NULL)} for g in groups]})
    if named_by:
        rules.append({"anyOf": [{"required": [name], "properties": {name: _NOT_EMPTY}} for name in named_by]})
    # Inside `allOf`, because client generators replace the body's fields by a bare `oneOf`.
    rule: JsonSchema = {"allOf": rules} if rules else {}
    return ConfigDict(json_schema_extra={**rule, "examples": [*examples]})


_NOT_NULL: Final[dict[str, Any]] = {"not": {"type": "null"}}
_NOT_EMPTY: Final[dict[str, Any]] = {"not": {"enum": [None, "", []]}}


@dataclass(frozen=True, eq=False)
class Parsed:
    """Annotation of a field that a function parses.

    pydantic's PlainValidator would also add the field's Python type to the OpenAPI document.

    Args:
        parse: Returns the value of the field, or raises ValueError.
        schema: JSON Schema of the field.
    """

    parse: Callable[[Any], Any]
    schema: JsonSchema

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Returns the validator of the field."""
        return core_schema.no_info_plain_validator_function(self.parse)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        """Returns the JSON Schema of the field."""
        return dict(self.schema)
