"""Forwards under way beside the host; errors of the device told apart; a pool without memory, the operator's to know.

What is played here, and runs on a GPU in the tests that are marked so: two batches are under way, none is looked at
before it is there, and what they give is what one after the other gives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.core import model_runner
from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.core.model_runner import ModelRunner
from penstock.engine.core.runner import DeviceLostError, DeviceMemoryError, EndedForward
from penstock.engine.core.waker import Waker
from penstock.engine.executors.torch.base import ModelOutput, PackedModel
from penstock.engine.executors.torch.packed_batch import PackedBatch
from penstock.engine.model_files.resolve import resolve_model, with_device
from penstock.engine.protocol.batch_outputs import BatchOutputs
from penstock.engine.protocol.config import CacheConfig, EngineConfig, SchedulerConfig
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import TokenizedInput
from penstock.engine.protocol.tasks import PoolingTask
from penstock.engine.scheduling import CacheSpec, KvLayerSpec, PrefillChunk, QueuedSequence, Request

from .fake_runner import PARAMS, TOKENIZER, model
from .played_stream import PlayedEvent, PlayedStream

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


def chunk() -> PrefillChunk:
    prompt = TokenizedInput(np.arange(5, dtype=np.int32))
    return PrefillChunk(
        QueuedSequence(request_id=(1, 0), prompt=prompt, num_tokens=5, request=Request(1, PARAMS)),
        0,
        5,
    )


@pytest.mark.parametrize(("device", "expected"), [("cuda:1", [1, "tokenizer"]), ("cpu", ["tokenizer"])])
def test_the_models_device_is_current_before_anything_loads(
    device: str, expected: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []

    def load_tokenizer(*_: object, **options: object) -> None:
        events.append("tokenizer")
        raise ModelLoadError("that is enough")

    monkeypatch.setattr(torch.cuda, "set_device", events.append)
    monkeypatch.setattr(model_runner, "load_tokenizer", load_tokenizer)
    monkeypatch.setattr(model_runner, "multiply_exactly", lambda: None)
    with pytest.raises(ModelLoadError, match="that is enough"):
        ModelRunner.load(replace(INFO, device=device), EngineConfig(model="m"))
    assert events == expected


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
    made = runner(Broken(cache_spec=SPEC), cache=CacheConfig(kv_cache_memory=1 << 20)).sequence_pool
    assert made.kv is not None
    assert 0.9 < made.kv.num_blocks * 16 * SPEC.kv_bytes_per_token(4) / (1 << 20) <= 1.0
    assert made.prefixes is not None


def test_without_memory_for_any_sequence_none_runs_in_chunks(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelLoadError):
        runner(Broken(cache_spec=SPEC), cache=CacheConfig(kv_cache_memory=1))
    made = runner(Broken(cache_spec=SPEC), cache=CacheConfig(cache_memory_fraction=1e-15))
    assert made.sequence_pool.is_empty
    assert "inputs do not run in chunks" in caplog.text


@pytest.mark.parametrize(("chunks", "prefixes"), [(True, False), (False, True), (False, False)])
def test_a_pool_is_made_for_chunks_or_for_prefixes(chunks: bool, prefixes: bool) -> None:
    made = runner(
        Broken(cache_spec=SPEC),
        scheduler=SchedulerConfig(enable_chunked_prefill=chunks),
        cache=CacheConfig(kv_cache_memory=1 << 20, enable_prefix_caching=prefixes),
    ).sequence_pool
    assert made.is_empty != (chunks or prefixes)
    assert (made.prefixes is not None) == prefixes


class Counting(PackedModel):
    """Rows of a token are its id and its place, in float32. `error` is raised instead, once."""

    hidden_size = 2

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.scale = torch.ones(2)

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        error, self.error = self.error, None
        if error is not None:
            raise error
        rows = torch.stack([batch.input_ids.float(), batch.positions.float()], dim=1) * self.scale
        return ModelOutput(hidden_states=rows)


WIDE = replace(model(), device="cpu", dtype="float32", hidden_size=2, embedding_size=2)
PLAIN = PoolingParams(task=PoolingTask.EMBED, normalize=False)


def ids(*tokens: int) -> PrefillChunk:
    prompt = TokenizedInput(np.array(tokens, np.int32))
    sequence = QueuedSequence(
        request_id=(tokens[0], 0), prompt=prompt, num_tokens=len(prompt), request=Request(1, PLAIN)
    )
    return PrefillChunk(sequence, 0, len(prompt))


def flying(counting: Counting, stream: PlayedStream | None) -> ModelRunner:
    return ModelRunner(WIDE, TOKENIZER, counting, (), EngineConfig(model="m"), stream=stream)


def rows_of(outputs: BatchOutputs) -> list[list[float]]:
    return [arrays["embedding"].tolist() for arrays in outputs.split()]


def test_two_forwards_are_under_way_and_no_more(stream: PlayedStream) -> None:
    made = flying(Counting(), stream)
    stream.gate.clear()
    forwards = []
    for tokens in ((7, 8), (9,)):
        assert made.can_begin
        forwards.append(made.begin([ids(*tokens)]))
    assert not made.can_begin
    assert not any(forward.is_done for forward in forwards)
    assert made.take_times() == []
    stream.gate.set()
    assert rows_of(forwards[0].outputs()) == [[8.0, 1.0]]  # LAST
    assert rows_of(forwards[1].outputs()) == [[9.0, 0.0]]
    assert made.can_begin
    assert [time.whole_tokens for time in made.take_times()] == [2, 1]


def test_memory_is_measured_for_forwards_with_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    counting, calls = Counting(), []
    counting.cache_spec = SPEC
    cache = CacheConfig(kv_cache_memory=1 << 20)
    made = ModelRunner(WIDE, TOKENIZER, counting, (), EngineConfig(model="m", cache=cache))
    monkeypatch.setattr(made._meter, "begin", lambda: calls.append("begin"))
    monkeypatch.setattr(made._meter, "end", calls.append)
    made.begin([ids(7, 8)])
    assert calls == []
    of_prompt = ids(1, 2, 3)
    of_prompt.sequence.is_long = True
    of_prompt.sequence.allocation = made.sequence_pool.allocate((1, 0), 3)
    made.begin([ids(7, 8), of_prompt])
    assert calls == ["begin", 5]


def test_end_of_a_forward_wakes_the_thread(stream: PlayedStream) -> None:
    made, waker = flying(Counting(), stream), Waker()
    made.set_wakeup_fd(waker.fd)
    forward = made.begin([ids(5)])
    while not forward.is_done:
        waker.wait()
    made.set_wakeup_fd(None)
    assert rows_of(forward.outputs()) == [[5.0, 0.0]]


def test_forward_fails_when_its_event_cannot_be_awaited(stream: PlayedStream, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(event: PlayedEvent) -> None:
        raise ValueError("made up")

    monkeypatch.setattr(PlayedEvent, "wait", fail)
    made, waker = flying(Counting(), stream), Waker()
    made.set_wakeup_fd(waker.fd)
    stream.gate.clear()
    forward = made.begin([ids(5)])
    waker.wait()
    with pytest.raises(DeviceLostError, match="made up"):
        _ = forward.is_done
    made.set_wakeup_fd(None)


def test_on_a_cpu_a_forward_has_ended_when_it_has_begun() -> None:
    made = flying(Counting(), None)
    for _ in range(3):
        forward = made.begin([ids(5)])
        assert isinstance(forward, EndedForward)
        assert made.can_begin
    assert len(made.take_times()) == 3


def test_a_forward_without_memory_beside_another_leaves_that_alone(stream: PlayedStream) -> None:
    counting = Counting()
    made = flying(counting, stream)
    stream.gate.clear()
    first = made.begin([ids(5)])
    counting.error = torch.OutOfMemoryError("none")
    with pytest.raises(DeviceMemoryError):
        made.begin([ids(6)])
    assert made.can_begin
    second = made.begin([ids(7)])
    stream.gate.set()
    assert rows_of(first.outputs()) == [[5.0, 0.0]]
    assert rows_of(second.outputs()) == [[7.0, 0.0]]
    assert len(made.take_times()) == 2


def test_a_device_that_is_lost_while_forwards_run_is_told_by_all_of_them(stream: PlayedStream) -> None:
    made = flying(Counting(), stream)
    forward = made.begin([ids(5)])
    stream.error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    for ask in (
        lambda: forward.is_done,
        forward.outputs,
        lambda: made.can_begin,
        lambda: made.begin([ids(6)]),
        lambda: made.execute([ids(6)]),
    ):
        with pytest.raises(DeviceLostError, match="illegal memory access"):
            ask()


def test_what_is_not_finite_is_told_from_the_rest_of_its_batch(stream: PlayedStream) -> None:
    counting = Counting()
    made = flying(counting, stream)
    counting.scale = torch.tensor([1.0, torch.inf])  # of place 0 it is NaN
    outputs = made.begin([ids(5), ids(6, 7)]).outputs()
    assert outputs.is_finite.tolist() == [False, False]
    counting.scale = torch.tensor([3e38, 1.0])
    assert made.begin([ids(1), ids(5)]).outputs().is_finite.tolist() == [True, False]


# On a GPU


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelRunner]:
    """Makes runners of one small BERT, on the device that is named."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.BertConfig(vocab_size=200, max_position_embeddings=600, **sizes)
    transformers.BertModel(config).save_pretrained(folder)

    def load(device: str) -> ModelRunner:
        info = with_device(
            resolve_model(EngineConfig(model=str(folder))), device, "float32" if device == "cpu" else "bfloat16"
        )
        return ModelRunner(info, TOKENIZER, load_model(info), (), EngineConfig(model="m"))

    return load


