"""Settings fields as argparse flags, and wrong values as one line that names the flag or the variable at fault."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from ..settings import UsageError, environment_variable

SettingsT = TypeVar("SettingsT", bound=BaseSettings)


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line instead of the usage and a line."""

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(message)


def flag_of(field: str) -> str:
    """Returns the flag of a settings field."""
    return "--" + field.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser, settings: type[BaseSettings], *, skip: Collection[str] = ()) -> None:
    """Adds one flag for every field of `settings`. Values stay text: the settings class checks them."""
    for name, info in settings.model_fields.items():
        if name not in skip:
            _add_flag(parser, name, info)


def _add_flag(parser: argparse.ArgumentParser, name: str, info: FieldInfo) -> None:
    text = f"{info.description} {_default_text(info)}[{environment_variable(name)}]".replace("%", "%%")
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
    if "bool" in str(info.annotation):
        parser.add_argument(flag_of(name), action=argparse.BooleanOptionalAction, **options)
    elif "tuple" in str(info.annotation):
        parser.add_argument(flag_of(name), action="append", metavar="A,B", **options)
    else:
        parser.add_argument(flag_of(name), metavar=name.rsplit("_", 1)[-1].upper(), **options)


def _default_text(info: FieldInfo) -> str:
    if info.is_required():
        return "(required) "
    shown = isinstance(info.default, int | float | str) and not isinstance(info.default, bool)
    return f"(default: {info.default}) " if shown else ""


def load(settings: type[SettingsT], given: dict[str, Any], *, positional: Collection[str] = ()) -> SettingsT:
    """Builds `settings` from the flags that were given, the environment and the defaults, in this order.

    Args:
        settings: The settings class.
        given: Values of the flags on the command line, by field.
        positional: Fields that the command line takes without a flag.

    Raises:
        UsageError: A value is wrong or missing; the message names the flag, or the variable that it came from.
    """
    try:
        return settings(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0])
        flag = field.upper() if field in positional else flag_of(field)
        if first["type"] == "missing":
            raise UsageError(f"{flag} is required (or set {environment_variable(field)})") from error
        place = flag if field in given else environment_variable(field)
        reason = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{place}: {reason} (got {_shown(first['input'])})") from error


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
