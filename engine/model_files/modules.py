"""Reads what sentence-transformers saves beside a model: modules.json, its modules' configs and its settings.

JSON only: no torch, no weights. The package and the last part of its class path identify a module, as versions of
sentence-transformers have different paths between the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ..protocol.errors import ModelLoadError, UnsupportedModelError
from .json_files import read_json, read_object
from .module_configs import read_dense, read_logit_score, read_pooling, read_transformer
from .sentence_transformers_files import MODULES_FILE, SETTINGS_FILE, SentenceTransformersFiles

_KNOWN_MODULES: Final = "Transformer, Pooling, Dense, Normalize, Dropout, LogitScore, MultiVectorMask and SpladePooling"

_PACKAGES: Final = ("sentence_transformers.", "pylate.")
"""Packages whose modules are known. Another package's Transformer or Pooling may compute something else."""


def read_modules(root: Path) -> SentenceTransformersFiles | None:
    """Reads the sentence-transformers files of the model in `root`; None where it has no modules.json.

    Raises:
        UnsupportedModelError: A module, or a setting of one, that penstock has no code for; the message names it.
        ModelLoadError: A file is broken.
    """
    entries = read_json(root / MODULES_FILE)
    if entries is None:
        return None
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise ModelLoadError(f"{root / MODULES_FILE} must hold a list of modules, each with a type and a path.")
    files = SentenceTransformersFiles()
    folders: list[tuple[str, dict[str, Any]]] = []
    for place, entry in enumerate(entries):
        if not entry["type"].startswith(_PACKAGES):
            raise _unsupported(
                root,
                f"lists the module {entry['type']}, which is code of another package; penstock knows the modules of "
                "sentence_transformers and pylate only. Serve a version of the model without code of its own; or, if "
                f"the class computes the same as one of sentence_transformers ({_KNOWN_MODULES}), write the path of "
                "that class into modules.json",
            )
        kind, folder = entry["type"].rsplit(".", 1)[-1], _checked_folder(root, entry.get("path", ""))
        if place == 0:
            if kind not in ("Transformer", "MLMTransformer"):
                raise _unsupported(root, f"starts with the module {entry['type']}; penstock needs a Transformer first")
            read_transformer(root, folder, files)
        elif kind == "Pooling" and files.pooling is None and not folders and not files.has_normalize:
            read_pooling(root, folder, files)
        elif kind == "Dense" and not files.has_normalize:
            folders.append((folder, entry))
        elif kind == "LogitScore" and place == 1:
            files.logit_score = read_logit_score(root, folder)
        elif kind == "Normalize":
            files.has_normalize = True
        elif kind == "SpladePooling" and place == 1:
            files.splade_folder = folder
        elif kind == "MultiVectorMask" and files.pooling is None:
            files.mask_folder = folder
        elif kind in ("Pooling", "Dense", "LogitScore", "MultiVectorMask", "SpladePooling"):
            raise _unsupported(root, f"places the module {entry['type']} ({folder}) where penstock cannot run it")
        elif kind != "Dropout":
            raise _unsupported(root, f"lists the module {entry['type']} ({folder}); penstock knows {_KNOWN_MODULES}")
    files.dense = tuple(read_dense(root, folder, entry["type"], files.transformer_folder) for folder, entry in folders)
    _read_settings(root, files)
    if files.pooling is None and (files.is_pylate or any(e["type"].startswith("pylate.") for _, e in folders)):
        # PyLate normalises token vectors in `encode`, without a module that says so.
        files.has_normalize = True
    return files


def _is_entry(entry: Any) -> bool:
    """Whether an entry of modules.json names its module's type."""
    return isinstance(entry, dict) and isinstance(entry.get("type"), str)


def _checked_folder(root: Path, folder: Any) -> str:
    """Returns the folder of a module, refusing one that leads out of the model."""
    if not isinstance(folder, str) or Path(folder).is_absolute() or ".." in Path(folder).parts:
        raise ModelLoadError(
            f"{root / MODULES_FILE} names the module folder {folder!r}, which is not inside the model."
        )
    return folder.strip("/")


def _read_settings(root: Path, files: SentenceTransformersFiles) -> None:
    """Fills in what config_sentence_transformers.json says."""
    config = read_object(root / SETTINGS_FILE)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise ModelLoadError(f"{root / SETTINGS_FILE}: prompts is {prompts!r}; it must be an object of texts by name.")
    files.prompts = {name: text for name, text in prompts.items() if isinstance(text, str)}
    files.default_prompt_name = config.get("default_prompt_name")
    is_name = isinstance(files.default_prompt_name, str) and files.default_prompt_name in prompts
    if files.default_prompt_name is not None and not is_name:
        raise ModelLoadError(
            f"{root / SETTINGS_FILE} names the default prompt {files.default_prompt_name!r}, but its prompts are "
            f"{', '.join(prompts) or 'none'}."
        )
    files.truncate_dim = config.get("truncate_dim")
    if files.truncate_dim is not None and (type(files.truncate_dim) is not int or files.truncate_dim < 1):
        raise ModelLoadError(
            f"{root / SETTINGS_FILE}: truncate_dim is {files.truncate_dim!r}; it must be a positive integer."
        )
    files.activation_fn = config.get("activation_fn")
    files.is_pylate = config.get("model_type") == "ColBERT" or "query_prefix" in config


def _unsupported(root: Path, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{root / MODULES_FILE} {what}.")
