"""Results of chunked prefill equal those of whole sequences, through the engine loop.

Random models with attention, with SSM layers and with both. Every pooling type, chunks of 1, 7 and 64 tokens and of
adaptive size, other requests beside them, preemption, and the prefix cache.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Semaphore
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from penstock.engine.core.array_runner import ArrayForward, ArrayRunner
from penstock.engine.core.loading.cpu_kernels import load_array_encoder
from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.core.model_runner import ModelRunner
from penstock.engine.core.runner import Runner
from penstock.engine.executors.cpu.array_encoder import ArrayEncoder, PackedArrays
from penstock.engine.executors.torch.packed_batch import PackedBatch, PackedModel
from penstock.engine.model_files.resolve import resolve_model, with_device
from penstock.engine.protocol.config import CacheConfig, EngineConfig, SchedulerConfig
from penstock.engine.protocol.messages import SubmitRequest, TokenizedInput
from penstock.engine.protocol.model_info import ModelInfo, TokenizerSpec
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask, PoolingType
from penstock.engine.scheduling import size_pool
from penstock.kernels.cpu import CpuForward, CpuKernelError, CpuLibrary

from ...tables import table
from .fake_runner import CoreDriver
from .fake_stream import FakeStream

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
SHORT = (1, 5, 12)
LONG = (34, 70)
MAX_NUM_SEQS = 8
MODELS = table(__file__, "chunked_models")
"""Class and config of each model."""


class Case(NamedTuple):
    """A model, and the device and executor that run it."""

    model: str  # key of MODELS
    device: str = "cpu"
    uses_c_library: bool = False
    dtype: str = "float32"


CASES = [
    *(pytest.param(Case(name), id=name) for name in MODELS),
    *(pytest.param(Case(name, uses_c_library=True), id=f"{name}, C library") for name in ("llama", "gemma2")),
    pytest.param(Case("llama", uses_c_library=True, dtype="bfloat16"), id="llama, C library, bfloat16"),
    *(pytest.param(Case(name, device="cuda"), id=f"{name}, cuda", marks=pytest.mark.gpu) for name in MODELS),
]
POOLING = [t for t in PoolingType if not t.is_token_level]


@dataclasses.dataclass
class Loaded:
    """A loaded model, which several runners use."""

    info: ModelInfo
    model: PackedModel | ArrayEncoder

    @property
    def is_array_model(self) -> bool:
        return isinstance(self.model, ArrayEncoder)

    def runner(self, config: EngineConfig, pooling: PoolingType | None, stream: FakeStream | None = None) -> Runner:
        info = self.info if pooling is None else dataclasses.replace(self.info, sequence_pooling=(pooling,))
        tokenizer = TokenizerSpec(json="", truncation_side="right", uses_token_types=False, sample_ids=(5, 6, 7))
        if isinstance(self.model, ArrayEncoder):
            return ArrayRunner(info, tokenizer, self.model, config)
        return ModelRunner(info, tokenizer, self.model, (), config, stream=stream)

    def after_forwards(
        self, monkeypatch: pytest.MonkeyPatch, check: Callable[[PackedBatch | PackedArrays], None]
    ) -> None:
        """Calls `check` with the batch after each forward of the model."""
        name = "begin" if self.is_array_model else "forward"
        forward = getattr(self.model, name)

        def run(batch: PackedBatch | PackedArrays, **options: Any) -> Any:
            output = forward(batch, **options)
            if isinstance(output, CpuForward):
                output.result()
            check(batch)
            return output

        monkeypatch.setattr(self.model, name, run)


def open_library() -> CpuLibrary:
    try:
        return CpuLibrary(2)
    except CpuKernelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    case: Case = request.param
    class_name, sizes = MODELS[case.model]
    folder: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model_class = getattr(transformers, class_name)
    model_class(model_class.config_class(**sizes)).save_pretrained(folder)
    info = with_device(resolve_model(EngineConfig(model=str(folder))), case.device, case.dtype)
    info = dataclasses.replace(info, arithmetic=None if case.dtype == "float32" else case.dtype)
    assert info.packed
    with contextlib.ExitStack() as stack:
        if case.uses_c_library:
            yield Loaded(info, load_array_encoder(info, stack.enter_context(open_library())))
        else:
            yield Loaded(info, load_model(info))


class Client(CoreDriver):
    """Steps a core over the loaded model. The results of a request are the rows of its input."""

    def __init__(
        self,
        loaded: Loaded,
        pooling: PoolingType | None = None,
        *,
        chunking: bool = True,
        prefixes: bool = False,
        kv_cache_memory: int = 64 << 20,
        stream: FakeStream | None = None,
        **limits: Any,
    ) -> None:
        limits["enable_chunked_prefill"] = chunking
        config = EngineConfig(
            model="unused",
            scheduler=SchedulerConfig(max_num_batched_tokens=32, **limits),
            cache=CacheConfig(kv_cache_memory=kv_cache_memory, enable_prefix_caching=prefixes),
        )
        super().__init__(loaded.runner(config, pooling, stream), budget=32, **limits)
        self.max_in_flight = 0
        self.runner.set_wakeup_fd(self.core._waker.fd)
        if stream is not None:
            wait = self.core._waker.wait

            def end_one_forward() -> list[Callable[[], None]]:
                assert stream is not None
                assert stream.permits is not None
                stream.permits.release()
                return wait()

            self.core._waker.wait = end_one_forward  # type: ignore[method-assign]
        self.params = {
            task: PoolingParams(normalize=False if task is PoolingTask.EMBED else None).resolved(task, loaded.info)
            for task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)
        }

    def submit_texts(
        self, *requests: tuple[int, Sequence[int]], task: PoolingTask = PoolingTask.EMBED, priority: int = 0
    ) -> None:
        for request_id, _ in requests:
            self.results.pop(request_id, None)
        self.send(
            *(
                SubmitRequest(request_id, self.params[task], [TokenizedInput(np.asarray(tokens, np.int32))], priority)
                for request_id, tokens in requests
            )
        )

    def run(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            super().run()
            self.max_in_flight = max(self.max_in_flight, len(self.core._running))

    def rows_of(self, request_id: int) -> np.ndarray:
        return np.reshape(self.results[request_id][0], (-1, 32))

    def vectors(self, num_requests: int) -> list[np.ndarray]:
        return [self.rows_of(i) for i in range(num_requests)]


@pytest.fixture
def client(loaded: Loaded) -> Iterator[Callable[..., Client]]:
    clients = []

    def make(pooling: PoolingType | None = None, **options: Any) -> Client:
        clients.append(Client(loaded, pooling, **options))
        return clients[-1]

    yield make
    for each in clients:
        each.runner.set_wakeup_fd(None)


def texts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    numbers = np.random.default_rng(seed)
    return [numbers.integers(3, 200, length).tolist() for length in lengths]


def run(client: Client, inputs: Sequence[Sequence[int]], task: PoolingTask = PoolingTask.EMBED) -> list[np.ndarray]:
    client.submit_texts(*enumerate(inputs), task=task)
    client.run_all()
    assert not client.failures
    return client.vectors(len(inputs))


def assert_same(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for rows, expected_rows in zip(found, expected, strict=True):
        assert rows.shape == expected_rows.shape
        scale = max(1.0, float(np.abs(expected_rows).max()))
        assert np.abs(rows - expected_rows).max() <= TOLERANCE * scale


CHUNK_SIZES = ((1, 64), (7, None))


@pytest.mark.parametrize(
    ("pooling", "chunk_sizes"), [(pooling, CHUNK_SIZES[i % 2]) for i, pooling in enumerate(POOLING)]
)
def test_chunked_results_equal_whole_results(
    loaded: Loaded, client: Callable[..., Client], pooling: PoolingType, chunk_sizes: tuple[int | None, ...]
) -> None:
    if pooling is PoolingType.ATTENTION and (loaded.is_array_model or not loaded.info.num_attention_heads):
        pytest.skip("the model has no attention heads, or the native kernels do not give their weights")
    inputs = texts([*SHORT, *LONG])
    expected = run(client(pooling, chunking=False), inputs)
    for chunk_size in chunk_sizes:
        number = len(inputs) - (chunk_size == 1)
        chunked = client(pooling, chunk_size=chunk_size, prefixes=chunk_size == 64)
        assert_same(run(chunked, inputs[:number]), expected[:number])
        chunked_lengths = {1: LONG[:1], 64: LONG[1:]}.get(chunk_size, LONG)
        num_expected_chunks = sum(length / (chunk_size or 32) for length in chunked_lengths)
        assert chunked.sequence_pool_stats.chunks.completed_chunks >= num_expected_chunks
        assert chunked.sequence_pool_stats.usage == 0


@pytest.mark.parametrize("pooling", [PoolingType.ATTENTION, PoolingType.CLS])
def test_results_equal_beside_prompts_that_have_begun(
    loaded: Loaded, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch, pooling: PoolingType
) -> None:
    if pooling is PoolingType.ATTENTION and (loaded.is_array_model or not loaded.info.num_attention_heads):
        pytest.skip("the model has no attention heads, or the native kernels do not give their weights")
    inputs = texts([70, 34, *SHORT])
    expected = run(client(pooling, chunking=False), inputs)
    batches: list[list[int]] = []
    loaded.after_forwards(monkeypatch, lambda batch: batches.append(list(batch.seq_lens)))
    mixed = client(pooling, chunk_size=7)
    batches.clear()
    for number, tokens in enumerate(inputs):
        mixed.submit_texts((number, tokens))
        mixed.run()
    mixed.run_all()
    assert not mixed.failures
    assert len(batches[1]) > 1, "the first prompt continues beside the second one"
    assert_same(mixed.vectors(len(inputs)), expected)


def memory_for_one(loaded: Loaded) -> int:
    """Returns the bytes of a pool that holds a sequence of 90 tokens, but none of 85 tokens beside it."""
    spec = loaded.model.cache_spec
    assert spec is not None
    doubled = dataclasses.replace(spec, ssm_layers=2 * spec.ssm_layers)
    step = doubled.ssm_bytes_per_slot(4) or 16 * doubled.kv_bytes_per_token(4)
    for memory in range(step + 16 * doubled.kv_bytes_per_token(4), 1 << 30, step):
        plan = size_pool(doubled, memory, block_size=16, itemsize=4, max_num_seqs=MAX_NUM_SEQS)
        if not spec.kv_layers or plan.num_blocks * 16 >= 90:
            return memory
    raise AssertionError


def run_preempted(client: Client, inputs: Sequence[Sequence[int]], task: PoolingTask) -> list[np.ndarray]:
    """Runs a prompt that is preempted by the second one, then the other inputs."""
    client.submit_texts((0, inputs[0]), task=task, priority=100)  # a level counts as one second of waiting
    client.run(num_steps=5)
    client.submit_texts((1, inputs[1]), task=task, priority=0)
    client.submit_texts(*enumerate(inputs[2:], 2), task=task)
    client.run_all()
    assert not client.failures
    assert client.sequence_pool_stats.chunks.preemptions == 1
    assert client.sequence_pool_stats.usage == 0
    return client.vectors(len(inputs))


@pytest.mark.parametrize(
    ("task", "pooling"),
    [
        (PoolingTask.EMBED, PoolingType.LAST),
        (PoolingTask.EMBED, PoolingType.MAX),
        (PoolingTask.TOKEN_EMBED, PoolingType.MEAN),
    ],
)
def test_results_equal_after_preemption(
    loaded: Loaded, client: Callable[..., Client], pooling: PoolingType, task: PoolingTask
) -> None:
    inputs = texts([90, 85, *SHORT])
    expected = run(client(pooling, chunking=False), inputs, task)
    limits = {"chunk_size": 7, "kv_cache_memory": memory_for_one(loaded), "max_num_seqs": MAX_NUM_SEQS}
    for prefixes in (False, True):
        assert_same(run_preempted(client(pooling, prefixes=prefixes, **limits), inputs, task), expected)


@pytest.mark.parametrize(
    ("task", "pooling"), [(PoolingTask.EMBED, PoolingType.MEAN), (PoolingTask.TOKEN_EMBED, PoolingType.MEAN)]
)
def test_results_equal_with_two_batches_in_flight(
    loaded: Loaded, client: Callable[..., Client], pooling: PoolingType, task: PoolingTask
) -> None:
    """A batch ends only when the loop sleeps. One of the prompts is preempted."""
    if loaded.is_array_model:
        pytest.skip("batches with chunks do not overlap on lanes")
    inputs = texts([90, 85, *SHORT, 34])
    expected = run(client(pooling, chunking=False), inputs, task)
    stream = FakeStream(permits=Semaphore(1)) if loaded.info.device == "cpu" else None  # one permit for the warm-up
    limits = {"chunk_size": 7, "kv_cache_memory": memory_for_one(loaded), "max_num_seqs": MAX_NUM_SEQS}
    overlapping = client(pooling, prefixes=True, stream=stream, **limits)
    assert_same(run_preempted(overlapping, inputs, task), expected)
    overlapping.runner.set_wakeup_fd(None)
    if stream is not None:
        stream.close()
        assert overlapping.max_in_flight == 2


def test_results_equal_if_batches_with_cached_blocks_overlap(
    loaded: Loaded, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a cancelled request stay reserved until its forward has ended."""
    if not loaded.is_array_model:
        pytest.skip("only lanes run forwards at the same time")
    inputs = texts([32] * 6)
    expected = run(client(PoolingType.LAST, chunking=False), inputs)
    overlapping = client(PoolingType.LAST, prefixes=True)

    nums_running = []

    def is_done(forward: ArrayForward) -> bool:  # not before another batch is started
        nums_running.append(len(overlapping.core._running))
        can_wait = nums_running[-1] == 1 and overlapping.core._scheduler.has_work
        return not can_wait and forward.running.is_done

    monkeypatch.setattr(ArrayForward, "is_done", property(is_done))
    overlapping.submit_texts(*enumerate(inputs), (6, inputs[0]))
    overlapping.run()
    overlapping.cancel(0)
    pool = overlapping.runner.sequence_pool
    assert (pool.usage > 0.0, list(overlapping.core._scheduler.requests)) == (True, [1, 2, 3, 4, 5, 6])
    overlapping.run_all()
    assert max(nums_running) >= 2
    assert_same([overlapping.rows_of(i) for i in range(1, 7)], [*expected[1:], expected[0]])
    assert pool.usage == 0.0


