"""JSON that people have written, in files and on the command line: parsed within bounds that every use of it bears."""

from __future__ import annotations

import json
import math
from typing import Any, Final

_MAX_DEPTH: Final = 50
"""Objects and lists in each other: several times what any model has, and far below what parsers and copies bear."""
_MAX_DIGITS: Final = 19
"""Of integers, which travel in 64 bits."""


def parse_json(text: str) -> Any:
    """Returns the value that a JSON text holds.

    Raises:
        ValueError: It is no JSON, is nested too deeply, or holds an integer or a character that no message can carry.
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


def _integer(digits: str) -> int | float:
    """Returns an integer; as a float where no message can carry it, as what transformers writes for "no limit"."""
    if len(digits) < _MAX_DIGITS:
        return int(digits)
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:_MAX_DIGITS]}... is too large for any use")
    return value


def _nesting_error() -> ValueError:
    return ValueError(f"objects and lists are nested more than {_MAX_DEPTH} deep, which no model needs")
