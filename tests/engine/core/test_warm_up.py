"""What runs before the first request on a GPU: the largest batch, by what a gauge says, and one batch of every kind."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from penstock.engine.core import model_runner
from penstock.engine.core.load_runner import load_runner
from penstock.engine.core.loading.tokenizer_loader import load_tokenizer
from penstock.engine.core.make_scheduler import make_scheduler
from penstock.engine.core.model_runner import ModelRunner
from penstock.engine.core.runner import DeviceLimits, DeviceMemoryError, EndedForward
from penstock.engine.core.warm_up import GpuWarmUp, LargestBatch, SampleBatches, largest_batch, run_all_kinds
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.protocol.batch_outputs import BatchOutputs
from penstock.engine.protocol.config import CacheConfig, EngineConfig, SchedulerConfig
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.tasks import PoolingTask
from penstock.engine.scheduling import PrefillChunk, SequencePool

from .conftest import SaveFolder
from .fake_runner import TOKENIZER, FakeRunner, model, pool

MIB = 1 << 20


class Gauge:
    """A device where a token of a forward takes `token_bytes`, and where `most` tokens find memory."""

    def __init__(self, token_bytes: int = 1000, most: int = 1 << 20, free: int = 100 * MIB) -> None:
        self.token_bytes, self.most, self.free = token_bytes, most, free
        self.num_tokens = 0
        self.runs: list[list[int]] = []

    def available(self) -> int:
        return self.free

    def begin(self) -> None:
        self.num_tokens = 0

    def taken(self) -> int | None:
        return self.num_tokens * self.token_bytes

    def run(self, lengths: Sequence[int]) -> None:
        self.runs.append(list(lengths))
        if sum(lengths) > self.most:
            raise DeviceMemoryError("none")
        self.num_tokens = max(self.num_tokens, sum(lengths))


@pytest.mark.parametrize(
    ("num_tokens", "longest", "max_num_seqs", "shapes"),
    [
        (1000, 300, 8, [[300, 300, 300, 100], [125] * 8]),
        (1024, 512, 300, [[512, 512], [4] * 124 + [3] * 176]),
        (100, 4096, 512, [[100], [1] * 100]),
        (1000, 100, 4, [[100] * 4, [100] * 4]),
        (900, 300, 3, [[300] * 3, [300] * 3]),
    ],
)
def test_the_largest_batches_have_long_sequences_and_many(
    num_tokens: int, longest: int, max_num_seqs: int, shapes: list[list[int]]
) -> None:
    gauge = Gauge()
    found = largest_batch(gauge.run, gauge, num_tokens=num_tokens, longest=longest, max_num_seqs=max_num_seqs)
    assert [sorted(run, reverse=True) for run in gauge.runs] == shapes
    assert found == LargestBatch(num_tokens, 1000 * max(map(sum, shapes)))


def test_where_memory_is_short_half_as_large_a_batch_runs(caplog: pytest.LogCaptureFixture) -> None:
    gauge = Gauge(most=300)
    found = largest_batch(gauge.run, gauge, num_tokens=1000, longest=512, max_num_seqs=64)
    assert found == LargestBatch(250, 250_000)
    assert "out of memory in a forward of 1000 tokens; trying 500." in caplog.text
    assert "out of memory in a forward of 500 tokens; trying 250." in caplog.text
    gauge = Gauge(most=64)
    assert largest_batch(gauge.run, gauge, num_tokens=100, longest=512, max_num_seqs=64).num_tokens == 64
    gauge = Gauge(most=63)
    with pytest.raises(DeviceMemoryError, match="none"):
        largest_batch(gauge.run, gauge, num_tokens=1000, longest=512, max_num_seqs=64)


def test_every_kind_of_batch_runs_once_and_nothing_is_held_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    sequence_pool = pool(100)
    runner = FakeRunner(sequence_pool)
    info = replace(model(), is_matryoshka=True, embedding_size=8)
    ran: list[tuple[list[int], list[int]]] = []

    def run(chunks: Sequence[PrefillChunk]) -> None:
        assert sum(c.num_tokens for c in chunks) <= 2048
        assert len(chunks) <= 100
        ran.append(([c.num_tokens for c in chunks], [c.start for c in chunks]))
        runner.execute(chunks)  # it looks at their order, and whether a chunk goes on where the last one ended

    made = SampleBatches(info, TOKENIZER)
    with caplog.at_level(logging.INFO, "penstock.engine"):
        num_run = run_all_kinds(made, run, sequence_pool, token_budget=2048, longest=1000, max_num_seqs=100)
    assert num_run == len(ran)
    assert f"warmed up: {num_run} batches of up to 2048 tokens in " in caplog.text
    assert sequence_pool.num_allocations == 0
    assert sequence_pool.usage == 0.0

    longest = {max(lengths) for lengths, _ in ran}
    assert {1, 513, 1000} <= longest  # one token; shared out; the longest
    lengths = {n for found, _ in ran for n in found}
    assert {15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513} <= lengths
    assert {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048} <= {sum(found) for found, _ in ran}
    params = made.all_params()
    assert {p.task for p in params} == {PoolingTask.EMBED, PoolingTask.TOKEN_EMBED}
    assert {p.normalize for p in params} == {True, False}
    assert {p.dimensions for p in params} == {None, 4}
    with_past = [starts for _, starts in ran if any(starts)]
    assert len(with_past) == 3 * 2 * len(params)
    chunks = [n for lengths, starts in ran for n, start in zip(lengths, starts, strict=True) if start]
    assert min(chunks) <= 8, "no chunk with a past takes the tile of few rows"
    assert max(chunks) > 256, "no chunk with a past is shared out by pooling"
    assert any(starts[0] == 0 for starts in with_past), "a chunk runs beside a whole sequence"


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 30])
def test_no_batch_has_more_sequences_or_tokens_than_a_forward(max_num_seqs: int) -> None:
    sequence_pool = pool(100)
    runner = FakeRunner(sequence_pool)
    ran: list[int] = []

    def run(chunks: Sequence[PrefillChunk]) -> None:
        assert sum(chunk.num_tokens for chunk in chunks) <= 2048
        ran.append(len(chunks))
        runner.execute(chunks)

    made = SampleBatches(model(), TOKENIZER)
    run_all_kinds(made, run, sequence_pool, token_budget=2048, longest=600, max_num_seqs=max_num_seqs)
    assert max(ran) == max_num_seqs


def test_a_batch_that_finds_no_memory_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def run(chunks: Sequence[PrefillChunk]) -> None:
        if sum(chunk.num_tokens for chunk in chunks) == 1024:
            raise DeviceMemoryError("none is left")

    num_run = run_all_kinds(
        SampleBatches(model(), TOKENIZER), run, SequencePool(), token_budget=1024, longest=600, max_num_seqs=200
    )
    assert num_run > 20
    assert "out of memory while warming up with 1024 tokens: none is left" in caplog.text


@pytest.mark.parametrize("uses_token_types", [True, False])
@pytest.mark.parametrize("include_prompt", [True, False])
def test_made_batches_have_token_types_and_prompts_where_the_model_has(
    uses_token_types: bool, include_prompt: bool
) -> None:
    tokenizer = replace(TOKENIZER, sample_ids=(5, 6, 7), uses_token_types=uses_token_types)
    made = SampleBatches(replace(model(), include_prompt=include_prompt), tokenizer)
    chunks = made.batch([4, 2, 3], made.default_params())
    assert [chunk.num_tokens for chunk in chunks] == [2, 3, 4]
    assert [chunk.sequence.request.params.task for chunk in chunks] == [
        PoolingTask.EMBED,
        PoolingTask.TOKEN_EMBED,
        PoolingTask.EMBED,
    ]
    prompt = chunks[2].sequence.prompt
    assert prompt.token_ids.tolist() == [5, 6, 7, 5]
    assert prompt.token_ids.dtype == np.int32
    assert prompt.type_boundary == (2 if uses_token_types else 0)
    assert prompt.num_prompt_tokens == (0 if include_prompt else 1)


def runner_of(
    save_folder: SaveFolder,
    gauge: Gauge,
    class_name: str,
    *,
    chunked: bool = True,
    positions: int | None = None,
    cuda_graphs: bool = True,
    **cache: object,
) -> ModelRunner:
    """A runner of a tiny model that a gauge watches as if it ran on a GPU."""
    from penstock.engine.core.loading.weights_loader import load_model

    sizes = {"num_key_value_heads": 2} if class_name == "Qwen2Model" else {}
    if positions is not None:
        sizes["max_position_embeddings"] = positions
    config = EngineConfig(
        model=str(save_folder(class_name, **sizes)),
        device="cpu",
        cpu_kernels="torch",
        scheduler=SchedulerConfig(max_num_batched_tokens=300, max_num_seqs=16, enable_chunked_prefill=chunked),
        cuda_graphs=cuda_graphs,
        cache=CacheConfig(**cache),  # type: ignore[arg-type]
    )
    info = replace(resolve_model(config), device="cpu", dtype="float32")
    tokenizer = load_tokenizer(info, trust_remote_code=False, chat_template=None)
    made = load_model(info)
    forward = made.forward

    def watched(batch, *, need_attention=False):  # type: ignore[no-untyped-def]
        gauge.run(batch.seq_lens)
        return forward(batch, need_attention=need_attention)

    made.forward = watched  # type: ignore[method-assign]
    return ModelRunner(info, tokenizer, made, (), config, gauge=gauge)


def test_the_pool_gets_its_share_of_what_the_largest_forward_leaves(save_folder: SaveFolder) -> None:
    gauge = Gauge(token_bytes=100_000, free=100 * MIB)
    runner = runner_of(save_folder, gauge, "Qwen2Model", cache_memory_fraction=0.5)
    assert runner.limits.max_tokens == 300
    assert runner.sequence_pool.kv is not None
    token_bytes = 2 * 16 * 4  # keys and values of one layer
    expected = (100 * MIB - 300 * 100_000) / 2
    assert runner.sequence_pool.kv.num_blocks * 16 * token_bytes == pytest.approx(expected, rel=0.01)
    assert max(map(sum, gauge.runs)) == 300
    runner.warm_up()
    assert runner.take_times() == [], "nobody may learn from forwards that compile"
    assert runner.sequence_pool.num_allocations == 0
    assert any(len(run) == 1 and run[0] == 1 for run in gauge.runs)


def test_a_pool_of_a_given_size_is_there_before_the_largest_forward_runs(save_folder: SaveFolder) -> None:
    gauge = Gauge(token_bytes=100_000, most=100)
    runner = runner_of(save_folder, gauge, "Qwen2Model", kv_cache_memory=MIB)
    assert runner.limits.max_tokens == 75  # 300, 150, 75
    runner.warm_up()


@pytest.mark.parametrize(
    ("chunked", "cached", "free", "budget"),
    [
        (True, True, 100 * MIB, 300),
        (True, False, 100 * MIB, 300),
        (False, True, 100 * MIB, 4096),
        (False, False, 100 * MIB, 4096),
        (True, True, 0, 4096),  # no block of keys and values finds room
        (False, True, 0, 4096),
    ],
)
def test_a_decoder_whose_inputs_run_whole_takes_as_long_ones_as_it_has_positions(
    chunked: bool, cached: bool, free: int, budget: int, save_folder: SaveFolder
) -> None:
    gauge = Gauge(free=free)
    runner = runner_of(save_folder, gauge, "Qwen2Model", chunked=chunked, positions=4096, enable_prefix_caching=cached)
    assert runner.sequence_pool.is_empty is not (free > 0 and (chunked or cached))
    assert runner.limits.max_tokens == max(map(sum, gauge.runs)) == budget
    assert runner.take_times() == []
    limits = SchedulerConfig(max_num_batched_tokens=300, max_num_seqs=16, enable_chunked_prefill=chunked)
    config = EngineConfig(model="m", scheduler=limits)
    scheduler, info = make_scheduler(config, runner.info, runner.sequence_pool, device=runner.limits)
    assert (scheduler.token_budget, info.max_model_len) == (budget, 4096)


def test_an_encoder_finds_out_how_long_an_input_may_be(save_folder: SaveFolder) -> None:
    runner = runner_of(save_folder, Gauge(most=299), "BertModel")
    assert runner.limits.max_tokens == 150
    runner.warm_up()


@pytest.mark.parametrize("class_name", ["BertModel", "Qwen2Model"])
@pytest.mark.parametrize("wants", [True, False])
def test_what_recording_empties_is_filled_again_before_traffic(
    class_name: str, wants: bool, save_folder: SaveFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch gives what it keeps of memory back to the driver before each recording."""
    gauge, recorded_at = Gauge(), []
    runner = runner_of(save_folder, gauge, class_name, positions=100, cuda_graphs=wants)
    monkeypatch.setattr(model_runner, "record_forwards", lambda *args: recorded_at.append(len(gauge.runs)))
    runner.warm_up()
    assert len(recorded_at) == wants
    after = gauge.runs[recorded_at[0] :] if wants else []
    if wants and class_name == "BertModel":
        assert [100, 100, 100] in after
        assert max(map(len, after)) == 16
        assert after[-2:] == [[64]] * 2
    else:
        assert after == []  # a decoder is not recorded
    assert runner.take_times() == []


