"""Replicas of a real model: together they answer what one does, to the bit, and in the same arithmetic."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from penstock.engine import LLM, AsyncEngine
from penstock.engine.client.replica import Replica
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask

PARAMS = PoolingParams()
TEXTS = [" ".join(f"word{place % 7}" for place in range(1 + number * 13 % 60)) for number in range(64)]
pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two replicas need two cores")


def computed(replicas: list[Replica]) -> list[int]:
    return [replica.stats.num_batched_tokens_total for replica in replicas]


async def test_a_divided_request_is_answered_as_by_one_engine(minilm_folder: Path) -> None:
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


async def test_all_replicas_compute_in_what_the_first_one_chose(minilm_folder: Path) -> None:
    engine = await AsyncEngine.start(EngineConfig(model=str(minilm_folder), device="cpu", data_parallel=2))
    try:
        first, second = (supervisor._start_message.config for supervisor in engine._group._supervisors)
        chosen = (engine.info.dtype, engine.info.arithmetic)
        assert (first.dtype, first.arithmetic) == (second.dtype, second.arithmetic) == chosen
        assert first.dtype != "auto"
        assert first.num_threads == second.num_threads
        alone = await asyncio.gather(*(engine.embed([TEXTS[40]], PARAMS) for _ in range(4)))
        assert min(computed(engine._dispatcher.replicas)) > 0
        assert all(np.array_equal(each.embeddings, alone[0].embeddings) for each in alone)
    finally:
        await engine.close()


def test_the_blocking_class_has_replicas_too(minilm_folder: Path) -> None:
    with LLM(str(minilm_folder), device="cpu", dtype="float32", data_parallel=2) as llm:
        outputs = llm.encode(TEXTS, pooling_task=PoolingTask.EMBED, use_tqdm=False)
        assert len(outputs) == len(TEXTS)
        assert min(computed(llm._engine._dispatcher.replicas)) > 0
