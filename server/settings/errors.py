"""Errors of commands: one line, and the exit code that goes with it."""

from __future__ import annotations

from penstock.engine.model_files.hub import is_local
from penstock.engine.protocol.errors import MachineError, ModelLoadError


class CommandError(Exception):
    """The command could not do its work; the message is one line that says what to do."""

    exit_code = 1


class UsageError(CommandError):
    """The command line or the environment holds a wrong value."""

    exit_code = 2


def exit_code_of(error: Exception, model: str, revision: str | None, otherwise: int) -> int:
    """Returns the exit code of a command that cannot load its model: 2 if a local folder is missing or broken.

    Args:
        error: Why the model cannot be loaded.
        model: Local folder or hub id.
        revision: Of a hub id.
        otherwise: The code for a hub id, a machine that lacks something, or an unexpected error.
    """
    is_of_files = isinstance(error, ModelLoadError) and not isinstance(error, MachineError)
    return UsageError.exit_code if is_of_files and is_local(model, revision) else otherwise


def load_failure(error: ModelLoadError, model: str, revision: str | None) -> CommandError:
    """Returns the error of a command that cannot load its model; see exit_code_of."""
    code = exit_code_of(error, model, revision, CommandError.exit_code)
    return (UsageError if code == UsageError.exit_code else CommandError)(error.message)
