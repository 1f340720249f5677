"""Declares configuration fields with help text, metavar and bounds.

`setting(...)` declares a field and `check_settings` checks its value. The server derives flags, environment variables,
keys of the configuration file and the reference page from the declarations.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any, Final

REQUIRED: Final = dataclasses.MISSING
_KEY: Final = "setting"
_SIZE: Final = re.compile(r"(\d*\.?\d+)\s*(?:([kmgtpe])(i?)b?|b)?", re.IGNORECASE)
_MAX_DEPTH: Final = 50
"""Levels of nested objects and lists. No model needs more, and recursive code can handle them."""
_MAX_DIGITS: Final = 19
"""Integers with fewer digits fit into 64 bits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A field that an operator may set.

    Attributes:
        help: Help text. It ends with "default: ..." if the default is not a plain value.
        group: Heading of the help text that lists the field.
        metavar: Placeholder of the value in the help text; empty for booleans and for fields with choices.
        choices: Allowed values; empty: any.
        min_value: Minimum; None: no minimum.
        exclusive_min: Exclusive minimum; None: no minimum.
        max_value: Maximum; None: any finite number.
        rule: Checks a value. Returns a text such as "must be cpu or cuda" for an invalid value, None for a valid one.
        parse: Converts a text or a value of the configuration file, for types without a standard conversion. Raises
            ValueError.
    """

    help: str
    group: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    min_value: float | None = None
    exclusive_min: float | None = None
    max_value: float | None = None
    rule: Callable[[Any], str | None] | None = None
    parse: Callable[[Any], Any] | None = None

    def broken_rule(self, value: Any) -> str | None:
        """Returns the rule that a value breaks, such as "must be at least 1"; None for a valid value and for None."""
        if value is None:
            return None
        if self.choices and value not in self.choices:
            return f"must be {listed_choices(self.choices)}"
        if self.rule is not None:
            return self.rule(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if self.max_value is None and not math.isfinite(value):
            return "must be a finite number"
        if self.min_value is not None and not value >= self.min_value:
            return f"must be at least {self.min_value}"
        if self.exclusive_min is not None and not value > self.exclusive_min:
            return f"must be above {self.exclusive_min}"
        if self.max_value is not None and not value <= self.max_value:
            return f"must be at most {self.max_value}"
        return None


def setting(
    default: Any, text: str, group: str, metavar: str = "", *, is_secret: bool = False, **rest: Any
) -> Any:  # Any, as for `dataclasses.field`: the result is assigned to fields of every type
    """Returns a dataclass field with a Setting.

    Args:
        default: Default value, copied if it is a dictionary. REQUIRED: no default.
        text: Help text.
        group: Heading of the help text that lists the field.
        metavar: Placeholder of the value in the help text.
        is_secret: Leave the value out of the repr.
        **rest: Further attributes of Setting.
    """
    metadata = {_KEY: Setting(help=text, group=group, metavar=metavar, **rest)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, repr=not is_secret, metadata=metadata)


def setting_of(field: dataclasses.Field[Any]) -> Setting | None:
    """Returns the Setting of a field; None if operators cannot set the field."""
    found: Setting | None = field.metadata.get(_KEY)
    return found


def check_settings(config: Any) -> None:
    """Raises ValueError for the first field with an invalid value. The message names the field and a public value."""
    for field in dataclasses.fields(config):
        declared = setting_of(field)
        value = getattr(config, field.name)
        if declared is not None and (broken_rule := declared.broken_rule(value)) is not None:
            shown = repr(value) if field.repr else "invalid"  # the values of secrets are not in the repr
            raise ValueError(f"{field.name} is {shown}; it {broken_rule}.")


def listed_choices(choices: tuple[str, ...]) -> str:
    """Returns choices as in "a, b or c"."""
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))


def parse_size(value: object) -> int:
    """Parses a number of bytes, or a text such as 2GiB or 500MB. Raises ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        raise ValueError("must be a size such as 2GiB or 500MB")
    number, prefix, is_binary = match.groups()
    exponent = "kmgtpe".index(prefix.lower()) + 1 if prefix else 0
    return int(float(number) * (1024 if is_binary else 1000) ** exponent)


def shown_size(num_bytes: int) -> str:
    """Returns a number of bytes as a text that `parse_size` reads, such as 512MiB."""
    exponent = 0
    while num_bytes and num_bytes % 1024 == 0 and exponent < 6:
        num_bytes, exponent = num_bytes // 1024, exponent + 1
    return f"{num_bytes}{'KMGTPE'[exponent - 1]}iB" if exponent else f"{num_bytes}B"


def short_count(count: int) -> str:
    """Returns 22.7M for 22,713,216."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)


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
    """Parses an integer. Returns a float above 64 bits, such as transformers' "no limit"."""
    if len(digits) < _MAX_DIGITS:
        return int(digits)
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:_MAX_DIGITS]}... is too large for any use")
    return value


def _nesting_error() -> ValueError:
    return ValueError(f"objects and lists are nested more than {_MAX_DEPTH} deep, which no model needs")
