"""From hidden states to embeddings and class scores.

ModelPooler answers batches. Its steps are the same for numpy arrays, which encoders on a CPU give without torch
(`array_ops.py`), and for tensors (`tensor_ops.py`). ChunkedPoolingManager keeps the running states of sequences whose
rows arrive in chunks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from ..protocol.tasks import PoolingStrategy
from .heads import ClassifierPoolerHead, EmbeddingPoolerHead
from .metadata import PoolingCursor, PoolingMetadata
from .model_pooler import ModelPooler, TokenMaps
from .output import OutputBlock, PoolerOutput

if TYPE_CHECKING:
    from .chunked_manager import ChunkedPoolingManager
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
    from .states import PoolingStates

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
    "OutputBlock",
    "Pooler",
    "PoolerFactory",
    "PoolerOutput",
    "PoolingCursor",
    "PoolingMetadata",
    "PoolingStates",
    "PoolingStrategy",
    "SequencePooler",
    "StepPooler",
    "TokenMaps",
    "TokenPooler",
    "WeightedMeanPooler",
]

_WITH_TORCH: Final = {"ChunkedPoolingManager": ".chunked_manager", "PoolingStates": ".states"}


def __getattr__(name: str) -> Any:
    """Imports a name that needs torch when it is first used: encoders on a CPU run without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WITH_TORCH.get(name, ".poolers"), __name__), name)
