"""Writes the files of small models."""

import json
from pathlib import Path
from typing import Any

from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.model_info import ModelInfo

from ...tables import table

BERT: dict[str, Any] = table(__file__, "bert")
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
MEAN = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}


def write(folder: Path, files: dict[str, Any]) -> Path:
    """Writes texts as they are, and other values as JSON."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def resolve(folder: Path, **settings: Any) -> ModelInfo:
    return resolve_model(EngineConfig(model=str(folder), **settings))
