"""The warm-up on a GPU: the largest batch, measured by a gauge, and one batch of every kind."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.engine.core.device.memory import MemoryGauge
from penstock.engine.core.load_runner import load_runner
from penstock.engine.core.loading.tokenizer_loader import load_tokenizer
from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.core.make_scheduler import make_scheduler
from penstock.engine.core.model_runner import ModelRunner
from penstock.engine.core.runner import DeviceMemoryError
from penstock.engine.core.warm_up import SampleBatches, largest_batch, run_all_kinds
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.config import CacheConfig, EngineConfig, SchedulerConfig
from penstock.engine.protocol.tasks import PoolingTask
from penstock.engine.scheduling import PrefillChunk, SequencePool

from ...tables import cases
from .conftest import SaveFolder
from .fake_runner import TOKENIZER, FakeRunner, model, pool

MIB = 1 << 20


class Gauge(MemoryGauge):
    """A device with `free` bytes where a token takes `token_bytes`. Forwards of more than `max_tokens` tokens fail."""

    def __init__(self, token_bytes: int = 1000, max_tokens: int = 1 << 20, free: int = 100 * MIB) -> None:
        self.token_bytes, self.max_tokens, self.free = token_bytes, max_tokens, free
        self.num_tokens = 0
        self.batches: list[list[int]] = []

    def available(self) -> int:
        return self.free

    def reset_peak(self) -> None:
        self.num_tokens = 0

    def peak_bytes(self) -> int | None:
        return self.num_tokens * self.token_bytes

    def run(self, lengths: Sequence[int]) -> None:
        self.batches.append(list(lengths))
        if sum(lengths) > self.max_tokens:
            raise DeviceMemoryError("none")
        self.num_tokens = max(self.num_tokens, sum(lengths))


# Batches


@cases(__file__, "num_tokens", "longest", "max_num_seqs", "shapes")
def test_largest_batches_have_long_sequences_or_many(
    num_tokens: int, longest: int, max_num_seqs: int, shapes: list[list[int]]
) -> None:
    gauge = Gauge()
    gauge.num_tokens = 10**6  # an earlier peak
    found = largest_batch(gauge.run, gauge, num_tokens=num_tokens, longest=longest, max_num_seqs=max_num_seqs)
    assert [sorted(batch, reverse=True) for batch in gauge.batches] == shapes
    assert found == (num_tokens, 1000 * max(map(sum, shapes)))


def test_largest_batch_is_halved_while_memory_is_short(caplog: pytest.LogCaptureFixture) -> None:
    def find(max_tokens: int, num_tokens: int = 1000) -> tuple[int, int]:
        gauge = Gauge(max_tokens=max_tokens)
        return largest_batch(gauge.run, gauge, num_tokens=num_tokens, longest=512, max_num_seqs=64)

    assert find(max_tokens=300) == (250, 250_000)
    assert "out of memory in a forward of 1000 tokens; trying 500." in caplog.text
    assert "out of memory in a forward of 500 tokens; trying 250." in caplog.text
    assert find(max_tokens=64, num_tokens=100)[0] == 64
    with pytest.raises(DeviceMemoryError, match="none"):
        find(max_tokens=63)


def test_every_kind_of_batch_runs_once() -> None:
    sequence_pool = pool(100)
    runner = FakeRunner(sequence_pool)
    batches: list[list[PrefillChunk]] = []

    def run(chunks: Sequence[PrefillChunk]) -> None:
        batches.append(list(chunks))
        runner.execute(chunks)  # checks the order of the chunks and the continued sequences

    samples = SampleBatches(replace(model(), is_matryoshka=True, embedding_size=8), TOKENIZER)
    num_run = run_all_kinds(samples, run, sequence_pool, token_budget=2048, longest=1000, max_num_seqs=100)
    assert num_run == len(batches)
    assert sequence_pool.usage == 0.0

    lengths = [[chunk.num_tokens for chunk in batch] for batch in batches]
    assert max(map(sum, lengths)) <= 2048
    assert max(map(len, lengths)) <= 100
    assert {1, 513, 1000} <= set(map(max, lengths))
    assert {tile + i for tile in (16, 64, 128, 256, 512) for i in (-1, 0, 1)} <= {n for batch in lengths for n in batch}
    assert {1 << i for i in range(12)} <= set(map(sum, lengths))
    params = samples.all_params()
    assert {p.task for p in params} == {PoolingTask.EMBED, PoolingTask.TOKEN_EMBED}
    assert {p.normalize for p in params} == {True, False}
    assert {p.dimensions for p in params} == {None, 4}
    with_past = [batch for batch in batches if any(chunk.start for chunk in batch)]
    assert len(with_past) == 3 * 2 * len(params)
    sizes = [chunk.num_tokens for batch in with_past for chunk in batch if chunk.start]
    assert set(sizes) == {8, 64, 320}  # small tiles, large tiles, split pooling
    assert any(batch[0].start == 0 for batch in with_past)  # beside a whole sequence


def test_batches_fit_a_small_budget() -> None:
    samples, batches = SampleBatches(model(), TOKENIZER), list[list[int]]()
    run_all_kinds(
        samples,
        lambda chunks: batches.append([chunk.num_tokens for chunk in chunks]),
        pool(100),
        token_budget=40,
        longest=30,
        max_num_seqs=4,
    )
    params = samples.all_params()
    chunks = [lengths for size in (8, 10) for _ in params for lengths in ([size], [8, size], [size])]
    kinds = [
        lengths
        for sizes, together in (([1], [1, 1]), ([1, 2, 3, 15], [1, 2, 3, 15]), ([30], [30]))
        for lengths in [*[sizes] * len(params), together]
    ]
    products = [[1], [1], [2], [2], [4], [4], [8], [8], [16], [8, 8], [2, 30], [8] * 4]
    assert batches == chunks + kinds + products


@pytest.mark.parametrize("has_types", [False, True])
def test_sample_sequence_has_types_and_a_prompt_like_the_model(has_types: bool) -> None:
    info, tokenizer = replace(model(), include_prompt=has_types), replace(TOKENIZER, uses_token_types=has_types)
    samples = SampleBatches(info, tokenizer)
    tokens = samples.sequence(3, 9, samples.default_params()[0]).tokens
    assert (len(tokens), tokens.type_boundary, tokens.num_skipped_tokens) == ((9, 4, 0) if has_types else (9, 0, 1))


def test_warm_up_skips_batches_without_memory(caplog: pytest.LogCaptureFixture) -> None:
    def run(chunks: Sequence[PrefillChunk]) -> None:
        if sum(chunk.num_tokens for chunk in chunks) == 1024:
            raise DeviceMemoryError("none is left")

    samples = SampleBatches(model(), TOKENIZER)
    num_run = run_all_kinds(samples, run, SequencePool(), token_budget=1024, longest=600, max_num_seqs=200)
    assert num_run > 20
    assert "out of memory while warming up with 1024 tokens: none is left" in caplog.text


# Runners


def make_runner(
    save_folder: SaveFolder,
    gauge: Gauge,
    class_name: str = "BertModel",
    *,
    chunked: bool = True,
    positions: int = 40,
    cuda_graphs: bool = True,
    **cache: Any,
) -> ModelRunner:
    """A runner of a tiny model, measured by a gauge as on a GPU."""
    sizes = {"num_key_value_heads": 2} if class_name == "Qwen2Model" else {}
    config = EngineConfig(
        model=str(save_folder(class_name, max_position_embeddings=positions, **sizes)),
        device="cpu",
        cpu_kernels="torch",
        scheduler=SchedulerConfig(max_num_batched_tokens=300, max_num_seqs=16, enable_chunked_prefill=chunked),
        cuda_graphs=cuda_graphs,
        cache=CacheConfig(**cache),
    )
    info = replace(resolve_model(config), device="cpu", dtype="float32")
    tokenizer = load_tokenizer(info, trust_remote_code=False, chat_template=None)
    loaded = load_model(info)
    forward = loaded.forward

    def measured(batch: Any, *, need_attention: bool = False) -> Any:
        gauge.run(batch.seq_lens)
        return forward(batch, need_attention=need_attention)

    loaded.forward = measured  # type: ignore[method-assign]
    return ModelRunner(info, tokenizer, loaded, (), config, gauge=gauge)


def test_pool_gets_a_share_of_the_remaining_memory(save_folder: SaveFolder) -> None:
    gauge = Gauge(token_bytes=100_000, free=100 * MIB)
    runner = make_runner(save_folder, gauge, "Qwen2Model", cache_memory_fraction=0.5)
    assert runner.limits.max_tokens == 300
    assert runner.sequence_pool.kv is not None
    token_bytes = 2 * 16 * 4  # keys and values of one layer
    expected = (100 * MIB - 300 * 100_000) / 2
    assert runner.sequence_pool.kv.num_blocks * 16 * token_bytes == pytest.approx(expected, rel=0.01)
    assert max(map(sum, gauge.batches)) == 300
    gauge.num_tokens = 1_000  # the peak of earlier forwards
    runner.warm_up()
    assert runner.take_times() == []  # the forwards included compilation
    assert runner.sequence_pool.usage == 0.0
    assert [1] in gauge.batches
    assert max(num_bytes for _, num_bytes in runner._memory_estimator._taken.values()) <= 300 * 100_000


@cases(__file__, "chunked", "cached", "free", "budget")
def test_budget_of_whole_inputs_is_the_longest_input(
    chunked: bool, cached: bool, free: int, budget: int, save_folder: SaveFolder
) -> None:
    gauge = Gauge(free=free)
    runner = make_runner(save_folder, gauge, "Qwen2Model", chunked=chunked, positions=700, enable_prefix_caching=cached)
    assert runner.sequence_pool.is_empty is not (free > 0 and (chunked or cached))
    assert runner.limits.max_tokens == max(map(sum, gauge.batches)) == budget
    assert runner.take_times() == []
    config = EngineConfig(model="m", scheduler=runner._config.scheduler)
    scheduler, info = make_scheduler(config, runner.info, runner.sequence_pool, device=runner.limits)
    assert (scheduler.token_budget, info.max_model_len) == (budget, 700)


def test_memory_limits_the_largest_forward(save_folder: SaveFolder) -> None:
    with_pool = make_runner(save_folder, Gauge(max_tokens=100), "Qwen2Model", kv_cache_memory=MIB)
    assert with_pool.limits.max_tokens == 75  # 300, 150, 75
    assert make_runner(save_folder, Gauge(max_tokens=299)).limits.max_tokens == 150
    with pytest.raises(DeviceMemoryError):
        make_runner(save_folder, Gauge(max_tokens=5))


@pytest.mark.gpu
@pytest.mark.parametrize("class_name", ["BertModel", "Qwen2Model", "MambaModel"])
def test_gpu_warm_up_finds_limits_and_results_equal_cpu(
    class_name: str, save_folder: SaveFolder, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"Qwen2Model": {"num_key_value_heads": 2}, "MambaModel": {"state_size": 16}}
    folder = str(save_folder(class_name, **{"max_position_embeddings": 600, **sizes.get(class_name, {})}))
    vectors = []
    for device in ("cuda", "cpu"):
        limits = SchedulerConfig(max_num_batched_tokens=4096)
        config = EngineConfig(model=folder, device=device, dtype="float32", cpu_kernels="torch", scheduler=limits)
        runner = load_runner(config)
        with caplog.at_level(logging.INFO, "penstock.engine"):
            runner.warm_up()
        assert runner.limits.max_tokens == (4096 if device == "cuda" else None)
        assert runner.take_times() == [] or device == "cpu"
        samples = SampleBatches(runner.info, runner.tokenizer)
        outputs = runner.execute(samples.batch([1, 7, 100, 300], samples.default_params()[:1])).split()
        vectors.append(np.stack([arrays["embedding"] for arrays in outputs]))
    assert "out of memory" not in caplog.text
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-4)
