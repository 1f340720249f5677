"""Converts errors of loading a model to a ModelLoadError with a one-line message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ...model_files.model_folder import as_load_error, one_line
from ...protocol.errors import MachineError
from ...protocol.model_info import ModelInfo
from ..runner import DeviceMemoryError

_OPTIONAL_PACKAGES: Final = ("torch", "transformers")
"""Packages that an installation may lack: models of the C library need neither."""


@contextmanager
def load_errors(info: ModelInfo) -> Iterator[None]:
    """Converts errors of building or running a model to ModelLoadError."""
    with as_load_error(f"{info.name} cannot be built from {info.path}, its config.json and its weights"):
        try:
            yield
        except (DeviceMemoryError, MemoryError) as error:
            raise MachineError(
                f"There is too little memory on {info.device} for {info.name} in {info.dtype} ({one_line(error)}): "
                "free some, or use a narrower --dtype or a smaller model."
            ) from error


@contextmanager
def needs_torch(name: str, why: str) -> Iterator[None]:
    """Raises MachineError if the context imports torch or transformers and it is not installed.

    Args:
        name: Name of the model in messages.
        why: Reason why the model needs the package; the end of a sentence.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _OPTIONAL_PACKAGES:
            raise
        raise MachineError(
            f"{name} needs {error.name}, which is not installed: {why}. Run `pip install 'penstock[torch]'`, or use "
            "the image penstock instead of penstock:slim."
        ) from error
