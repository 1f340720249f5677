"""Settings fields as argparse flags, and wrong values as one line that names the flag or the variable at fault."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeAlias, TypeVar, get_args

from pydantic import ByteSize, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings

from ..settings import UsageError, environment_variable, is_in_environment
from .help_groups import HELP_GROUPS

_PLAIN: Final = {
    "int_parsing": "must be a whole number",
    "float_parsing": "must be a number",
    "bool_parsing": "must be true or false",
}
"""pydantic's kinds of errors whose own words are for programmers."""
SettingsT = TypeVar("SettingsT", bound=BaseSettings)
_Group: TypeAlias = argparse._ArgumentGroup  # the type that add_argument_group returns has no public name


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line instead of the usage and a line."""

    def parse_known_args(  # type: ignore[override]  # typeshed has overloads by the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """See argparse. Raises UsageError for a misspelt flag and suggests the nearest one."""
        found, extras = super().parse_known_args(args, namespace)
        for flag in extras:
            name, known = flag.partition("=")[0], self._option_string_actions
            if name.startswith("--") and (near := difflib.get_close_matches(name.replace("_", "-"), known, n=1)):
                self.error(f"unrecognized argument: {name}; did you mean {near[0]}?")
        return found, extras

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(message)


def flag_of(field: str) -> str:
    """Returns the flag of a settings field."""
    return "--" + field.replace("_", "-")


def add_flags(
    parser: argparse.ArgumentParser, settings: type[BaseSettings], *, positional: str = "", nargs: str = "?"
) -> None:
    """Adds one flag for every field of `settings`, in the groups of HELP_GROUPS.

    Values stay text: the settings class checks them.

    Args:
        parser: Of one command.
        settings: Its settings class.
        positional: The field that may stand without a flag; empty for none.
        nargs: How often it may stand there, as argparse says it.
    """
    for title, words in HELP_GROUPS.items():
        fields = {name: word for name, word in words.items() if name in settings.model_fields}
        if fields:
            group = parser.add_argument_group(title)
            for name, word in fields.items():
                _add_flag(group, name, word, settings.model_fields[name], nargs if name == positional else None)


def _add_flag(group: _Group, name: str, word: str, info: FieldInfo, nargs: str | None) -> None:
    text = f"{info.description}{_default_text(info)} [{environment_variable(name)}]".replace("%", "%%")
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
    if nargs is not None:
        group.add_argument(name, metavar=word, nargs=nargs, **options)
    elif "bool" in str(info.annotation):
        group.add_argument(flag_of(name), dest=name, action=argparse.BooleanOptionalAction, **options)
    else:
        action = "append" if "tuple" in str(info.annotation) else "store"
        metavar = word or "{" + ",".join(get_args(info.annotation)) + "}"
        group.add_argument(flag_of(name), dest=name, action=action, metavar=metavar, **options)


def _default_text(info: FieldInfo) -> str:
    """Returns the default, unless the description tells it."""
    if info.is_required():
        return " (required)"
    if "default:" in str(info.description).lower():
        return ""
    default = info.default
    if isinstance(default, bool):
        shown = "on" if default else "off"
    elif isinstance(default, ByteSize):
        shown = default.human_readable().replace(".0", "")
    elif isinstance(default, float):
        shown = f"{default:g}"
    else:
        shown = str(default or "none")
    return f" (default: {shown})"


def load(
    settings: type[SettingsT],
    given: dict[str, Any],
    *,
    positional: Collection[str] = (),
    file: Mapping[str, Any] = MappingProxyType({}),
    file_name: str = "",
) -> SettingsT:
    """Builds `settings` from the flags that were given, the environment, a file and the defaults, in this order.

    Args:
        settings: The settings class.
        given: Values of the flags on the command line, by field.
        positional: Fields that the command line takes without a flag.
        file: Values of the file, by field.
        file_name: Of the file, for messages.

    Raises:
        UsageError: A value is wrong or missing; the message names the flag, the variable or the file that it came from.
    """
    left = {field: value for field, value in file.items() if not is_in_environment(field)}
    try:
        return settings(**{**left, **given})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0])
        flag = field.upper() if field in positional else flag_of(field)
        if first["type"] == "missing":
            raise UsageError(f"{flag} is required (or set {environment_variable(field)})") from error
        place = f"{file_name}: {field}" if field in left else environment_variable(field)
        raise UsageError(f"{flag if field in given else place}: {reason_of(first)}") from error


def reason_of(error: ErrorDetails) -> str:
    """Returns what pydantic finds wrong with a value, and the value."""
    said = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    return f"{_PLAIN.get(error['type'], said)} (got {_shown(error['input'])})"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
