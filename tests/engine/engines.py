"""Engines of test models."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.engine import AsyncEngine, EngineConfig


@asynccontextmanager
async def running(folder: Path, **settings: Any) -> AsyncIterator[AsyncEngine]:
    """Runs a model in this process, by default in float32 on one thread."""
    defaults = {"in_process": True, "num_threads": 1, "dtype": "float32"}
    engine = await AsyncEngine.start(EngineConfig(model=str(folder), **{**defaults, **settings}))
    try:
        yield engine
    finally:
        await engine.close()
