"""Reads settings from the command line, the environment and a file into the dataclasses that declare them."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from penstock.engine.protocol.setting import Setting, parse_size, setting_of, shown_size

ENV_PREFIX: Final = "PENSTOCK_"
_WORDS: Final = {
    **dict.fromkeys(("true", "t", "1", "yes", "y", "on"), True),
    **dict.fromkeys(("false", "f", "0", "no", "n", "off"), False),
}
_MAX_COMPARED_CHARS: Final = 64
SettingsT = TypeVar("SettingsT")


class CommandError(Exception):
    """The command failed. The message is one line with the remedy."""

    exit_code = 1


class UsageError(CommandError):
    """The command line, the environment or the configuration file has an invalid value."""

    exit_code = 2


class DeclaredSetting(NamedTuple):
    """A setting of a command.

    Attributes:
        name: Name of the field and key in the file.
        kind: Type of its values, without None.
        default: Its default; MISSING if it is required.
        setting: Help text, bounds and metavar.
        is_secret: Whether its value is never shown.
    """

    name: str
    kind: type
    default: Any
    setting: Setting
    is_secret: bool

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is dataclasses.MISSING

    @property
    def is_list(self) -> bool:
        """Whether its value is a list of texts. The flag may then be given several times."""
        return self.kind is tuple

    @property
    def metavar(self) -> str:
        """Metavar for its value, or its choices; empty for true or false."""
        if self.setting.metavar:
            return self.setting.metavar
        return "{" + ",".join(self.setting.choices) + "}" if self.setting.choices else ""

    @property
    def shown_default(self) -> str:
        """The default as text; empty if it is required or if the help text states the default."""
        if self.is_required or "default:" in self.setting.help.lower():
            return ""
        if self.default in (None, (), {}):
            return "none"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if self.setting.parse is parse_size:
            return shown_size(self.default)
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def convert(self, value: object) -> Any:
        """Converts a value of the command line, the environment or a file to the type of the field.

        Raises:
            ValueError: The value is invalid. The message states the allowed values.
        """
        value = self.setting.parse(value) if self.setting.parse is not None else _in_type(value, self.kind)
        if (broken_rule := self.setting.broken_rule(value)) is not None:
            raise ValueError(broken_rule)
        return value


def environment_variable(name: str) -> str:
    """Returns the environment variable of a setting: PENSTOCK_MAX_BODY_BYTES for `max_body_bytes`."""
    return ENV_PREFIX + name.upper()


def flag_of(name: str) -> str:
    """Returns the flag of a setting: --max-body-bytes for `max_body_bytes`."""
    return "--" + name.replace("_", "-")


@cache
def _type_hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)


def declared_settings(kind: Any) -> Mapping[str, DeclaredSetting]:
    """Returns the settings that a dataclass declares, with those of nested configurations."""
    return _declared_settings(kind)


@cache  # not on the public function: mypy does not accept dataclasses as arguments of a cached function
def _declared_settings(kind: Any) -> Mapping[str, DeclaredSetting]:
    found: dict[str, DeclaredSetting] = {}
    hints = _type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        setting = setting_of(field)
        if setting is None and dataclasses.is_dataclass(hint):
            found |= declared_settings(hint)
        elif setting is not None:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            found[field.name] = DeclaredSetting(field.name, _plain_type(hint), default, setting, not field.repr)
    return MappingProxyType(found)


def load_settings(
    kind: type[SettingsT],
    flags: Mapping[str, Any],
    *,
    positional: Collection[str] = (),
    file: Mapping[str, Any] = MappingProxyType({}),
    file_location: str = "",
    base: SettingsT | None = None,
    compat: Mapping[str, tuple[str, Any]] = MappingProxyType({}),
) -> SettingsT:
    """Builds settings from flags, the environment, a file and the defaults. Earlier sources have precedence.

    Args:
        kind: The dataclass that declares them.
        flags: Values of flags by name.
        positional: Settings that are positional arguments on the command line.
        file: Values of the file by name.
        file_location: Prefix of names of file values in messages.
        base: Settings to use instead of the environment and the defaults.
        compat: Variables and values of another server, by name of the setting; after the own variables.

    Raises:
        UsageError: A value is invalid or missing. The message names the flag, the variable or the key of the file.
    """
    values: dict[str, Any] = {}
    for name, declared in declared_settings(kind).items():
        word = name.upper() if name in positional else flag_of(name)
        variable = environment_variable(name)
        if name in flags:
            source, value = word, flags[name]
        elif base is None and is_set(variable, declared):
            source, value = variable, os.environ[variable]
        elif name in compat:
            source, value = compat[name]
        elif name in file:
            source, value = file_location + name, file[name]
        elif base is None and declared.is_required:
            raise UsageError(f"{word} is required (or set {variable})")
        else:
            continue
        try:
            values[name] = declared.convert(value)
        except ValueError as error:
            raise invalid_value(source, error, value, is_secret=declared.is_secret) from error
    built: SettingsT = _built(kind, values, base)
    return built


def public_values(settings: Any) -> dict[str, Any]:
    """Returns all settings by name, with those of nested configurations, without secrets."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if setting_of(field) is None and dataclasses.is_dataclass(value):
            values |= public_values(value)
        elif setting_of(field) is not None and field.repr:
            values[field.name] = value
    return values


