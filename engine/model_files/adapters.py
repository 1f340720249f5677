"""The LoRA adapters of a model: in its folder, in its weights, and those of --adapter; and their options."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from ..protocol.errors import ModelLoadError, UnsupportedModelError
from ..protocol.model_info import AdapterSpec
from .draft import ModelDraft
from .model_folder import ADAPTER_FILE, read_object, safetensors_header

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
    stored, source = _own_adapters(draft, root)
    configured = tuple(_given_adapter(entry) for entry in draft.engine.adapter)
    if both := {adapter.name for adapter in stored} & {adapter.name for adapter in configured}:
        raise ModelLoadError(f"--adapter: {draft.name} has its own adapter {min(both)!r}; give yours another name.")
    if configured:
        source = f"{source}, --adapter" if stored else "--adapter"
    draft.set("adapters", stored + configured, source)
    is_jina_v5 = draft.config.get("adapted_model_type") == _JINA_V5
    has_default = is_jina_v5 and any(adapter.name == _JINA_V5_DEFAULT for adapter in stored)
    draft.set("default_adapter", _JINA_V5_DEFAULT if has_default else None, _JINA_V5 if has_default else "default")


def _own_adapters(draft: ModelDraft, root: Path) -> tuple[tuple[AdapterSpec, ...], str]:
    path = Path(draft.fields["path"])
    model_type = draft.fields["model_type"]
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
    folders = sorted(file.parent for file in found if not any(map(_CHECKPOINT.match, file.relative_to(root).parts)))
    names = [folder.name for folder in folders]
    return tuple(
        AdapterSpec(name=ADAPTER_FILE, is_task=True)
        if folder in (root, path)
        else AdapterSpec(
            name=folder.name if names.count(folder.name) == 1 else "-".join(folder.relative_to(root).parts),
            folder=str(folder),
            is_task=True,
        )
        for folder in folders
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


_MERGE: Final = "merge the adapter into its model (merge_and_unload in the peft library) and serve the result."
# Options that change the formula, or other weights than those of the targets.
_UNSUPPORTED: Final = (
    *("use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save", "layer_replication", "trainable_token_indices"),
    *("target_parameters", "use_qalora", "alora_invocation_tokens", "arrow_config", "layers_pattern"),
)
_INITS: Final = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base weights unchanged."""
_ALL_LINEAR: Final = "all-linear"
_LISTS: Final = "a text or a list of texts"
_PATTERNS: Final = "an object with a positive number for each pattern of module names"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """Options of a LoRA adapter of the peft library: adapter_config.json. Defaults are those of peft 0.21.

    Attributes:
        r: Rank.
        lora_alpha: The scale is lora_alpha / r.
        use_rslora: The scale is lora_alpha / sqrt(r).
        target_modules: A regular expression for whole module names, names or ends of names, or "all-linear".
        exclude_modules: Likewise, modules without adapter.
        layers_to_transform: Indices of the layers with adapter; None: all.
        rank_pattern: Ranks by regular expressions for ends of module names.
        alpha_pattern: Values of lora_alpha, likewise.
    """

    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> PeftConfig:
        """Reads the file of a folder.

        Raises:
            UnsupportedModelError: It is no LoRA adapter, or has an option that penstock does not support.
            ModelLoadError: The file cannot be read, or a value is invalid.
        """
        path = folder / ADAPTER_FILE
        values = read_object(path)
        if (kind := values.get("peft_type")) != "LORA":
            raise UnsupportedModelError(f"{path}: peft_type is {kind!r}; penstock supports 'LORA'.")
        for name in _UNSUPPORTED:
            if values.get(name):
                raise UnsupportedModelError(f"{path}: {name} is {values[name]!r}, which is not supported: {_MERGE}")
        if (bias := values.get("bias", "none")) != "none":
            raise UnsupportedModelError(f"{path}: bias is {bias!r}; penstock supports 'none': {_MERGE}")
        if (init := values.get("init_lora_weights")) not in _INITS:
            raise UnsupportedModelError(f"{path}: init_lora_weights {init!r} changes the base weights: {_MERGE}")
        for name, is_valid, wanted in _CHECKS:
            if values.get(name) is not None and not is_valid(values[name]):
                raise ModelLoadError(f"{path}: {name} is {values[name]!r}; it must be {wanted}.")
        names = [each.name for each in fields(cls)]
        return cls(**{name: values[name] for name in names if values.get(name) is not None})

    def rank(self, module: str) -> int:
        """Returns the rank of the adapter in a module, from `rank_pattern` or else `r`."""
        return int(_of_pattern(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """Returns the factor of B A."""
        rank = self.rank(module)
        return float(_of_pattern(self.alpha_pattern, module, self.lora_alpha)) / (
            math.sqrt(rank) if self.use_rslora else rank
        )

    def targets(self, module: str, layer: int) -> bool:
        """Whether a linear map of a layer has an adapter."""
        chosen = self.layers_to_transform
        if chosen is not None and layer not in (chosen if isinstance(chosen, list) else [chosen]):
            return False
        return _matches(self.target_modules, module) and not _matches(self.exclude_modules, module)


def _matches(modules: list[str] | str | None, module: str) -> bool:
    if isinstance(modules, str):
        return modules == _ALL_LINEAR or re.fullmatch(modules, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in modules or ())


def _of_pattern(patterns: dict[str, Any], module: str, otherwise: float) -> float:
    """Returns the value of the first pattern that matches the end of a module name."""
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)), otherwise)


def _is_pattern(value: object) -> bool:
    try:
        re.compile(str(value))
    except re.error:
        return False
    return isinstance(value, str)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _are_names(value: object) -> bool:
    return _is_pattern(value) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _are_layers(value: object) -> bool:
    return type(value) is int or (isinstance(value, list) and all(type(index) is int for index in value))


def _is_table(value: object, is_valid: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_pattern, value)) and all(map(is_valid, value.values()))


_CHECKS: Final = (
    ("r", _is_count, "a positive integer"),
    ("lora_alpha", _is_number, "a positive number"),
    ("use_rslora", lambda value: isinstance(value, bool), "true or false"),
    ("target_modules", _are_names, _LISTS),
    ("exclude_modules", _are_names, _LISTS),
    ("layers_to_transform", _are_layers, "an integer or a list of integers"),
    ("rank_pattern", lambda value: _is_table(value, _is_count), _PATTERNS),
    ("alpha_pattern", lambda value: _is_table(value, _is_number), _PATTERNS),
)
