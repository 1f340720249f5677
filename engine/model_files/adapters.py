"""Finds the LoRA adapters of a model: in its folder, in its weights, and those of --adapter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from ..protocol.errors import ModelLoadError
from ..protocol.model_info import AdapterSpec
from .draft import ModelDraft
from .model_folder import ADAPTER_FILE, safetensors_header
from .peft_config import PeftConfig

_FOLDERS: Final = (ADAPTER_FILE, f"*/{ADAPTER_FILE}", f"*/*/{ADAPTER_FILE}")
_CHECKPOINT: Final = re.compile(r"checkpoint-\d+")
"""Folder of a training checkpoint."""
_CONFIG_KEY: Final = "lora_adaptations"
_KNOWN_FAMILIES: Final = {
    "jina_embeddings_v3": ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"),
}
"""Adapters of families with a class in transformers. Their config.json does not name the adapters."""
_JINA_V5: Final = "jina_embeddings_v5"
_JINA_V5_DEFAULT: Final = "retrieval"
_TENSOR: Final = re.compile(rb'"[^"]*\blora_(?:embedding_)?[AB](?:\.([\w-]+))?[^"]*"')
_STACKED: Final = b".parametrizations.weight.0.lora_A"
_UNNAMED: Final = "lora"


def base_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json of the model without its adapters.

    jina-embeddings-v5 is Qwen3 or EuroBERT with adapters. Its class is defined in its own code.
    """
    if config.get("model_type") != _JINA_V5:
        return config
    model_type, architecture = (
        ("qwen3", "Qwen3Model") if "max_window_layers" in config else ("eurobert", "EuroBertModel")
    )
    return config | {"model_type": model_type, "architectures": [architecture], "adapted_model_type": _JINA_V5}


def resolve_adapters(draft: ModelDraft, root: Path) -> None:
    """Resolves `adapters` and `default_adapter`. An empty list `lora_adaptations` means no adapters of the model.

    Raises:
        ModelLoadError: A file cannot be read, or an entry of --adapter is no adapter.
    """
    own, source = _own_adapters(draft, root)
    given = tuple(_given_adapter(entry) for entry in draft.engine.adapter)
    if both := {adapter.name for adapter in own} & {adapter.name for adapter in given}:
        raise ModelLoadError(f"--adapter: {draft.name} has its own adapter {min(both)!r}; give yours another name.")
    draft.set("adapters", own + given, f"{source}, --adapter" if own and given else "--adapter" if given else source)
    is_jina_v5 = draft.config.get("adapted_model_type") == _JINA_V5
    has_default = is_jina_v5 and any(adapter.name == _JINA_V5_DEFAULT for adapter in own)
    draft.set("default_adapter", _JINA_V5_DEFAULT if has_default else None, _JINA_V5 if has_default else "default")


def _own_adapters(draft: ModelDraft, root: Path) -> tuple[tuple[AdapterSpec, ...], str]:
    path, model_type = Path(draft.fields["path"]), draft.fields["model_type"]
    named = draft.config.get(_CONFIG_KEY)
    if named is not None:
        source = draft.source_of(_CONFIG_KEY)
        is_stored = _STACKED in _tensor_names(path)
        return tuple(
            AdapterSpec(name=name, index=index if is_stored else None, is_task=True)
            for index, name in enumerate(_names(named, source))
        ), source
    if folders := _folders(root, path):
        return folders, ADAPTER_FILE
    if model_type in _KNOWN_FAMILIES:
        names = _KNOWN_FAMILIES[model_type]
        return tuple(AdapterSpec(name=name, is_task=True) for name in names), draft.sources["model_type"]
    if tensors := {match[1] or b"" for match in _TENSOR.finditer(_tensor_names(path))}:
        named = sorted(name.decode() for name in tensors if name not in (b"", b"weight")) or [_UNNAMED]
        return tuple(AdapterSpec(name=name, is_task=True) for name in named), "tensor names of the weights"
    return (), "default"


def _folders(root: Path, path: Path) -> tuple[AdapterSpec, ...]:
    """Returns the adapters in folders of the model. Skips training checkpoints.

    An adapter beside the weights of the model is not served: it is unknown whether it is merged into them.
    """
    found = {file for folder in (root, path) for pattern in _FOLDERS for file in folder.glob(pattern)}
    own = sorted(file.parent for file in found if not any(map(_CHECKPOINT.match, file.relative_to(root).parts)))
    names = [folder.name for folder in own]
    return tuple(
        AdapterSpec(name=ADAPTER_FILE, is_task=True)
        if folder in (root, path)
        else AdapterSpec(
            name=folder.name if names.count(folder.name) == 1 else "-".join(folder.relative_to(root).parts),
            folder=str(folder),
            is_task=True,
        )
        for folder in own
    )


def _given_adapter(entry: str) -> AdapterSpec:
    name, _, folder = entry.partition("=")
    if not (Path(folder) / ADAPTER_FILE).is_file():
        raise ModelLoadError(
            f"--adapter: {name}={folder}: the folder has no {ADAPTER_FILE}; name a folder that the peft library saved."
        )
    PeftConfig.read(Path(folder))
    return AdapterSpec(name=name, folder=folder)


def _names(value: Any, source: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ModelLoadError(f"{source} is {value!r}; it must be a list of names.")
    return tuple(value)


def _tensor_names(folder: Path) -> bytes:
    """Returns bytes with the names of the tensors: the header of a safetensors file, or the index of shards."""
    path, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    try:
        if path.is_file():
            return safetensors_header(path)
        return index.read_bytes() if index.is_file() else b""
    except OSError as error:
        raise ModelLoadError(f"{error.filename} cannot be read: {error.strerror or error}.") from error
