"""JsonBody, the base class of request bodies, and its rule for unknown keys: a typing error is an error."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from ..errors import DEFAULT_TAG, MAX_SHOWN_ERRORS, quote_names

MAX_IGNORED_FIELDS: Final = 32
"""A body with more unknown keys is rejected: comparing each with all known keys takes 10 us per pair."""


class JsonBody(BaseModel):
    """A request body. `check_keys` handles unknown keys unless their value is null or `ignored_keys` has them.

    Attributes:
        tag: Names its dialect if bodies of several dialects share a path.
        ignored_keys: Keys that are accepted and ignored, with the reason.
        nested_keys: Fields that hold an object or a list with objects, and the keys of these objects.
        param_names: See `field_names`.
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
                two edits, or may not be ignored.
        """
        extra = self.model_extra or {}
        fields = self.field_keys() if extra else []
        unknown: list[tuple[str, str, Sequence[str]]] = [
            (name, name, fields) for name, value in extra.items() if value is not None and name not in self.ignored_keys
        ]
        extra.clear()
        unknown += self._unknown_nested_keys(sent)
        if other_fields is None or len(unknown) > MAX_IGNORED_FIELDS:
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
        """Returns the keys of all fields."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    def _unknown_nested_keys(self, sent: Mapping[str, Any]) -> Iterator[tuple[str, str, Sequence[str]]]:
        """Yields path, name and the known keys of each unknown key in `nested_keys`."""
        for field, known in self.nested_keys.items():
            value = sent.get(field)
            if value is None or getattr(self, field) is None:  # chats in `input` are moved to `messages`
                continue
            entries = value if isinstance(value, list) else [value]
            if not entries or isinstance(entries[0], str | int):  # a list of texts or of token ids
                continue
            names = {name for entry in entries if isinstance(entry, dict) for name in entry if entry[name] is not None}
            for name in sorted(names.difference(known)):
                yield f"{field}[].{name}" if isinstance(value, list) else f"{field}.{name}", name, [*known]

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Returns the JSON Schema. It allows no unknown keys: generated clients should not send keys without effect."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        schema["additionalProperties"] = {"type": "null"}
        for name, reason in cls.ignored_keys.items():
            schema["properties"].setdefault(name, {"description": f"Accepted and ignored: {reason}"})
        return schema


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
