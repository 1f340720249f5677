"""Settings as flags of argparse, in the groups of the help."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from ..settings import GROUPS, UsageError, declared_settings, environment_variable, flag_of


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


def add_flags(parser: argparse.ArgumentParser, kind: type, *, positional: str = "", nargs: str = "?") -> None:
    """Adds one flag for every setting of a command. Values stay text, which `load` converts and checks.

    Args:
        parser: Of the command.
        kind: The dataclass of its settings.
        positional: The setting that may stand without a flag; empty for none.
        nargs: How often it may stand there, as argparse says it.
    """
    settings = declared_settings(kind).values()
    for title in GROUPS:
        if not any(each.setting.group == title for each in settings):
            continue
        group = parser.add_argument_group(title)
        for each in settings:
            if each.setting.group != title:
                continue
            default = " (required)" if each.is_required else each.shown_default and f" (default: {each.shown_default})"
            text = f"{each.setting.help}{default} [{environment_variable(each.name)}]".replace("%", "%%")
            options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
            if each.name == positional:
                group.add_argument(each.name, metavar=each.metavar, nargs=nargs, **options)
            elif each.kind is bool:
                group.add_argument(flag_of(each.name), dest=each.name, action=argparse.BooleanOptionalAction, **options)
            else:
                action = "append" if each.is_list else "store"
                group.add_argument(flag_of(each.name), dest=each.name, action=action, metavar=each.metavar, **options)
