"""A runner without a model, whose answer is the sum of the tokens, and the steps of a core that it drives. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.engine.core.core import EngineCore
from penstock.engine.core.runner import EndedForward, Forward, ForwardTime, Runner
from penstock.engine.protocol.batch_outputs import ArrayBlock, Arrays, BatchOutputs
from penstock.engine.protocol.config import CacheConfig, EngineConfig, SchedulerConfig
from penstock.engine.protocol.messages import (
    CacheUse,
    ClientMessageBuilder,
    Frame,
    FromCore,
    RequestFailed,
    StepResults,
    SubmitRequest,
)
from penstock.engine.protocol.model_info import ModelInfo, ModelKind, TokenizerSpec
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import TokenizedInput
from penstock.engine.protocol.tasks import PoolingTask, PoolingType
from penstock.engine.scheduling import (
    Allocation,
    KvCachePool,
    PrefillChunk,
    QueuedSequence,
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


def joined(outputs: Sequence[Arrays]) -> BatchOutputs:
    """The record of a batch whose sequences gave these: the same as `split` gives."""
    blocks = []
    for name in dict.fromkeys(name for arrays in outputs for name in arrays):
        indices = [index for index, arrays in enumerate(outputs) if name in arrays]
        parts = [outputs[index][name] for index in indices]
        row_lens = [len(part) for part in parts] if parts[0].ndim > 1 else None
        values = np.stack(parts) if row_lens is None else np.concatenate(parts)
        blocks.append(ArrayBlock(name=name, values=values, indices=indices, row_lens=row_lens))
    return BatchOutputs.of(len(outputs), blocks)


class FakeRunner(Runner):
    """See Runner. A forward runs while it is begun.

    Attributes:
        batches: Every batch that was asked for, also one that failed: request, input, first token, end.
        hook: Called with the chunks of a forward before it ends; what it raises, the forward raises.
        free: Tokens that find memory on the device.
        times: To be taken once.
        saved: Sequences that lost their memory.
    """

    can_begin = True

    def __init__(self, sequence_pool: SequencePool | None = None, max_model_len: int = 4096) -> None:
        self.info = model(max_model_len)
        self.tokenizer = TOKENIZER
        self.sequence_pool = sequence_pool or SequencePool()
        self.batches: list[list[tuple[int, int, int, int]]] = []
        self.hook: Callable[[Sequence[PrefillChunk]], object] = lambda chunks: None
        self.answer: Callable[[QueuedSequence, float], float] = lambda sequence, total: total
        self.free: int | None = None
        self.num_looks = 0
        self.times: list[ForwardTime] = []
        self.saved: list[tuple[int, int]] = []
        self.on_preempt: Callable[[QueuedSequence], object] = lambda sequence: None
        self.is_warm = False
        self.states: dict[QueuedSequence, tuple[int, float]] = {}  # tokens pooled, and their sum

    def warm_up(self) -> None:
        self.is_warm = True

    def set_wakeup_fd(self, fd: int | None) -> None:
        """Nothing is ever waited for."""

    def begin(self, chunks: Sequence[PrefillChunk]) -> Forward:
        return EndedForward(self.execute(chunks))

    def execute(self, chunks: Sequence[PrefillChunk]) -> BatchOutputs:
        order = [(c.start > 0, c.num_tokens) for c in chunks]
        assert order == sorted(order)
        self.batches.append([(*named(c.sequence), c.start, c.end) for c in chunks])
        kept = {c: self._sum(c) for c in chunks}
        self.hook(chunks)
        outputs: list[Arrays] = []
        for chunk in chunks:
            sequence = chunk.sequence
            done, rows = kept[chunk]
            before, _ = self.states.get(sequence, (0, 0.0))
            if sequence.is_long:
                self.states[sequence] = (max(chunk.end, before), done)
            if sequence.request.params.task is PoolingTask.TOKEN_EMBED:
                outputs.append({"rows": rows})
            else:
                value = self.answer(sequence, done)
                outputs.append({"embedding": np.array([value], np.float32)} if chunk.is_last else {})
        return joined(outputs)

    def _sum(self, chunk: PrefillChunk) -> tuple[float, np.ndarray]:
        """The sum up to the end of a chunk, and the rows that it brings; what was pooled before counts once."""
        sequence = chunk.sequence
        at, total = self.states.get(sequence, (0, 0.0))
        if sequence.request.needs_last_row and chunk.start > at:  # found in the cache
            at, total = chunk.start, float(sequence.prompt.token_ids[: chunk.start].sum())
        assert chunk.start <= at, "tokens were left out"
        rows = sequence.prompt.token_ids[at : chunk.end].astype(np.float32)
        return total + float(rows.sum()), rows[:, None]

    def forget(self, sequences: Sequence[QueuedSequence]) -> None:
        for sequence in sequences:
            self.states.pop(sequence, None)

    def preempt(self, sequence: QueuedSequence, allocation: Allocation) -> None:
        self.saved.append(named(sequence))
        self.on_preempt(sequence)

    def free_tokens(self) -> int | None:
        self.num_looks += 1
        return self.free

    def take_times(self) -> list[ForwardTime]:
        times, self.times = self.times, []
        return times


class QueuedForward:
    """One that has been given to a device beside the host: what it computes is decided, and nobody has it yet."""

    def __init__(self, runner: StreamRunner, result: BatchOutputs) -> None:
        self.runner, self.result = runner, result
        self.is_done = False
        self.error: Exception | None = None

    def outputs(self) -> BatchOutputs:
        self.runner.end_until(self)
        if self.error is not None:
            raise self.error
        return self.result


class StreamRunner(FakeRunner):
    """As a runner of a device with one queue: forwards are computed in the order in which they are begun.

    Attributes:
        queue: What was begun and has not ended.
    """

    def __init__(self, sequence_pool: SequencePool | None = None, max_model_len: int = 4096) -> None:
        super().__init__(sequence_pool, max_model_len)
        self.queue: list[QueuedForward] = []

    @property
    def can_begin(self) -> bool:  # type: ignore[override]
        return len(self.queue) < 2

    def begin(self, chunks: Sequence[PrefillChunk]) -> QueuedForward:
        self.queue.append(QueuedForward(self, super().execute(chunks)))
        return self.queue[-1]

    def execute(self, chunks: Sequence[PrefillChunk]) -> BatchOutputs:
        return self.begin(chunks).outputs()

    def end(self) -> None:
        self.queue.pop(0).is_done = True

    def end_until(self, forward: QueuedForward) -> None:
        while forward in self.queue:
            self.end()


def named(sequence: QueuedSequence) -> tuple[int, int]:
    return sequence.request.request_id, sequence.index


def pool(num_blocks: int = 100, num_slots: int = 0, *, prefixes: bool = False) -> SequencePool:
    kv = KvCachePool(num_blocks, BLOCK) if num_blocks else None
    ssm = SsmStatePool(num_slots) if num_slots else None
    return SequencePool(kv=kv, ssm=ssm, enable_prefix_caching=prefixes)


class Steps:
    """A core over a runner, step by step, and what it said."""

    def __init__(self, runner: FakeRunner, *, budget: int = 64, load: bool = True, **limits: Any) -> None:
        self.runner = runner
        self.messages: list[FromCore] = []
        self.told: list[Row] = []
        self.answers: dict[int, dict[int, list[float]]] = {}
        self.ended: dict[int, tuple[float, float]] = {}
        prefixes = runner.sequence_pool.prefixes is not None
        self.config = EngineConfig(
            model="sum",
            scheduler=SchedulerConfig(max_num_batched_tokens=budget, **limits),
            cache=CacheConfig(kv_block_size=BLOCK, enable_prefix_caching=prefixes),
        )
        self.core = EngineCore(self.config, self.take, lambda config: runner)
        if load:
            self.core.load()

    def take(self, message: FromCore, frames: list[Frame]) -> None:
        self.messages.append(message)
        if isinstance(message, StepResults):
            for row in rows_of(message, frames):
                self.told.append(row)
                self.answers.setdefault(row.request_id, {}).setdefault(row.index, []).extend(row.array.ravel())
            self.ended |= finished_of(message)

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
        self.tell(SubmitRequest(request_id, params, inputs, priority, timeout_s))

    def tell(self, *asked: SubmitRequest, cancels: Sequence[int] = (), clears: Sequence[int] = ()) -> None:
        outgoing = ClientMessageBuilder(cancels=[*cancels], clears=[*clears])
        for each in asked:
            outgoing.requests.append(each)
        self.core.receive(*outgoing.pack())

    def cancel(self, request_id: int) -> None:
        self.tell(cancels=[request_id])

    def run(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            assert self.core.step()

    def run_all(self) -> None:
        for _ in range(5000):
            if not self.core._scheduler.requests:
                return
            self.run()
        raise AssertionError("it does not end")

    @property
    def failures(self) -> dict[int, tuple[str, str]]:
        return {m.request_id: (m.kind, m.message) for m in self.messages if isinstance(m, RequestFailed)}

    @property
    def rows(self) -> list[StepResults]:
        return [message for message in self.messages if isinstance(message, StepResults)]

    @property
    def cache_use(self) -> CacheUse:
        use = self.rows[-1].cache_use
        assert use is not None
        return use