def did_you_mean(name: str, known: Iterable[str], min_similarity: float = 0.6) -> str:
    """Returns "; did you mean NAME?" if an unknown name is similar to a known one, or else "".

    `-` and `_` count as equal. `min_similarity` is difflib's, from 0 to 1.
    """
    names = {each.replace("-", "_"): each for each in known}
    # The comparison takes time in proportion to the length.
    is_short = len(name) <= _MAX_COMPARED_CHARS
    near = difflib.get_close_matches(name.replace("-", "_"), names, 1, min_similarity) if is_short else []
    return f"; did you mean {names[near[0]]}?" if near else ""


def unknown_variables(kinds: Collection[type]) -> list[str]:
    """Returns the PENSTOCK_ variables of the environment that are not settings of `kinds`, such as misspelt ones."""
    known = {environment_variable(name) for kind in kinds for name in declared_settings(kind)}
    return sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known)


def is_set(variable: str, declared: DeclaredSetting) -> bool:
    """Whether the environment sets it. Empty variables count only for secrets: otherwise the server would be open."""
    return bool(os.environ.get(variable)) or (declared.is_secret and variable in os.environ)


def _plain_type(hint: Any) -> type:
    """Returns a type without None and type arguments: `tuple` for `tuple[str, ...] | None`."""
    if type(None) in get_args(hint):
        hint = next(option for option in get_args(hint) if option is not type(None))
    plain: type = get_origin(hint) or hint
    return plain


def _built(kind: Any, values: Mapping[str, Any], base: Any) -> Any:
    """Returns an instance of a dataclass with some values. Other fields have the values of `base` or defaults."""
    changes: dict[str, Any] = {}
    hints = _type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if setting_of(field) is not None:
            if field.name in values:
                changes[field.name] = values[field.name]
        elif dataclasses.is_dataclass(hint):  # its field name may equal a setting, such as `cache`
            assert field.default_factory is not dataclasses.MISSING
            inner = field.default_factory() if base is None else getattr(base, field.name)
            changes[field.name] = _built(hint, values, inner)
    return kind(**changes) if base is None else dataclasses.replace(base, **changes)


def _in_type(value: Any, kind: type) -> Any:
    """Converts a value to a type. Raises ValueError that names the expected type."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and (word := _WORDS.get(value.strip().lower())) is not None:
            return word
        raise ValueError("must be true or false")
    if kind in (int, float):
        try:
            number = kind(value) if isinstance(value, str) or is_number else None
        except (ValueError, OverflowError):
            number = None
        if number is None or (is_number and number != value):
            raise ValueError("must be a whole number" if kind is int else "must be a number")
        return number
    if kind is tuple:
        return split_list(value)
    if not isinstance(value, str | Path):
        raise ValueError("must be a text")
    return kind(value)


def split_list(value: object) -> tuple[str, ...]:
    """Splits `a,b` and flattens repeated flags into one list of texts. Raises ValueError for other values."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ValueError("must be a list of texts")
    return tuple(name.strip() for part in parts for name in part.split(",") if name.strip())


def invalid_value(source: str, error: ValueError, value: object, *, is_secret: bool) -> UsageError:
    """Returns the error for a value of a flag, a variable or a key of a file. The message hides secret values."""
    got = "" if is_secret else f" (got {shown_value(value)})"
    return UsageError(f"{source}: {error}{got}")


def shown_value(value: object) -> str:
    """Returns the value as Python text, for messages; cut after 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
