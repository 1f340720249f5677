"""Validates JSON bodies with the schema of their route, and handles unknown keys.

Several dialects may share a path. Then the keys of a body select its schema:

Body = Annotated[
    Annotated[RerankRequest, Tag(DEFAULT_TAG)] | Annotated[TeiRerankRequest, Tag(TEI_TAG)],
    by_keys({"texts": TEI_TAG}, otherwise=DEFAULT_TAG),
]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeVar, get_args

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Discriminator, GetJsonSchemaHandler, JsonValue, TypeAdapter, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from starlette.types import Scope

from ..errors import DEFAULT_TAG, MAX_SHOWN_ERRORS, quote_names
from ..request_state import state_of

MAX_IGNORED_FIELDS: Final = 32
"""A body with more unknown keys is rejected: comparing each with all known keys takes 10 us per pair."""
NO_UNKNOWN_KEYS: Final[dict[str, JsonValue]] = {"additionalProperties": {"type": "null"}}
"""For the JSON Schema of an object whose keys `check_keys` checks. A key with the value null counts as absent."""
_MAX_NAME_CHARS: Final = 40
_NOT_IN_HEADERS: Final = re.compile(r"[^\w.\[\]-]", re.ASCII)
Body = TypeVar("Body", bound="JsonBody")


class JsonBody(BaseModel):
    """A request body. `check_keys` handles unknown keys unless their value is null or `ignored_keys` has them.

    Attributes:
        tag: Names its dialect if bodies of several dialects share a path.
        ignored_keys: Keys that are accepted and ignored, with the reason.
        nested_keys: Fields that hold an object or a list with objects, and the keys of these objects.
        param_names: Field names in engine errors, mapped to the names in this body.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    tag: ClassVar[str] = DEFAULT_TAG
    ignored_keys: ClassVar[Mapping[str, str]] = {}
    nested_keys: ClassVar[Mapping[str, Collection[str]]] = {}
    param_names: ClassVar[Mapping[str, str]] = {}

    def field_names(self) -> Mapping[str, str]:
        """Maps field names in engine errors to the names in this body (EngineError.name_fields)."""
        return self.param_names

    def body_request_id(self) -> str | None:
        """Returns the request id in the body; None: use the header x-request-id."""
        return None

    def check_keys(self, sent: Mapping[str, Any], other_fields: Collection[str] | None) -> list[str]:
        """Returns the unknown keys that may be ignored, such as `foo` or `inputs[].foo`. Removes all unknown keys.

        Args:
            sent: The body as the client sent it.
            other_fields: Fields of other routes, which have no use here. None: no unknown key may be ignored.

        Raises:
            RequestValidationError: A key is a field of another route, differs from a field of this body by at most
                two edits, or may not be ignored; or there are more than MAX_IGNORED_FIELDS unknown keys.
        """
        extra = self.model_extra or {}
        fields = self.field_keys() if extra else []
        unknown: list[tuple[str, str, Sequence[str]]] = [
            (name, name, fields) for name, value in extra.items() if value is not None and name not in self.ignored_keys
        ]
        extra.clear()
        unknown += self._unknown_nested_keys(sent)
        if other_fields is not None and len(unknown) > MAX_IGNORED_FIELDS:
            path, _, known = unknown[0]
            reason = (
                f"is one of {len(unknown)} unknown fields, of which at most {MAX_IGNORED_FIELDS} are ignored; leave "
                f"them out. This request takes {quote_names(known)}"
            )
            error = {"type": "unknown_key", "loc": ("body", self.tag, quote_names((path,))), "msg": reason}
            raise RequestValidationError([error])
        if other_fields is None:
            wrong = unknown
        else:
            wrong = [key for key in unknown if key[0] in other_fields or _closest(key[1], key[2])]
        if wrong:
            errors = [
                {"type": "unknown_key", "loc": ("body", self.tag, quote_names((path,))), "msg": _hint(name, known)}
                for path, name, known in wrong[:MAX_SHOWN_ERRORS]
            ]
            # Other keys are only counted: making messages for a million keys would take minutes.
            raise RequestValidationError(errors + errors[-1:] * (len(wrong) - len(errors)))
        return [path for path, _, _ in unknown]

    @classmethod
    def field_keys(cls) -> list[str]:
        """Returns the keys of all fields: the alias of a field if it has one, else its name."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    def _unknown_nested_keys(self, sent: Mapping[str, Any]) -> Iterator[tuple[str, str, Sequence[str]]]:
        """Yields path, name and the known keys of each unknown key in `nested_keys`."""
        for field, known in self.nested_keys.items():
            value = sent.get(field)
            if value is None or getattr(self, field) is None:  # chats in `input` are moved to `messages`
                continue
            entries = value if isinstance(value, list) else [value]
            if not entries or isinstance(entries[0], int):  # a list of token ids
                continue
            names = {name for entry in entries if isinstance(entry, dict) for name in entry if entry[name] is not None}
            for name in sorted(names.difference(known)):
                yield f"{field}[].{name}" if isinstance(value, list) else f"{field}.{name}", name, [*known]

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Returns the JSON Schema. It allows no unknown keys: generated clients should not send keys without effect."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        schema |= NO_UNKNOWN_KEYS
        for name, reason in cls.ignored_keys.items():
            schema["properties"].setdefault(name, {"description": f"Accepted and ignored: {reason}"})
        return schema


def _note_unknown_keys(body: JsonBody, sent: Any, scope: Scope) -> None:
    """Handles the unknown keys of a body as --unknown-fields states. See JsonBody.check_keys for errors."""
    state = scope["app"].state
    policy = state.context.settings.unknown_fields
    names = body.check_keys(sent, None if policy == "reject" else state.routes.field_keys)
    if names and policy == "warn":
        state_of(scope).ignored_fields = [_NOT_IN_HEADERS.sub("?", name[:_MAX_NAME_CHARS]) for name in names]


def parse_as(schema: type[Body], body: object, scope: Scope) -> Body:
    """Returns a body as `schema`. Raises RequestValidationError; see `invalid_body_error` and `JsonBody.check_keys`."""
    try:
        checked = schema.model_validate(body)
    except ValidationError as error:
        raise invalid_body_error(error, body) from error
    _note_unknown_keys(checked, body, scope)
    return checked


class BodyParser:
    """Parses the bodies of one route.

    Args:
        annotation: Annotation of the route's parameter `body`: a schema, a union with a discriminator, or dict.

    Attributes:
        tag_of: Maps a body to the tag of its dialect.
        field_keys: Keys of all fields of its schemas.
    """

    def __init__(self, annotation: Any) -> None:
        adapter = TypeAdapter[Any](annotation)
        self._validate = adapter.validator.validate_python
        self._has_schema = adapter.core_schema["type"] != "dict"
        self.tag_of = tag_rule(annotation)
        self.field_keys = frozenset(key for schema in _schemas(annotation) for key in schema.field_keys())

    def parse(self, value: Any, scope: Scope) -> Any:
        """Returns a body, or a dict if there is no schema. Raises RequestValidationError; see `parse_as`."""
        try:
            body = self._validate(value)
        except ValidationError as error:
            raise invalid_body_error(error, value) from error
        if self._has_schema and (body.__pydantic_extra__ or body.nested_keys):
            _note_unknown_keys(body, value, scope)
        return body


def _schemas(annotation: Any) -> Iterator[type[JsonBody]]:
    """Yields the schemas of an annotation; see BodyParser."""
    if isinstance(annotation, type) and issubclass(annotation, JsonBody):
        yield annotation
    for part in get_args(annotation):
        yield from _schemas(part)


def invalid_body_error(error: ValidationError, body: object) -> RequestValidationError:
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


def by_keys(tags: Mapping[str, str], *, otherwise: str) -> Discriminator:
    """Returns a discriminator: the tag of the first of these keys with a value other than null, or else `otherwise`."""

    def tag_of(body: Any) -> str:
        if not isinstance(body, dict):
            return otherwise
        return next((tag for key, tag in tags.items() if body.get(key) is not None), otherwise)

    return Discriminator(tag_of)


def _hint(name: str, known: Sequence[str]) -> str:
    meant = _closest(name, known)
    return (
        f"is not known here; did you mean {meant}? Otherwise leave it out"
        if meant
        else f"has no use here; leave it out. This request takes {quote_names(known)}"
    )


def _closest(name: str, known: Sequence[str]) -> str | None:
    """Returns the first known key that a typing error may have changed to `name`.

    A typing error is up to two edits. Below five characters it is one edit, because most short words are that similar.
    """
    for edits in (1, 2):
        for key in known:
            shorter = min(len(name), len(key))
            if shorter > 2 * edits and abs(len(name) - len(key)) <= edits and _is_within(name, key, edits):
                return key
    return None


def _is_within(a: str, b: str, edits: int) -> bool:
    """Returns whether the Damerau-Levenshtein distance of two texts is at most `edits`."""
    if a and b and a[0] == b[0]:
        return _is_within(a[1:], b[1:], edits)
    if not (a and b and edits):
        return max(len(a), len(b)) <= edits
    return (
        _is_within(a[1:], b[1:], edits - 1)
        or _is_within(a[1:], b, edits - 1)
        or _is_within(a, b[1:], edits - 1)
        or (a[:2] == b[1::-1] and _is_within(a[2:], b[2:], edits - 1))
    )
