"""Says in one line why a model cannot be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ...model_files.model_folder import as_load_error, one_line
from ...protocol.errors import MachineError
from ...protocol.model_info import ModelInfo
from ..runner import DeviceMemoryError

_LEFT_OUT: Final = ("torch", "transformers")
"""Packages that an installation may lack: encoders that the C library runs whole need neither."""


@contextmanager
def load_errors(info: ModelInfo) -> Iterator[None]:
    """Says in one line, as a ModelLoadError, why a model cannot be built, or why it cannot run."""
    with as_load_error(f"{info.name} cannot be built from {info.path}, its config.json and its weights"):
        try:
            yield
        except (DeviceMemoryError, MemoryError) as error:
            raise MachineError(
                f"There is too little memory on {info.device} for {info.name} in {info.dtype} ({one_line(error)}): "
                "free some, or take a narrower --dtype or a smaller model."
            ) from error


@contextmanager
def needs_torch(name: str, why: str) -> Iterator[None]:
    """Says in one line that a model needs torch or transformers where one of them is imported and not installed.

    Args:
        name: Name of the model in messages.
        why: The part of the model that needs them; the end of a sentence.

    Raises:
        MachineError: See above.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _LEFT_OUT:
            raise
        raise MachineError(
            f"{name} needs {error.name}, which is not installed: {why}. Run `pip install torch transformers`, or take "
            "the image that has them: penstock in the place of penstock:slim."
        ) from error
