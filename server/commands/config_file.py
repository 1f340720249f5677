"""The TOML file of `--config`: settings at its top, and a table for each model that is to be served."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..settings import ServerSettings, UsageError

MODELS: Final = "models"
ELSEWHERE: Final = {
    "config": "a file names no other file",
    "model": "write a [[models]] table with `model` in it",
    "served_model_name": "write `name` and `aliases` in the [[models]] table",
}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file says.

    Attributes:
        path: Of the file.
        settings: Values of ServerSettings, as TOML has them.
        models: The tables of models, not checked yet.
    """

    path: Path
    settings: Mapping[str, Any]
    models: tuple[Mapping[str, Any], ...]


def read_config(path: Path) -> ConfigFile:
    """Reads a file.

    Raises:
        UsageError: It cannot be read, is no TOML, or has a key that is no setting.
    """
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--config: {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config: {path} is no TOML: {error}") from error
    models = content.pop(MODELS, [])
    if not isinstance(models, list) or not all(isinstance(table, dict) for table in models):
        raise UsageError(f"{path}: {MODELS} must be tables: begin each with a line [[{MODELS}]]")
    for key in content:
        if key in ELSEWHERE:
            raise UsageError(f"{path}: {key} has no place at the top: {ELSEWHERE[key]}")
        if key not in ServerSettings.model_fields:
            raise UsageError(f"{path}: {key} is no setting{suggestion(key, ServerSettings.model_fields)}")
    return ConfigFile(path, content, tuple(models))


def suggestion(key: str, known: Collection[str]) -> str:
    """Returns what may have been meant by a key, as the end of a sentence; empty where nothing is like it."""
    near = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
