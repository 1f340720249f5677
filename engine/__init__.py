"""The engine converts text or token ids to numpy arrays; this package imports torch only in the engine process.

engine = await AsyncEngine.start(EngineConfig(model="path/or/hub-id"))
result = await engine.embed(["some text"], PoolingParams())
await engine.close()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .async_engine import AsyncEngine
    from .llm import LLM
    from .protocol.config import CacheConfig, EngineConfig, PoolerConfig, SchedulerConfig
    from .protocol.errors import EngineError
    from .protocol.model_info import ModelInfo
    from .protocol.params import PoolingParams, RequestOptions
    from .protocol.results import (
        ClassResult,
        CombinedResult,
        EmbeddingResult,
        ScoreResult,
        SparseResult,
        TokenizedText,
        TokenResult,
    )
    from .protocol.tasks import PoolingTask, PoolingType

__all__ = [
    "LLM",
    "AsyncEngine",
    "CacheConfig",
    "ClassResult",
    "CombinedResult",
    "EmbeddingResult",
    "EngineConfig",
    "EngineError",
    "ModelInfo",
    "PoolerConfig",
    "PoolingParams",
    "PoolingTask",
    "PoolingType",
    "RequestOptions",
    "SchedulerConfig",
    "ScoreResult",
    "SparseResult",
    "TokenResult",
    "TokenizedText",
]

_MODULES: Final = {
    "LLM": ".llm",
    "AsyncEngine": ".async_engine",
    "CacheConfig": ".protocol.config",
    "ClassResult": ".protocol.results",
    "CombinedResult": ".protocol.results",
    "EmbeddingResult": ".protocol.results",
    "EngineConfig": ".protocol.config",
    "EngineError": ".protocol.errors",
    "ModelInfo": ".protocol.model_info",
    "PoolerConfig": ".protocol.config",
    "PoolingParams": ".protocol.params",
    "PoolingTask": ".protocol.tasks",
    "PoolingType": ".protocol.tasks",
    "RequestOptions": ".protocol.params",
    "SchedulerConfig": ".protocol.config",
    "ScoreResult": ".protocol.results",
    "SparseResult": ".protocol.results",
    "TokenResult": ".protocol.results",
    "TokenizedText": ".protocol.results",
}


def __getattr__(name: str) -> Any:
    """Imports a name on first use, so that the command line can show its help without loading the engine."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