@pytest.mark.parametrize("pooling", [PoolingType.LAST, PoolingType.MEAN])
def test_results_equal_with_cached_prefixes(
    loaded: Loaded, client: Callable[..., Client], pooling: PoolingType
) -> None:
    prefix = texts([50])[0]
    inputs = [prefix + tail for tail in texts([1, 14, 30, 90, 150], seed=1)]
    expected = run(client(pooling, chunking=False), inputs)
    cached = client(pooling, prefixes=True, chunk_size=64)
    for _ in range(3):
        assert_same(run(cached, inputs), expected)
    hits = cached.sequence_pool_stats.prefix_hit_tokens_total
    assert (hits > 0) is (pooling is PoolingType.LAST and not loaded.model.cache_spec.ssm_layers)  # type: ignore[union-attr]
    rows = run(client(chunking=False), inputs, PoolingTask.TOKEN_EMBED)
    assert_same(run(cached, inputs, PoolingTask.TOKEN_EMBED), rows)


POISON = 199


def test_results_equal_after_a_failed_batch(
    loaded: Loaded, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [[min(token, POISON - 1) for token in text] for text in texts([*SHORT, *LONG, 80])]
    expected = run(client(PoolingType.MEAN, chunking=False), inputs)

    def fail_on_poison(batch: PackedBatch | PackedArrays) -> None:  # states are written before it fails
        assert batch.token_ids is not None
        if (batch.token_ids == POISON).any():
            raise RuntimeError("poisoned")

    loaded.after_forwards(monkeypatch, fail_on_poison)
    fragile = client(PoolingType.MEAN, chunk_size=7)
    poisoned = [[*inputs[-1][:40], POISON, *inputs[-1][41:]], [3, POISON, 4]]
    fragile.submit_texts(*enumerate([*inputs, *poisoned]))
    fragile.run_all()
    assert sorted(fragile.failures) == [len(inputs), len(inputs) + 1]
    assert {kind for kind, _ in fragile.failures.values()} == {"ModelExecutionError"}
    assert_same(fragile.vectors(len(inputs)), expected)
    assert fragile.sequence_pool_stats.usage == 0
