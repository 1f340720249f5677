"""What the lists of models tell of one, in the words of OpenAI's and Cohere's clients and in penstock's own."""

from __future__ import annotations

from typing import Any

from penstock.engine import ModelInfo

from ..models.table import ModelDescription
from ..schemas.cohere import cohere_endpoints
from ..schemas.encode import trained_outputs
from .context import ServerContext


def model_card(context: ServerContext, model: ModelDescription) -> dict[str, Any]:
    """Returns what a ModelCard has. Of a model that was never on this machine little is known before it is loaded."""
    entry, info = model.entry, model.info
    max_model_len = None if info is None else info.max_model_len
    return {
        "id": model.name,
        "object": "model",
        "created": context.started_s,
        "owned_by": "penstock",
        "max_model_len": max_model_len,
        "name": model.name,
        "aliases": [name for name in entry.model.shown_names if name != model.name],
        "endpoints": [] if info is None else cohere_endpoints(info),
        "context_length": max_model_len,
        "status": {"value": entry.status, "state": entry.state},
        "facts": None if info is None else _facts(info, entry.model.default_prompt_name),
    }


def _facts(info: ModelInfo, default_prompt_name: str | None) -> dict[str, Any]:
    return {
        "kind": info.kind,
        "tasks": info.tasks,
        "outputs": trained_outputs(info),
        "model_type": info.model_type,
        "dtype": info.dtype,
        "sequence_pooling": info.sequence_pooling,
        "embedding_size": info.embedding_size,
        "is_matryoshka": info.is_matryoshka,
        "matryoshka_dimensions": info.matryoshka_dimensions,
        "prompts": info.prompts,
        "default_prompt_name": default_prompt_name or info.default_prompt_name,
        "num_labels": info.num_labels,
    }
