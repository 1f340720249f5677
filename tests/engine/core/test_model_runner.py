"""Errors of the device are told apart, and a pool that finds no memory is the operator's to know of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.core.model_runner import ModelRunner
from penstock.engine.core.runner import DeviceLostError, DeviceMemoryError
from penstock.engine.models.base import PackedModel
from penstock.engine.protocol.config import CacheConfig, EngineConfig, SchedulerConfig
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.request import TokenizedInput
from penstock.engine.scheduling import PrefillChunk, QueuedSequence, Request
from penstock.engine.sequence_pool import NullAllocator, SequenceAllocator
from penstock.engine.sequence_pool.cache_spec import CacheSpec, KvLayerSpec

from .fake_runner import PARAMS, TOKENIZER, model

INFO = replace(model(), device="cpu", dtype="float32")


class Broken(PackedModel):
    """A model whose forward fails."""

    hidden_size = 1

    def __init__(self, error: Exception | None = None, cache_spec: CacheSpec | None = None) -> None:
        self.error = error
        self.cache_spec = cache_spec

    def forward(self, batch: Any, *, need_attention: bool = False) -> Any:
        assert self.error is not None
        raise self.error


def runner(broken: Broken, **config: Any) -> ModelRunner:
    return ModelRunner(INFO, TOKENIZER, broken, (), EngineConfig(model="m", **config))


def chunk() -> PrefillChunk[QueuedSequence]:
    prompt = TokenizedInput(np.arange(5, dtype=np.int32))
    return PrefillChunk(
        QueuedSequence(request_id=(1, 0), prompt=prompt, num_tokens=5, request=Request(1, PARAMS)),
        0,
        5,
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), DeviceMemoryError),
        (MemoryError("none"), DeviceMemoryError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), DeviceMemoryError),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), DeviceLostError),
        (RuntimeError("shapes"), RuntimeError),
        (KeyError("x"), KeyError),
    ],
)
def test_errors_of_memory_and_of_a_lost_device_are_told_from_others(
    error: Exception, expected: type[Exception]
) -> None:
    with pytest.raises(expected) as raised:
        runner(Broken(error)).execute([chunk()])
    assert type(raised.value) is expected
    assert str(error) in str(raised.value)


SPEC = CacheSpec(kv_layers=(KvLayerSpec(1, 8),))


def test_a_pool_holds_what_the_operator_gives() -> None:
    made = runner(Broken(cache_spec=SPEC), cache=CacheConfig(kv_cache_memory=1 << 20)).allocator
    assert isinstance(made, SequenceAllocator)
    assert made.pool.kv is not None
    assert 0.9 < made.pool.kv.num_blocks * 16 * SPEC.kv_bytes_per_token(4) / (1 << 20) <= 1.0
    assert made.prefixes is not None


def test_without_memory_for_any_sequence_none_runs_in_chunks(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelLoadError):
        runner(Broken(cache_spec=SPEC), cache=CacheConfig(kv_cache_memory=1))
    made = runner(Broken(cache_spec=SPEC), cache=CacheConfig(memory_fraction=1e-15))
    assert isinstance(made.allocator, NullAllocator)
    assert "inputs do not run in chunks" in caplog.text


@pytest.mark.parametrize(("chunks", "prefixes"), [(True, False), (False, True), (False, False)])
def test_a_pool_is_made_for_chunks_or_for_prefixes(chunks: bool, prefixes: bool) -> None:
    made = runner(
        Broken(cache_spec=SPEC),
        scheduler=SchedulerConfig(enable_chunked_prefill=chunks),
        cache=CacheConfig(kv_cache_memory=1 << 20, enable_prefix_caching=prefixes),
    ).allocator
    assert isinstance(made, SequenceAllocator) == (chunks or prefixes)
    assert (made.prefixes is not None) == prefixes
