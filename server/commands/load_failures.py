"""The exit code of a command whose model cannot be loaded."""

from __future__ import annotations

from penstock.engine.model_files.hub import is_local
from penstock.engine.protocol.errors import MachineError, ModelLoadError

from ..settings import CommandError, UsageError


def exit_code_of(error: Exception, model: str, revision: str | None, otherwise: int) -> int:
    """Returns 2 where a local folder is missing or broken, else `otherwise`.

    Args:
        error: Why the model cannot be loaded.
        model: Local folder or hub id.
        revision: Of a hub id.
        otherwise: For a hub id, a machine that lacks something, or an unexpected error.
    """
    is_of_files = isinstance(error, ModelLoadError) and not isinstance(error, MachineError)
    return UsageError.exit_code if is_of_files and is_local(model, revision) else otherwise


def load_failure(error: ModelLoadError, model: str, revision: str | None) -> CommandError:
    """Returns the error of a command that cannot load its model; see exit_code_of."""
    code = exit_code_of(error, model, revision, CommandError.exit_code)
    return (UsageError if code == UsageError.exit_code else CommandError)(error.message)
