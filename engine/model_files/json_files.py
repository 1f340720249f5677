"""JSON files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..protocol.errors import ModelLoadError


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file; None where there is no such file.

    Raises:
        ModelLoadError: The file is not valid JSON or cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; an empty one where there is no such file.

    Raises:
        ModelLoadError: The file is not valid JSON or holds something else.
    """
    value = read_json(path)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value
