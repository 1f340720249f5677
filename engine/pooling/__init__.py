"""Pooling and heads: from hidden states to embeddings and class scores.

ModelPooler pools batches. ChunkedPoolingManager stores the running states of sequences in chunks. Both work on numpy
arrays without torch (`array_ops.py`), and on tensors (`tensor_ops.py`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..protocol.tasks import PoolingStrategy
from .chunked_manager import ChunkedPoolingManager
from .heads import ClassifierPoolerHead, EmbeddingPoolerHead
from .metadata import PoolingCursor, PoolingMetadata
from .model_pooler import ModelPooler, PoolerOutput, TokenHeads
from .states import PoolingStates

if TYPE_CHECKING:
    from .poolers import (
        AllPooler,
        AttentionWeightedPooler,
        ClsPooler,
        LastTokenPooler,
        MaxPooler,
        MeanPooler,
        MeanSqrtLenPooler,
        Pooler,
        PoolerFactory,
        SequencePooler,
        StepPooler,
        TokenPooler,
        WeightedMeanPooler,
    )

__all__ = [
    "AllPooler",
    "AttentionWeightedPooler",
    "ChunkedPoolingManager",
    "ClassifierPoolerHead",
    "ClsPooler",
    "EmbeddingPoolerHead",
    "LastTokenPooler",
    "MaxPooler",
    "MeanPooler",
    "MeanSqrtLenPooler",
    "ModelPooler",
    "Pooler",
    "PoolerFactory",
    "PoolerOutput",
    "PoolingCursor",
    "PoolingMetadata",
    "PoolingStates",
    "PoolingStrategy",
    "SequencePooler",
    "StepPooler",
    "TokenHeads",
    "TokenPooler",
    "WeightedMeanPooler",
]


def __getattr__(name: str) -> Any:
    """Imports names that need torch at their first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".poolers", __name__), name)
