"""Reads the JSON files of a model: checked values, and one-line errors that name the file."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ..protocol.errors import EngineError, ModelLoadError
from ..protocol.json_text import parse_json

logger = logging.getLogger("penstock.engine")

LFS_HINT: Final = "is a Git LFS pointer, not the file itself; run `git lfs pull` in the model's folder"
_LFS_START: Final = b"version https://git-lfs.github.com/spec/"
_MAX_SHOWN: Final = 400
# Errors caused by values of a wrong type or an absurd size.
_VALUE_ERRORS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)

# Errors caused by the files, unlike a full disk or too many open files.
_FILE_ERRORS: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file; None if the file does not exist.

    Raises:
        ModelLoadError: The file cannot be read, is a Git LFS pointer, holds null, or is not JSON within bounds; see
            parse_json.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if text.startswith(_LFS_START.decode()):
            raise ModelLoadError(f"{path} {LFS_HINT}.")
        value = parse_json(text)
    except FileNotFoundError:
        if path.is_symlink():
            raise ModelLoadError(f"{path} is a link to a file that does not exist; download the model again.") from None
        return None
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path} cannot be read: it is not UTF-8 text ({error.reason}).") from error
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.") from error
    if value is None:
        raise ModelLoadError(f"{path} holds null instead of a value; download the model again.")
    return value


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is a Git LFS pointer. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(_LFS_START)) == _LFS_START


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; an empty one if the file does not exist.

    Raises:
        ModelLoadError: The file is not valid JSON or holds something else.
    """
    value = read_json(path)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


@contextmanager
def as_load_error(found: str) -> Iterator[None]:
    """Converts unexpected errors caused by broken files to a ModelLoadError of one line.

    Args:
        found: The failed action, with the file or folder at fault.

    Raises:
        ModelLoadError: See above; --log-level debug shows its origin.
    """
    try:
        yield
    except EngineError:
        raise
    except _FILE_ERRORS as error:
        raise ModelLoadError(f"{found}: {error.filename}: {error.strerror or error}.") from error
    except _VALUE_ERRORS as error:
        logger.debug("%s", found, exc_info=True)
        raise ModelLoadError(
            f"{found} ({type(error).__name__}: {one_line(error)}): a value there is damaged or of the wrong kind; "
            "download the model again, or see --log-level debug for the place."
        ) from error


def one_line(error: BaseException) -> str:
    """Returns the message of an error as part of one line, shortened if it is long."""
    text = " ".join(str(error).split())
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + " ..."
