"""A small ModelInfo of each kind."""

from typing import Any

from penstock.engine.protocol.model_info import Activation, ModelInfo, ModelKind
from penstock.engine.protocol.tasks import PoolingTask, PoolingType

HIDDEN_SIZE = 24
NUM_HEADS = 4
NUM_LABELS = 5

TASKS = {
    ModelKind.EMBEDDING: (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SCORE),
    ModelKind.SEQUENCE_CLASSIFIER: (PoolingTask.CLASSIFY,),
    ModelKind.CROSS_ENCODER: (PoolingTask.CLASSIFY, PoolingTask.SCORE),
    ModelKind.TOKEN_CLASSIFIER: (PoolingTask.TOKEN_CLASSIFY,),
}


def make_info(kind: ModelKind = ModelKind.EMBEDDING, num_labels: int = NUM_LABELS, **changes: Any) -> ModelInfo:
    """Returns a model with MEAN pooling and, if it is an embedding model, normalised embeddings."""
    pooling = changes.get("sequence_pooling", (PoolingType.MEAN,))
    dense = changes.get("dense", ())
    hidden_size = changes.get("hidden_size", HIDDEN_SIZE)
    width = dense[-1].out_features if dense else hidden_size * len(pooling)
    is_embedding = kind is ModelKind.EMBEDDING
    fields: dict[str, Any] = {
        "name": "tiny",
        "path": "/tiny",
        "architecture": "TinyModel",
        "model_type": "tiny",
        "packed": True,
        "kind": kind,
        "tasks": TASKS[kind],
        "hidden_size": hidden_size,
        "vocab_size": 100,
        "num_attention_heads": NUM_HEADS,
        "max_model_len": 128,
        "embedding_size": width if is_embedding else 0,
        "sequence_pooling": pooling,
        "activation": Activation.IDENTITY if is_embedding else Activation.SOFTMAX,
        "labels": () if is_embedding else tuple(f"LABEL_{i}" for i in range(num_labels)),
    }
    return ModelInfo(**{**fields, **changes})
