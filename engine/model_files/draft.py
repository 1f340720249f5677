"""A ModelInfo while it is being resolved: its fields and their sources."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ..protocol.config import EngineConfig
from .sentence_transformers_files import SentenceTransformersFiles

if TYPE_CHECKING:
    from .reranker import AnswerTokens

# Keys of each size in config.json; they differ between families.
_ALIASES: Final = {
    "hidden_size": ("hidden_size", "dim", "d_model", "n_embd"),
    "vocab_size": ("vocab_size",),
    "num_attention_heads": ("num_attention_heads", "n_heads", "n_head"),
}


@dataclass(slots=True)
class ModelDraft:
    """The fields of one model that are resolved so far.

    Attributes:
        name: Folder or hub id, as the operator wrote it.
        config: config.json with overrides.
        engine: The operator's settings.
        files: sentence-transformers' files; None if the model has none.
        answers: The answers of a generative reranker; set with `kind`.
        config_file: Name of the file of `config` in messages.
        fields: ModelInfo fields resolved so far.
        sources: The source of each field.
    """

    name: str
    config: dict[str, Any]
    engine: EngineConfig
    files: SentenceTransformersFiles | None
    answers: AnswerTokens | None = None
    config_file: str = "config.json"
    fields: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def set(self, name: str, value: Any, source: str) -> None:
        """Sets a field and its source."""
        self.fields[name] = value
        self.sources[name] = source

    def source_of(self, key: str) -> str:
        """Returns the source of a config.json key: the file or the override."""
        return f"--hf-overrides: {key}" if key in self.engine.hf_overrides else f"{self.config_file}: {key}"

    def lookup(self, name: str) -> tuple[Any, str]:
        """Returns a size and its source. Also searches the text part of a multimodal config."""
        for part in config_parts(self.config):
            for key in _ALIASES[name]:
                if part.get(key) is not None:
                    return part[key], self.source_of(key)
        return None, ""


def config_parts(config: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Returns a config.json and, for a multimodal model, its language model and the text part of it."""
    parts = [config]
    for name in ("vlm_config", "text_config"):
        if isinstance(part := parts[-1].get(name), dict):
            parts.append(part)
    return tuple(parts)


def merged(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Returns `base` updated with `overrides`; nested objects are merged."""
    result = dict(base)
    for key, value in overrides.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if nested else value
    return result
