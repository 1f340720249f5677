"""Replicas of a model give the bits of one engine."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from penstock.engine import AsyncEngine
from penstock.engine.client.replica import Replica
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.params import PoolingParams

PARAMS = PoolingParams()
TEXTS = [" ".join(f"word{place % 7}" for place in range(1 + number * 13 % 60)) for number in range(64)]
pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two replicas need two cores")


def computed(replicas: list[Replica]) -> list[int]:
    return [replica.stats.num_batched_tokens_total for replica in replicas]


async def test_divided_request_equals_one_engine(minilm_folder: Path) -> None:
    config = EngineConfig(model=str(minilm_folder), device="cpu", dtype="float32")
    one = await AsyncEngine.start(config)
    try:
        expected = await one.embed(TEXTS, PARAMS)
        rows = await one.token_embed(TEXTS, PARAMS)
    finally:
        await one.close()
    two = await AsyncEngine.start(EngineConfig(model=str(minilm_folder), devices=("cpu", "cpu"), dtype="float32"))
    try:
        given = await two.embed(TEXTS, PARAMS)
        own = computed(two._dispatcher.replicas)
        assert sum(own) == sum(expected.num_tokens)
        assert min(own) > max(own) / 2
        assert given.num_tokens == expected.num_tokens
        assert np.array_equal(given.embeddings, expected.embeddings)
        given_rows = await two.token_embed(TEXTS, PARAMS)
        assert all(np.array_equal(a, b) for a, b in zip(given_rows.rows, rows.rows, strict=True))
        small = await asyncio.gather(*(two.embed([text], PARAMS) for text in TEXTS))
        assert np.array_equal(np.concatenate([each.embeddings for each in small]), expected.embeddings)
        assert await two.clear_prefixes() is None
    finally:
        await two.close()
