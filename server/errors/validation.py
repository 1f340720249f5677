"""pydantic's list of errors as one readable sentence that names the field and the value."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ..wire.json_bodies import MAX_SHOWN_ERRORS, TAGS
from ..wire.shown_values import shown, shown_names


def explain(errors: Sequence[Any], given: Collection[str] | None) -> tuple[str, str | None]:
    """Returns the message for the errors of one body, and the name of the first field at fault.

    Args:
        errors: pydantic's error dictionaries.
        given: The keys that the body has; None where it could not be parsed.
    """
    messages = [_sentence(error, given or ()) for error in errors[:MAX_SHOWN_ERRORS]]
    more = len(errors) - len(messages)
    if more > 0:
        messages.append(f"and {more} more.")
    return " ".join(messages), _field(_untagged(errors[0]["loc"])[:2]) or None


def _sentence(error: dict[str, Any], given: Collection[str]) -> str:
    kind, field = error["type"], _field(_untagged(error["loc"]))
    if kind == "json_invalid":
        return f"The body is not valid JSON: {error['ctx']['error']} (byte {error['loc'][-1]})."
    if not field:
        if kind == "missing":
            return "The body is empty; send a JSON object."
        return f"The body must be a JSON object, not {shown(error['input'])}."
    if kind == "missing":
        return f"{field} is missing; the body {f'has {shown_names(given)}' if given else 'is empty'}."
    reason = error["msg"].removeprefix("Value error, ").removesuffix(".")  # one: names that go on end in three
    if kind in ("value_error", "unknown_key", "empty_text"):
        return f"{field} {reason}."
    return f"{field}: {reason}, not {shown(error['input'])}."


def _untagged(loc: Sequence[str | int]) -> list[str | int]:
    """Returns the place of an error without the dialect of the body, which pydantic puts into it."""
    return [part for part in loc if part not in TAGS]


def _field(loc: Sequence[str | int]) -> str:
    """Returns `documents[3].text` for ("body", "documents", 3, "text")."""
    path = ""
    for part in loc[1:]:
        if isinstance(part, int):
            path += f"[{part}]" if path else ""
        else:
            path += f".{part}" if path else part
    return path
