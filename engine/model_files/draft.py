"""The fields of a ModelInfo while they are being resolved, each with its source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from ..protocol.config import EngineConfig
from .reranker_recipes import Answers
from .sentence_transformers_files import SentenceTransformersFiles

# One size, as the families call it.
_ALIASES: Final = {
    "hidden_size": ("hidden_size", "dim", "d_model", "n_embd"),
    "vocab_size": ("vocab_size",),
    "num_attention_heads": ("num_attention_heads", "n_heads", "n_head"),
}


@dataclass(slots=True)
class ModelDraft:
    """What is known so far about one model.

    Attributes:
        name: The name the operator gave.
        config: config.json with overrides.
        engine: The operator's settings.
        files: sentence-transformers' files, where there are some.
        answers: The answers of a language model that is a reranker; set with `kind`.
        fields: ModelInfo fields resolved so far.
        sources: Where each of them came from.
    """

    name: str
    config: dict[str, Any]
    engine: EngineConfig
    files: SentenceTransformersFiles | None
    answers: Answers | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def set(self, name: str, value: Any, source: str) -> None:
        """Records one field and where it came from."""
        self.fields[name] = value
        self.sources[name] = source

    def source_of(self, key: str) -> str:
        """Names the origin of a config.json key."""
        return f"--hf-overrides: {key}" if key in self.engine.hf_overrides else f"config.json: {key}"

    def lookup(self, name: str) -> tuple[Any, str]:
        """Returns a size under whichever key the family uses, in the text part of a multimodal config too."""
        text_config = self.config.get("text_config")
        for part in (self.config, text_config if isinstance(text_config, dict) else {}):
            for key in _ALIASES[name]:
                if part.get(key) is not None:
                    return part[key], self.source_of(key)
        return None, ""


def merged(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Returns `base` with `overrides` laid over it, nested objects key by key."""
    result = dict(base)
    for key, value in overrides.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if nested else value
    return result
