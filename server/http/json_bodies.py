"""Base class and parser of request bodies. On a shared path, the keys of a body determine its dialect.

Body = Annotated[
    Annotated[RerankRequest, Tag(DEFAULT_TAG)] | Annotated[TeiRerankRequest, Tag(TEI_TAG)],
    by_keys({"texts": TEI_TAG}, otherwise=DEFAULT_TAG),
]
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Discriminator, GetJsonSchemaHandler, TypeAdapter, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from ..errors import COHERE_TAG, DEFAULT_TAG, MAX_SHOWN_ERRORS, TEI_TAG, quote_names


class JsonBody(BaseModel):
    """A request body. Unknown keys are rejected unless their value is null or `ignored_keys` has them.

    Attributes:
        tag: Names its dialect if bodies of several dialects share a path.
        ignored_keys: Keys that are accepted and ignored, with the reason.
        param_names: See `field_names`.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    tag: ClassVar[str] = DEFAULT_TAG
    ignored_keys: ClassVar[Mapping[str, str]] = {}
    param_names: ClassVar[Mapping[str, str]] = {}

    def field_names(self) -> Mapping[str, str]:
        """Maps field names in engine errors to the names in this body (EngineError.name_fields)."""
        return self.param_names

    def body_request_id(self) -> str | None:
        """Returns the request id in the body; None: use the header x-request-id."""
        return None

    def check_keys(self) -> None:
        """Raises RequestValidationError for unknown keys that are neither null nor ignored. Removes ignored keys."""
        extra = self.model_extra or {}
        names = [name for name, value in extra.items() if value is not None and name not in self.ignored_keys]
        if names:
            errors = [
                {
                    "type": "unknown_key",
                    "loc": ("body", self.tag, quote_names((name,))),
                    "msg": self._hint(name),
                }
                for name in names[:MAX_SHOWN_ERRORS]
            ]
            # Other keys are only counted: making messages for a million keys would take minutes.
            raise RequestValidationError(errors + errors[-1:] * (len(names) - len(errors)))
        extra.clear()

    @classmethod
    def _hint(cls, name: str) -> str:
        fields = [field.alias or name for name, field in cls.model_fields.items()]
        meant = difflib.get_close_matches(name[:100], fields, n=1)
        return (
            f"is not known here; did you mean {meant[0]}? Otherwise leave it out"
            if meant
            else f"has no use here; leave it out. This request takes {quote_names(fields)}"
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Returns the JSON Schema with the rule for unknown keys."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        schema["additionalProperties"] = {"type": "null"}
        for name, reason in cls.ignored_keys.items():
            schema["properties"].setdefault(name, {"description": f"Accepted and ignored: {reason}"})
        return schema


Body = TypeVar("Body", bound=JsonBody)


def parsed(schema: type[Body], body: object) -> Body:
    """Returns a body as `schema`. Raises RequestValidationError; see `invalid_body` and `JsonBody.check_keys`."""
    try:
        checked = schema.model_validate(body)
    except ValidationError as error:
        raise invalid_body(error, body) from error
    checked.check_keys()
    return checked


class BodyParser:
    """Parses the bodies of one route.

    Args:
        annotation: Annotation of the route's parameter `body`: a schema, a union with a discriminator, or dict.
    """

    def __init__(self, annotation: Any) -> None:
        adapter = TypeAdapter[Any](annotation)
        self._validate = adapter.validator.validate_python
        self._has_schema = adapter.core_schema["type"] != "dict"
        self.tag_of = tag_rule(annotation)

    def parse(self, value: Any) -> Any:
        """Returns a body, or a dict if there is no schema. Raises RequestValidationError; see `parsed`."""
        try:
            body = self._validate(value)
        except ValidationError as error:
            raise invalid_body(error, value) from error
        if self._has_schema and body.__pydantic_extra__:
            body.check_keys()
        return body


def invalid_body(error: ValidationError, body: object) -> RequestValidationError:
    """Returns the same error that FastAPI raises for invalid bodies."""
    errors = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors(include_url=False)]
    keys = [name for name, value in body.items() if value is not None] if isinstance(body, dict) else []
    return RequestValidationError(errors, body=keys)


def tag_rule(schema: Any) -> Callable[[Any], str]:
    """Returns a function that maps a body to its tag: the annotation's discriminator, or always DEFAULT_TAG."""
    for mark in getattr(schema, "__metadata__", ()):
        if isinstance(mark, Discriminator) and callable(mark.discriminator):
            tag_of: Callable[[Any], str] = mark.discriminator  # type: ignore[assignment]  # this package's discriminators return str
            return tag_of
    return lambda _: DEFAULT_TAG


def embed_dialect(body: Any) -> str:
    """Returns the tag of a body of /embed. Cohere's body has `texts`, or `inputs` with objects of contents."""
    if not isinstance(body, dict):
        return TEI_TAG
    inputs = body.get("inputs")
    first = inputs[0] if isinstance(inputs, list) and inputs else None
    has_contents = isinstance(first, dict) and "content" in first
    return COHERE_TAG if has_contents or body.get("texts") is not None else TEI_TAG


def by_keys(tags: Mapping[str, str], *, otherwise: str) -> Discriminator:
    """Returns a discriminator: the tag of the first of these keys with a value other than null, or else `otherwise`."""

    def tag_of(body: Any) -> str:
        if not isinstance(body, dict):
            return otherwise
        return next((tag for key, tag in tags.items() if body.get(key) is not None), otherwise)

    return Discriminator(tag_of)
