"""From hidden states to embeddings and class scores.

Models that run on torch use this package. Encoders that run on the C library use
`engine/executors/cpu/array_pooler.py`, with the same results within 3e-6: they load no torch and have no chunks.
"""

from ..protocol.tasks import PoolingStrategy
from .chunked_manager import ChunkedPoolingManager
from .chunks import PoolingCursor
from .heads import ClassifierPoolerHead, Cut, EmbeddingPoolerHead
from .metadata import PoolingMetadata
from .model_heads import TokenMaps
from .model_pooler import ModelPooler
from .output import OutputBlock, PoolerOutput
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
    "Cut",
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
