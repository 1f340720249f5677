"""Parses JSON written by people, in files and on the command line, with limits on nesting and on integers."""

from __future__ import annotations

import json
import math
from typing import Any, Final

_MAX_DEPTH: Final = 50
"""Nested objects and lists. No model needs as many, and recursive code can handle them."""
_MAX_DIGITS: Final = 19
"""Integers with fewer digits fit into 64 bits."""


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text.

    Raises:
        ValueError: Invalid JSON, too deep nesting, or an integer or character that no message can carry.
    """
    try:
        value = json.loads(text, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    except RecursionError:
        raise _nesting_error() from None
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if level:
        raise _nesting_error()
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a \\u escape names half of a character") from None
    return value


def json_object(value: object) -> dict[str, Any]:
    """Returns a JSON object; a text is parsed first. Raises ValueError for anything else."""
    if isinstance(value, str):
        value = parse_json(value)
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, not {type(value).__name__}")
    return value


def _integer(digits: str) -> int | float:
    """Returns an integer, or a float if it needs more than 64 bits, as transformers' value for "no limit" does."""
    if len(digits) < _MAX_DIGITS:
        return int(digits)
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:_MAX_DIGITS]}... is too large for any use")
    return value


def _nesting_error() -> ValueError:
    return ValueError(f"objects and lists are nested more than {_MAX_DEPTH} deep, which no model needs")