def random_batches(count: int) -> list[list[PrefillChunk]]:
    numbers = np.random.default_rng(0)
    params = PoolingParams(task=PoolingTask.EMBED, normalize=True)
    batches = []
    for _ in range(count):
        lengths = sorted(numbers.integers(1, 500, 40).tolist())
        prompts = [TokenizedInput(numbers.integers(3, 200, length).astype(np.int32)) for length in lengths]
        sequences = [
            QueuedSequence(request_id=(i, 0), prompt=prompt, num_tokens=len(prompt), request=Request(i, params))
            for i, prompt in enumerate(prompts)
        ]
        batches.append([PrefillChunk(s, 0, s.num_tokens) for s in sequences])
    return batches


def vectors(outputs: BatchOutputs) -> np.ndarray:
    return np.stack([arrays["embedding"] for arrays in outputs.split()])


@pytest.mark.gpu
def test_on_a_gpu_batches_in_flight_give_what_one_at_a_time_gives(encoders: Callable[[str], ModelRunner]) -> None:
    gpu, cpu = encoders("cuda"), encoders("cpu")
    batches = random_batches(12)
    alone = [vectors(gpu.execute(batch)) for batch in batches]
    under_way = deque[Any]()
    found = []
    for batch in batches:
        if not gpu.can_begin:
            found.append(vectors(under_way.popleft().outputs()))
        under_way.append(gpu.begin(batch))
    found += [vectors(forward.outputs()) for forward in under_way]
    assert len(gpu.take_times()) == 24
    for ours, theirs, batch in zip(found, alone, batches, strict=True):
        assert np.array_equal(ours, theirs)
        assert (ours * vectors(cpu.execute(batch))).sum(axis=1).min() > 0.999


