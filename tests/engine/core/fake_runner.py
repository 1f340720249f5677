"""Runners without a model, which return the sum of the tokens, and a driver of an EngineCore. Without torch."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.engine.core.core import EngineCore
from penstock.engine.core.runner import CompletedForward, DeviceMemoryError, Forward, ForwardTime, Runner
from penstock.engine.protocol.batch_outputs import BatchOutputs, OutputArray
from penstock.engine.protocol.config import CacheConfig, EngineConfig, SchedulerConfig
from penstock.engine.protocol.messages import (
    ChunkMetrics,
    ClientMessageBuilder,
    Frame,
    FromCore,
    RequestFailed,
    SequencePoolStats,
    StepResults,
    SubmitRequest,
    TokenizedInput,
)
from penstock.engine.protocol.model_info import ModelInfo, ModelKind, TokenizerSpec
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask, PoolingType
from penstock.engine.scheduling import (
    Allocation,
    InputSequence,
    KvCachePool,
    PrefillChunk,
    Request,
    SequencePool,
    SsmStatePool,
)

from ..steps import Row, finished_of, rows_of

BLOCK = 16
TOKENIZER = TokenizerSpec(json="{}", truncation_side="right", uses_token_types=False)
PARAMS = PoolingParams(task=PoolingTask.EMBED)
ROWS = PoolingParams(task=PoolingTask.TOKEN_EMBED)


def model(max_model_len: int = 4096) -> ModelInfo:
    return ModelInfo(
        name="sum",
        path="sum",
        architecture="Sum",
        model_type="sum",
        packed=True,
        kind=ModelKind.EMBEDDING,
        tasks=(PoolingTask.EMBED, PoolingTask.TOKEN_EMBED),
        hidden_size=1,
        vocab_size=1000,
        max_model_len=max_model_len,
        embedding_size=1,
        sequence_pooling=(PoolingType.LAST,),
    )


def pool(num_blocks: int = 100, num_slots: int = 0, *, prefixes: bool = False) -> SequencePool:
    kv = KvCachePool(num_blocks, BLOCK) if num_blocks else None
    ssm = SsmStatePool(num_slots) if num_slots else None
    return SequencePool(kv=kv, ssm=ssm, enable_prefix_caching=prefixes)


def id_of(sequence: InputSequence) -> tuple[int, int]:
    return sequence.request.request_id, sequence.index


def fail_on(*failing: tuple[int, int], error: Exception) -> Callable[[Sequence[PrefillChunk]], None]:
    def hook(chunks: Sequence[PrefillChunk]) -> None:
        if any(id_of(chunk.sequence) in failing for chunk in chunks):
            raise error

    return hook


def fail_above(num_tokens: int) -> Callable[[Sequence[PrefillChunk]], None]:
    def hook(chunks: Sequence[PrefillChunk]) -> None:
        if sum(chunk.num_tokens for chunk in chunks) > num_tokens:
            raise DeviceMemoryError("too many")

    return hook


class FakeRunner(Runner):
    """Runs each forward inside `begin`.

    Attributes:
        batches: Every started batch, also failed ones: request, input, first token and end of each chunk.
        hook: Called with the chunks before a forward ends. Its error becomes the error of the forward.
        result: Maps a sequence and its sum to the value of its embedding.
        preempted: Sequences that lost their memory.
    """

    has_capacity = True

    def __init__(self, sequence_pool: SequencePool | None = None, max_model_len: int = 4096) -> None:
        self.info = model(max_model_len)
        self.tokenizer = TOKENIZER
        self.sequence_pool = sequence_pool or SequencePool()
        self.batches: list[list[tuple[int, int, int, int]]] = []
        self.hook: Callable[[Sequence[PrefillChunk]], object] = lambda chunks: None
        self.result: Callable[[InputSequence, float], float] = lambda sequence, total: total
        self.preempted: list[tuple[int, int]] = []
        self.on_preempt: Callable[[InputSequence], object] = lambda sequence: None
        self.is_warm = False
        self.wakeup_fds: list[int | None] = []
        self.states: dict[InputSequence, tuple[int, float]] = {}  # pooled tokens and their sum

    def warm_up(self) -> None:
        self.is_warm = True

    def set_wakeup_fd(self, fd: int | None) -> None:
        self.wakeup_fds.append(fd)

    def begin(self, chunks: Sequence[PrefillChunk]) -> Forward:
        return CompletedForward(self.execute(chunks))

    def execute(self, chunks: Sequence[PrefillChunk]) -> BatchOutputs:
        order = [(chunk.start > 0, chunk.num_tokens) for chunk in chunks]
        assert order == sorted(order)
        self.batches.append([(*id_of(chunk.sequence), chunk.start, chunk.end) for chunk in chunks])
        sums = [self._sum(chunk) for chunk in chunks]
        self.hook(chunks)
        rows_by_name: dict[str, list[tuple[int, np.ndarray]]] = {"embedding": [], "rows": []}
        for index, (chunk, (total, rows)) in enumerate(zip(chunks, sums, strict=True)):
            sequence = chunk.sequence
            if sequence.is_long:
                self.states[sequence] = max(chunk.end, self.states.get(sequence, (0, 0.0))[0]), total
            if sequence.request.params.task is PoolingTask.TOKEN_EMBED:
                rows_by_name["rows"].append((index, rows))
            elif chunk.is_last:
                rows_by_name["embedding"].append((index, np.array([[self.result(sequence, total)]], np.float32)))
        made = []
        for name, parts in rows_by_name.items():
            if parts:
                indices, arrays = zip(*parts, strict=True)
                row_lens = list(map(len, arrays)) if name == "rows" else None
                made.append(
                    OutputArray(name=name, values=np.concatenate(arrays), indices=list(indices), row_lens=row_lens)
                )
        return BatchOutputs.of(len(chunks), made)

    def _sum(self, chunk: PrefillChunk) -> tuple[float, np.ndarray]:
        """Returns the sum up to the end of a chunk, and its rows that were not pooled before."""
        sequence = chunk.sequence
        at, total = self.states.get(sequence, (0, 0.0))
        if sequence.request.needs_last_row and chunk.start > at:  # a cached prefix
            at, total = chunk.start, float(sequence.tokens.token_ids[: chunk.start].sum())
        assert chunk.start <= at, "the pooling state misses tokens before the chunk"
        rows = sequence.tokens.token_ids[at : chunk.end].astype(np.float32)
        return total + float(rows.sum()), rows[:, None]

    def drop_states(self, sequences: Sequence[InputSequence]) -> None:
        for sequence in sequences:
            self.states.pop(sequence, None)

    def preempt(self, sequence: InputSequence, allocation: Allocation) -> None:
        self.preempted.append(id_of(sequence))
        self.on_preempt(sequence)

    def free_tokens(self) -> int | None:
        return None

    def take_times(self) -> list[ForwardTime]:
        return []


class QueuedForward:
    """A forward in the queue of a device. Its outputs are computed, but not yet returned."""

    def __init__(self, runner: "QueueRunner", result: BatchOutputs) -> None:
        self.runner, self.result = runner, result
        self.is_done = False
        self.error: Exception | None = None

    def outputs(self) -> BatchOutputs:
        while self in self.runner.queue:
            self.runner.end()
        if self.error is not None:
            raise self.error
        return self.result


class QueueRunner(FakeRunner):
    """A device with one queue, as CUDA: forwards end in the order of their start."""

    def __init__(self, sequence_pool: SequencePool | None = None, max_model_len: int = 4096) -> None:
        super().__init__(sequence_pool, max_model_len)
        self.queue: list[QueuedForward] = []

    @property
    def has_capacity(self) -> bool:  # type: ignore[override]
        return len(self.queue) < 2

    def begin(self, chunks: Sequence[PrefillChunk]) -> QueuedForward:
        self.queue.append(QueuedForward(self, super().execute(chunks)))
        return self.queue[-1]

    def execute(self, chunks: Sequence[PrefillChunk]) -> BatchOutputs:
        return self.begin(chunks).outputs()

    def end(self) -> None:
        self.queue.pop(0).is_done = True


class CoreDriver:
    """Steps a core over a runner and collects its messages."""

    def __init__(self, runner: Any, *, budget: int = 64, load: bool = True, **limits: Any) -> None:
        self.runner = runner
        self.messages: list[FromCore] = []
        self.rows: list[Row] = []
        self.results: dict[int, dict[int, list[float]]] = {}
        self.finished: dict[int, tuple[float, float]] = {}
        prefixes = runner.sequence_pool.prefix_cache is not None
        self.config = EngineConfig(
            model="sum",
            scheduler=SchedulerConfig(max_num_batched_tokens=budget, **limits),
            cache=CacheConfig(kv_block_size=BLOCK, enable_prefix_caching=prefixes),
        )
        self.core = EngineCore(self.config, self.receive, lambda config: runner)
        if load:
            self.core.load()

    def receive(self, message: FromCore, frames: list[Frame]) -> None:
        self.messages.append(message)
        if isinstance(message, StepResults):
            for row in rows_of(message, frames):
                self.rows.append(row)
                self.results.setdefault(row.request_id, {}).setdefault(row.index, []).extend(row.array.ravel())
            self.finished |= finished_of(message)

    def submit(
        self,
        request_id: int,
        *lengths: int,
        params: PoolingParams = PARAMS,
        priority: int = 0,
        timeout_s: float | None = None,
        token: int = 1,
    ) -> None:
        inputs = [TokenizedInput(np.full(length, token, np.int32)) for length in lengths]
        self.send(SubmitRequest(request_id, params, inputs, priority, timeout_s))

    def send(self, *requests: SubmitRequest, cancels: Sequence[int] = (), resets: Sequence[int] = ()) -> None:
        self.core.receive(*ClientMessageBuilder([*requests], cancels=[*cancels], resets=[*resets]).pack())

    def cancel(self, request_id: int) -> None:
        self.send(cancels=[request_id])

    def run(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            assert self.core.step()

    def run_all(self) -> None:
        for _ in range(5000):
            if not self.unfinished_requests:
                return
            self.run()
        raise AssertionError("requests never finish")

    @property
    def unfinished_requests(self) -> dict[int, Request]:
        return self.core._scheduler.requests

    @property
    def token_budget(self) -> int:
        return self.core._scheduler.token_budget

    @property
    def chunk_metrics(self) -> ChunkMetrics:
        return self.core._scheduler.prefill.statistics()

    @property
    def has_freed_memory(self) -> bool:
        return self.core._has_freed_memory

    @property
    def waker_fd(self) -> int:
        return self.core._waker.fd

    def replace_wait(self, wait: Callable[[], Any]) -> None:
        """Replaces the function that puts the engine thread to sleep."""
        self.core._waker.wait = wait  # type: ignore[method-assign]

    @property
    def failures(self) -> dict[int, tuple[str, str]]:
        return {m.request_id: (m.kind, m.message) for m in self.messages if isinstance(m, RequestFailed)}

    @property
    def steps(self) -> list[StepResults]:
        return [message for message in self.messages if isinstance(message, StepResults)]

    @property
    def sequence_pool_stats(self) -> SequencePoolStats:
        use = self.steps[-1].sequence_pool_stats
        assert use is not None
        return use
