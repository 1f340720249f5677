"""The sizes of the scheduler follow the limits of the operator, the model and its memory."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.core.make_scheduler import make_scheduler
from penstock.engine.core.runner import DeviceLimits
from penstock.engine.protocol.config import EngineConfig, SchedulerConfig
from penstock.engine.protocol.model_info import KV_CACHE_SOURCE, ModelInfo
from penstock.engine.scheduling import Scheduler, SequencePool

from ...tables import cases
from ..scheduling.records import make_request
from .fake_runner import BLOCK, model, pool


def make(
    sequence_pool: SequencePool,
    max_model_len: int = 4096,
    budget: int | None = 1024,
    device: DeviceLimits | None = None,
    **limits: Any,
) -> tuple[Scheduler, ModelInfo]:
    config = EngineConfig(model="m", scheduler=SchedulerConfig(max_num_batched_tokens=budget, **limits))
    return make_scheduler(config, model(max_model_len), sequence_pool, device=device)


def test_device_memory_limits_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    device = DeviceLimits(max_tokens=700)
    for sequence_pool, max_model_len in ((SequencePool(), 512), (SequencePool(), 700), (pool(1000), 4096)):
        scheduler, info = make(sequence_pool, max_model_len, device=device)
        assert (scheduler.token_budget, info.max_model_len) == (700, max_model_len)
    assert not caplog.records
    scheduler, info = make(SequencePool(), device=device)
    assert (scheduler.token_budget, info.max_model_len) == (700, 700)
    assert info.limit_name == "the memory of the server's GPU"
    assert "the memory holds a forward of 700 tokens: inputs are limited to it" in caplog.text
    scheduler, info = make(SequencePool(), device=DeviceLimits(max_tokens=5000))
    assert (scheduler.token_budget, info.max_model_len) == (4096, 4096)


@cases(__file__, "device", "memory", "tokens", "seqs")
def test_default_budget_follows_the_device(device: str, memory: int | None, tokens: int, seqs: int) -> None:
    info, limits = replace(model(), device=device), DeviceLimits(memory=memory)
    for config, expected in (
        (SchedulerConfig(), (tokens, seqs)),
        (SchedulerConfig(max_num_batched_tokens=99, max_num_seqs=7), (99, 7)),
    ):
        scheduler, _ = make_scheduler(EngineConfig(model="m", scheduler=config), info, pool(1000), device=limits)
        assert (scheduler.token_budget, config.seqs(device)) == expected


def test_chunk_size_of_the_operator_is_at_most_a_batch(caplog: pytest.LogCaptureFixture) -> None:
    config = make(pool(1000), chunk_size=100)[0].prefill.config
    assert (config.chunk_size, config.is_dynamic) == (100, False)
    assert make(pool(1000), chunk_size=1024)[0].prefill.config.chunk_size == 1024
    assert not caplog.records
    assert make(pool(1000), chunk_size=1025)[0].prefill.config.chunk_size == 1024
    assert "chunk_size is 1025, but a forward has 1024 tokens; chunk_size is lowered" in caplog.text


@pytest.mark.parametrize("has_memory", [True, False])
def test_without_chunks_the_budget_is_the_longest_input(caplog: pytest.LogCaptureFixture, has_memory: bool) -> None:
    sequence_pool = pool(1000) if has_memory else SequencePool()
    for budget, expected in ((None, 4096), (4096, 4096), (5000, 5000)):
        scheduler, _ = make(sequence_pool, budget=budget, enable_chunked_prefill=not has_memory)
        assert scheduler.token_budget == expected
    assert not caplog.records
    scheduler, info = make(sequence_pool, enable_chunked_prefill=not has_memory)
    assert scheduler.token_budget == info.max_model_len == 4096
    assert not scheduler.prefill.should_chunk(4096)
    assert (
        "max_num_batched_tokens is 1024, but one sequence may have 4096 tokens; the token budget is raised"
        in caplog.text
    )
    scheduler, _ = make(sequence_pool, enable_chunked_prefill=not has_memory, chunk_size=100)
    assert not scheduler.prefill.should_chunk(4096)


def test_pool_limits_the_length_of_inputs(caplog: pytest.LogCaptureFixture) -> None:
    for num_blocks, max_model_len in ((256, 4096), (20, 1024), (0, 4096)):  # states have no length
        assert make(pool(num_blocks, 0 if num_blocks else 2), max_model_len)[1] == model(max_model_len)
    assert not caplog.records
    scheduler, info = make(pool(100))
    assert info.max_model_len == 100 * BLOCK
    assert info.sources["max_model_len"] == KV_CACHE_SOURCE
    assert "max_model_len is 4096, but the KV cache holds 1600 tokens: inputs are limited to 1600" in caplog.text
    with pytest.raises(ValueError, match="it must have 1 to 1600"):
        scheduler.add(make_request(1, [1601]))
    assert make(pool(20))[1].max_model_len == 1024  # inputs that fit into a batch run whole