@pytest.mark.gpu
def test_on_a_gpu_the_host_waits_for_nothing_while_it_begins_a_batch(encoders: Callable[[str], ModelRunner]) -> None:
    gpu = encoders("cuda")
    batches = random_batches(4)
    for batch in batches:
        gpu.execute(batch)  # compiles, and makes the pinned memory
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        forwards = [gpu.begin(batch) for batch in batches[:2]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for forward in forwards:
        assert forward.outputs().is_finite.all()


@pytest.mark.gpu
def test_on_a_gpu_a_batch_without_memory_leaves_the_one_before_it_alone(encoders: Callable[[str], ModelRunner]) -> None:
    gpu = encoders("cuda")
    (batch, other) = random_batches(2)
    expected = vectors(gpu.execute(batch))
    forward = gpu._model.forward

    def too_large(*args: Any, **kwargs: Any) -> Any:
        forward(*args, **kwargs)
        return torch.empty(1 << 50, device="cuda")

    first = gpu.begin(batch)
    gpu._model.forward = too_large  # type: ignore[method-assign]
    with pytest.raises(DeviceMemoryError):
        gpu.begin(other)
    gpu._model.forward = forward  # type: ignore[method-assign]
    second = gpu.begin(batch)
    assert np.array_equal(vectors(first.outputs()), expected)
    assert np.array_equal(vectors(second.outputs()), expected)
