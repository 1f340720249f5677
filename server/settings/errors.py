"""Errors of commands: one line, and the exit code that goes with it."""

from __future__ import annotations


class CommandError(Exception):
    """The command could not do its work; the message is one line that says what to do."""

    exit_code = 1


class UsageError(CommandError):
    """The command line or the environment holds a wrong value."""

    exit_code = 2
