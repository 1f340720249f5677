"""Forwards in flight beside the host, errors of the device, and the size of the pool.

A fake stream takes the place of CUDA.
"""

from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from penstock.engine.core import model_runner
from penstock.engine.core.model_runner import ModelRunner
from penstock.engine.core.runner import DeviceLostError, DeviceMemoryError, ForwardTime
from penstock.engine.core.waker import Waker
from penstock.engine.executors.torch.packed_batch import ModelOutput, PackedBatch, PackedModel
from penstock.engine.protocol.batch_outputs import BatchOutputs
from penstock.engine.protocol.config import CacheConfig, EngineConfig
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.messages import TokenizedInput
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask
from penstock.engine.scheduling import CacheSpec, InputSequence, KvLayerSpec, PrefillChunk, Request, adapters_of

from .fake_runner import TOKENIZER, model
from .fake_stream import FakeEvent, FakeStream

INFO = replace(model(), device="cpu", dtype="float32", hidden_size=2, embedding_size=2)
SPEC = CacheSpec(kv_layers=(KvLayerSpec(1, 8),))


class CountingModel(PackedModel):
    """The hidden state of a token is its id and its position. `error` fails the next forward."""

    hidden_size = 2

    def __init__(self, cache_spec: CacheSpec | None = None) -> None:
        self.cache_spec = cache_spec
        self.error: Exception | None = None
        self.scale = torch.ones(2)

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        error, self.error = self.error, None
        if error is not None:
            raise error
        rows = torch.stack([batch.input_ids.float(), batch.positions.float()], dim=1) * self.scale
        return ModelOutput(hidden_states=rows)


def chunk_of(*tokens: int, request_id: int = 1, normalize: bool = False) -> PrefillChunk:
    params = PoolingParams(task=PoolingTask.EMBED, normalize=normalize)
    sequence = InputSequence(
        sequence_id=(request_id, 0),
        tokens=TokenizedInput(np.array(tokens, np.int32)),
        num_tokens=len(tokens),
        request=Request(request_id, params),
    )
    return PrefillChunk(sequence, 0, len(tokens))


def make(stream: FakeStream | None = None, cache_spec: CacheSpec | None = None, **config: Any) -> ModelRunner:
    config = EngineConfig(model="m", **config)
    return ModelRunner(INFO, TOKENIZER, CountingModel(cache_spec), (), config, stream=stream)


def vectors(outputs: BatchOutputs) -> np.ndarray:
    return np.stack([arrays["embedding"] for arrays in outputs.split()])


@pytest.fixture
def runner(stream: FakeStream) -> ModelRunner:
    return make(stream)


# Loading and the pool


@pytest.mark.parametrize(("device", "expected"), [("cuda:1", [1, "exact", "tokenizer"]), ("cpu", ["tokenizer"])])
def test_device_is_current_before_the_model_loads(
    device: str, expected: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []

    def load_tokenizer(*_: object, **options: object) -> None:
        events.append("tokenizer")
        raise ModelLoadError("that is enough")

    monkeypatch.setattr(torch.cuda, "set_device", events.append)
    monkeypatch.setattr(model_runner, "load_tokenizer", load_tokenizer)
    monkeypatch.setattr(model_runner, "set_exact_products", lambda: events.append("exact"))
    with pytest.raises(ModelLoadError, match="that is enough"):
        ModelRunner.load(replace(INFO, device=device), EngineConfig(model="m"))
    assert events == expected


def test_without_memory_for_a_sequence_none_runs_in_chunks(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelLoadError):
        make(cache_spec=SPEC, cache=CacheConfig(kv_cache_memory=1))
    assert make(cache_spec=SPEC, cache=CacheConfig(cache_memory_fraction=1e-15)).sequence_pool.is_empty
    assert "inputs do not run in chunks" in caplog.text


# Forwards in flight


def test_two_forwards_may_be_in_flight(
    runner: ModelRunner, stream: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.gate.clear()
    monkeypatch.setattr(f"{FakeStream.__module__}.time", Mock(perf_counter=count().__next__))
    assert (runner.is_ordered, runner.max_forwards) == (True, 1)
    forwards = []
    for tokens in ((7, 8), (9,)):
        assert runner.has_capacity
        forwards.append(runner.begin([chunk_of(*tokens)]))
    assert not runner.has_capacity
    assert not any(forward.is_done for forward in forwards)
    assert runner.take_times() == []
    stream.gate.set()
    assert [vectors(forward.outputs()).tolist() for forward in forwards] == [[[8.0, 1.0]], [[9.0, 0.0]]]
    assert runner.has_capacity
    assert runner.take_times() == [ForwardTime(0, 2, 1.0), ForwardTime(0, 1, 1.0)]


def test_ended_forward_wakes_the_loop(runner: ModelRunner) -> None:
    waker = Waker()
    runner.set_wakeup_fd(waker.fd)
    forward = runner.begin([chunk_of(5)])
    while not forward.is_done:
        waker.wait()
    runner.set_wakeup_fd(None)
    assert vectors(forward.outputs()).tolist() == [[5.0, 0.0]]


# Errors


def test_forward_fails_if_its_event_cannot_be_awaited(
    runner: ModelRunner, stream: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(event: FakeEvent) -> None:
        raise ValueError("made up")

    monkeypatch.setattr(FakeEvent, "wait", fail)
    waker = Waker()
    runner.set_wakeup_fd(waker.fd)
    stream.gate.clear()
    forward = runner.begin([chunk_of(5)])
    waker.wait()
    with pytest.raises(DeviceLostError, match="made up"):
        _ = forward.is_done
    runner.set_wakeup_fd(None)


def test_forward_without_memory_does_not_affect_others(runner: ModelRunner, stream: FakeStream) -> None:
    stream.gate.clear()
    first = runner.begin([chunk_of(5)])
    runner._model.error = torch.OutOfMemoryError("none")  # type: ignore[attr-defined]
    with pytest.raises(DeviceMemoryError):
        runner.begin([chunk_of(6)])
    assert runner.has_capacity
    second = runner.begin([chunk_of(7)])
    stream.gate.set()
    assert [vectors(forward.outputs()).tolist() for forward in (first, second)] == [[[5.0, 0.0]], [[7.0, 0.0]]]
    assert len(runner.take_times()) == 2


def test_lost_device_fails_every_call(runner: ModelRunner, stream: FakeStream) -> None:
    forward = runner.begin([chunk_of(5)])
    stream.error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    for call in (
        lambda: forward.is_done,
        forward.outputs,
        lambda: runner.has_capacity,
        lambda: runner.begin([chunk_of(6)]),
        lambda: runner.execute([chunk_of(6)]),
    ):
        with pytest.raises(DeviceLostError, match="illegal memory access"):
            call()


def test_chunks_run_with_the_numbers_of_their_adapters() -> None:
    chunks = [chunk_of(1), chunk_of(2), chunk_of(3)]
    for chunk, name in zip(chunks, (None, "tax", "legal"), strict=True):
        chunk.sequence.request.params = PoolingParams(adapter=name)
    for numbers, last, expected in (({"legal": 0, "tax": 1}, 3, [-1, 1, 0]), ({"tax": 0}, 1, None), ({}, 3, None)):
        found = adapters_of(chunks[:last], numbers)
        assert (None if found is None else found.tolist()) == expected