def test_two_small_batches_run_at_once_after_recording_and_large_ones_alone(caplog: pytest.LogCaptureFixture) -> None:
    events: list[tuple[str, int]] = []

    class Ended(EndedForward):
        def __init__(self, num_tokens: int) -> None:
            super().__init__(BatchOutputs.of(1, []))
            self.num_tokens = num_tokens

        def outputs(self) -> BatchOutputs:
            events.append(("end", self.num_tokens))
            return super().outputs()

    def begin(chunks: Sequence[PrefillChunk]) -> EndedForward:
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        if len(chunks) == 4:
            raise DeviceMemoryError("the graphs have it")
        events.append(("begin", num_tokens))
        return Ended(num_tokens)

    info = model()
    limits = SchedulerConfig(max_num_seqs=4)
    start = GpuWarmUp(info, SampleBatches(info, TOKENIZER), begin, limits, Gauge(), None)
    start.refill(DeviceLimits(max_tokens=1000))
    large = [("begin", 1000), ("end", 1000)] * len(SampleBatches(info, TOKENIZER).default_params())
    assert events == [*large, ("begin", 64), ("begin", 64), ("end", 64), ("end", 64)]
    assert "out of memory beside CUDA graphs with 1000 tokens: the graphs have it" in caplog.text


def test_a_device_without_memory_for_any_forward_is_said_so(save_folder: SaveFolder) -> None:
    with pytest.raises(DeviceMemoryError):
        runner_of(save_folder, Gauge(most=5), "BertModel")


def test_the_loader_says_in_one_line_that_memory_is_short(
    save_folder: SaveFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: object, **kwargs: object) -> None:
        raise DeviceMemoryError("none is left")

    monkeypatch.setattr(ModelRunner, "__init__", none)
    config = EngineConfig(model=str(save_folder()), device="cpu", cpu_kernels="torch")
    with pytest.raises(ModelLoadError, match=r"There is too little memory on cpu for .* \(none is left\)"):
        load_runner(config)


@pytest.mark.gpu
@pytest.mark.parametrize("class_name", ["BertModel", "Qwen2Model", "MambaModel"])
def test_a_gpu_finds_its_limits_compiles_and_answers_as_a_cpu(
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
        made = SampleBatches(runner.info, runner.tokenizer)
        outputs = runner.execute(made.batch([1, 7, 100, 300], made.default_params()[:1])).split()
        vectors.append(np.stack([arrays["embedding"] for arrays in outputs]))
    assert "out of memory" not in caplog.text
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-4)
