"""Finds the LoRA adapters of a model. penstock does not apply them: it computes with the base weights.

Reads JSON files and the names of tensors; no torch, no weights.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..protocol.errors import ModelLoadError
from .json_files import read_object

if TYPE_CHECKING:  # it imports numpy, which the command line does not wait for
    from .draft import ModelDraft

ADAPTER_FILE: Final = "adapter_config.json"
"""The config of an adapter that the peft library has saved."""
_FOLDERS: Final = (ADAPTER_FILE, f"*/{ADAPTER_FILE}", f"*/*/{ADAPTER_FILE}")
_CHECKPOINT: Final = re.compile(r"checkpoint-\d+")
"""Folder of a training checkpoint."""
_CONFIG_KEY: Final = "lora_adaptations"
_KNOWN_FAMILIES: Final = {
    "jina_embeddings_v3": ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"),
}
"""Adapters of families that transformers has a class for. The config does not name them."""
_TENSOR: Final = re.compile(rb'"[^"]*\blora_(?:embedding_)?[AB](?:\.([\w-]+))?[^"]*"')
_UNNAMED: Final = "lora"
_MOST_HEADER_BYTES: Final = 100_000_000
"""As the safetensors library allows."""


def resolve_adapters(draft: ModelDraft, root: Path) -> None:
    """Resolves `adapters`. An empty list `lora_adaptations` in the configuration means no adapters.

    Args:
        draft: Its `path` and `model_type` are known.
        root: Folder of the model.

    Raises:
        ModelLoadError: A file cannot be read.
    """
    path, model_type = Path(draft.fields["path"]), draft.fields["model_type"]
    named = draft.config.get(_CONFIG_KEY)
    if named is not None:
        draft.set("adapters", _names(named, draft.source_of(_CONFIG_KEY)), draft.source_of(_CONFIG_KEY))
    elif folders := _folders(root, path):
        draft.set("adapters", folders, ADAPTER_FILE)
    elif model_type in _KNOWN_FAMILIES:
        draft.set("adapters", _KNOWN_FAMILIES[model_type], draft.sources["model_type"])
    elif names := {match[1] or b"" for match in _TENSOR.finditer(_tensor_names(path))}:
        own = sorted(name.decode() for name in names if name not in (b"", b"weight"))
        draft.set("adapters", tuple(own) or (_UNNAMED,), "tensor names of the weights")
    else:
        draft.set("adapters", (), "default")


def no_model_error(folder: Path, otherwise: str) -> ModelLoadError:
    """Returns the error for a folder without a model.

    Args:
        folder: May hold an adapter alone.
        otherwise: The message for a folder that holds none.
    """
    if not (folder / ADAPTER_FILE).is_file():
        return ModelLoadError(otherwise)
    base = read_object(folder / ADAPTER_FILE).get("base_model_name_or_path") or "its base model"
    return ModelLoadError(
        f"{folder} holds a PEFT adapter ({ADAPTER_FILE}) and no model, and penstock applies no adapters: merge it into "
        f"{base} (merge_and_unload in the peft library), save the result with its tokenizer, and serve that folder."
    )


def _folders(root: Path, path: Path) -> tuple[str, ...]:
    """Returns the folders of adapters, relative to the model's folder, without those in checkpoints of a training."""
    found = {file.relative_to(root) for folder in (root, path) for pattern in _FOLDERS for file in folder.glob(pattern)}
    own = sorted(file for file in found if not any(map(_CHECKPOINT.match, file.parts)))
    return tuple(str(file.parent) if file.parent.name else ADAPTER_FILE for file in own)


def _names(value: Any, source: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ModelLoadError(f"{source} is {value!r}; it must be a list of names.")
    return tuple(value)


def _tensor_names(folder: Path) -> bytes:
    """Returns text that holds the names of the tensors: the header of a safetensors file, or the index of shards."""
    path, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    try:
        if path.is_file():
            with path.open("rb") as file:
                return file.read(min(int.from_bytes(file.read(8), "little"), _MOST_HEADER_BYTES))
        return index.read_bytes() if index.is_file() else b""
    except OSError as error:
        raise ModelLoadError(f"{error.filename} cannot be read: {error.strerror or error}.") from error
