"""The error and the exit code of a command that cannot load its model."""

from __future__ import annotations

from penstock.engine.model_files.model_folder import is_local
from penstock.engine.protocol.errors import MachineError, ModelLoadError

from ..settings import CommandError, UsageError


def exit_code_of(error: Exception, model: str, revision: str | None, otherwise: int) -> int:
    """Returns the exit code of a command that cannot load its model: 2 if a local folder is missing or broken.

    Args:
        error: The error of the load.
        model: Local folder or hub id.
        revision: Revision of a hub id.
        otherwise: The code for a hub id, a machine that lacks something, or an unexpected error.
    """
    is_of_files = isinstance(error, ModelLoadError) and not isinstance(error, MachineError)
    return UsageError.exit_code if is_of_files and is_local(model, revision) else otherwise


def load_failure(error: ModelLoadError, model: str, revision: str | None) -> CommandError:
    """Returns the error of a command that cannot load its model, with the exit code of `exit_code_of`."""
    code = exit_code_of(error, model, revision, CommandError.exit_code)
    return (UsageError if code == UsageError.exit_code else CommandError)(error.message)
