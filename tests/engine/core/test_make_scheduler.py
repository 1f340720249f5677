"""How the limits of the operator, the model and its memory size the scheduler."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.core.make_scheduler import make_scheduler
from penstock.engine.core.runner import DeviceLimits
from penstock.engine.protocol.config import EngineConfig, SchedulerConfig
from penstock.engine.protocol.model_info import KV_CACHE_SOURCE, ModelInfo
from penstock.engine.scheduling import Scheduler, SequencePool

from ..scheduling.records import make_request
from .fake_runner import BLOCK, model, pool


def make(
    sequence_pool: SequencePool, max_model_len: int = 4096, budget: int | None = 1024, **limits: Any
) -> tuple[Scheduler, ModelInfo]:
    config = EngineConfig(model="m", scheduler=SchedulerConfig(max_num_batched_tokens=budget, **limits))
    return make_scheduler(config, model(max_model_len), sequence_pool)


def test_the_budget_is_no_larger_than_the_device_has_memory_for(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(model="m", scheduler=SchedulerConfig(max_num_batched_tokens=1024))
    scheduler, info = make_scheduler(config, model(512), SequencePool(), device=DeviceLimits(max_tokens=700))
    assert (scheduler.token_budget, info.max_model_len) == (700, 512)
    scheduler, info = make_scheduler(config, model(), pool(1000), device=DeviceLimits(max_tokens=700))
    assert (scheduler.token_budget, info.max_model_len) == (700, 4096)  # it runs in chunks
    assert not caplog.records
    scheduler, info = make_scheduler(config, model(), SequencePool(), device=DeviceLimits(max_tokens=700))
    assert (scheduler.token_budget, info.max_model_len) == (700, 700)
    assert info.limit_name == "the memory of the server's GPU"
    assert "one forward finds memory for 700 tokens: inputs are limited to that" in caplog.text
    scheduler, info = make_scheduler(config, model(), SequencePool(), device=DeviceLimits(max_tokens=5000))
    assert (scheduler.token_budget, info.max_model_len) == (4096, 4096)


@pytest.mark.parametrize(
    ("device", "memory", "tokens", "seqs"),
    [
        ("cpu", None, 2048, 512),
        ("cuda", 24 << 30, 16_384, 2048),
        ("cuda:1", None, 16_384, 2048),
        ("cuda:0", 80 << 30, 32_768, 2048),
    ],
)
def test_the_budget_follows_the_device_unless_the_operator_says_it(
    device: str, memory: int | None, tokens: int, seqs: int
) -> None:
    info, limits = replace(model(), device=device), DeviceLimits(memory=memory)
    scheduler, _ = make_scheduler(EngineConfig(model="m"), info, pool(1000), device=limits)
    assert scheduler.token_budget == tokens
    assert SchedulerConfig().seqs(device) == seqs
    given = SchedulerConfig(max_num_batched_tokens=99, max_num_seqs=7)
    scheduler, _ = make_scheduler(EngineConfig(model="m", scheduler=given), info, pool(1000), device=limits)
    assert scheduler.token_budget == 99
    assert given.seqs(device) == 7


def test_chunks_are_as_large_as_a_batch_and_shrink_to_sixteen_tokens() -> None:
    scheduler, info = make(pool(1000))
    config = scheduler.prefill.config
    assert scheduler.token_budget == 1024
    assert (config.chunk_size, config.min_chunk_size, config.is_dynamic) == (1024, 16, True)
    assert [n for n in (1023, 1024, 1025) if scheduler.prefill.should_chunk(n)] == [1025]
    assert config.max_retries == 8
    assert info == model()


@pytest.mark.parametrize(("budget", "least"), [(1024, 16), (320, 10), (64, 2), (32, 1), (16, 1)])
def test_there_is_room_for_the_smallest_chunk_in_the_smallest_budget(budget: int, least: int) -> None:
    scheduler, _ = make(pool(1000), budget=budget)
    assert scheduler.prefill.config.min_chunk_size == least
    scheduler.shrink(1)
    assert scheduler.token_budget >= least


def test_a_chunk_size_that_is_given_is_fixed_and_no_larger_than_a_batch(caplog: pytest.LogCaptureFixture) -> None:
    config = make(pool(1000), chunk_size=100)[0].prefill.config
    assert (config.chunk_size, config.is_dynamic) == (100, False)
    assert make(pool(1000), chunk_size=1024)[0].prefill.config.chunk_size == 1024
    assert not caplog.records
    assert make(pool(1000), chunk_size=1025)[0].prefill.config.chunk_size == 1024
    assert "chunk_size is 1025, but a forward has 1024 tokens; chunks have no more" in caplog.text


@pytest.mark.parametrize("has_memory", [True, False])
def test_what_cannot_be_cut_runs_whole_whatever_the_budget(caplog: pytest.LogCaptureFixture, has_memory: bool) -> None:
    sequence_pool = pool(1000) if has_memory else SequencePool()
    scheduler, info = make(sequence_pool, enable_chunked_prefill=not has_memory)
    assert scheduler.token_budget == info.max_model_len == 4096
    assert not scheduler.prefill.should_chunk(4096)
    assert "max_num_batched_tokens is 1024, but one sequence may have 4096 tokens; the budget is raised" in caplog.text


@pytest.mark.parametrize(("budget", "max_model_len"), [(None, 4096), (4096, 4096), (5000, 4096)])
def test_nobody_is_warned_who_did_not_ask_for_less(
    caplog: pytest.LogCaptureFixture, budget: int | None, max_model_len: int
) -> None:
    scheduler, _ = make(SequencePool(), max_model_len, budget)
    assert scheduler.token_budget == (5000 if budget == 5000 else 4096)  # 2,048 on a CPU where nothing is said
    assert not caplog.records


def test_inputs_are_no_longer_than_the_pool_holds_or_a_batch_has(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, info = make(pool(100))
    assert info.max_model_len == 100 * BLOCK
    assert info.sources["max_model_len"] == KV_CACHE_SOURCE
    assert "max_model_len is 4096, but the KV cache holds 1600 tokens: inputs are limited to 1600" in caplog.text
    with pytest.raises(ValueError, match="it must have 1 to 1600"):
        scheduler.add(make_request(1, [1601]))
    assert make(pool(20))[1].max_model_len == 1024  # these run whole


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(256, 4096), (20, 1024), (0, 4096)])
def test_a_model_whose_inputs_all_fit_stays_as_it_is(
    caplog: pytest.LogCaptureFixture, num_blocks: int, max_model_len: int
) -> None:
    caplog.set_level(logging.WARNING)
    sequence_pool = pool(num_blocks, 0 if num_blocks else 2)  # states have no length
    assert make(sequence_pool, max_model_len)[1] == model(max_model_len)
    assert not caplog.records
