"""Says in one line why a model cannot be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...model_files.json_files import as_load_error, one_line
from ...protocol.errors import ModelLoadError
from ...protocol.model_info import ModelInfo
from ..runner import DeviceMemoryError


@contextmanager
def load_errors(info: ModelInfo) -> Iterator[None]:
    """Says in one line, as a ModelLoadError, why a model cannot be built, or why it cannot run."""
    with as_load_error(f"{info.name} cannot be built from {info.path}, its config.json and its weights"):
        try:
            yield
        except (DeviceMemoryError, MemoryError) as error:
            raise ModelLoadError(
                f"There is too little memory on {info.device} for {info.name} in {info.dtype} ({one_line(error)}): "
                "free some, or take a narrower --dtype or a smaller model."
            ) from error
