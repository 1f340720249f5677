"""Runs tokenized inputs through the C library alone: a Runner without torch, which takes a second to import."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.kernels.cpu import CpuForward, Machine

from ..executors.cpu.array_encoder import ArrayEncoder, ArrayOutput
from ..executors.cpu.heads import ArrayHead, load_dense
from ..executors.cpu.packed_arrays import PackedArrays
from ..pooling import PoolingMetadata
from ..pooling.array_ops import array_pooler
from ..protocol.batch_outputs import BatchOutputs
from ..protocol.config import EngineConfig
from ..protocol.model_info import ModelInfo, TokenizerSpec
from ..protocol.params import PoolingParams
from ..scheduling import Allocation, PrefillChunk, QueuedSequence, SequencePool
from .loading.cpu_kernels import load_array_encoder
from .loading.load_errors import load_errors
from .loading.tokenizer_loader import load_tokenizer
from .runner import DeviceMemoryError, ForwardTime, Runner
from .warm_up import warm_up


@dataclass(frozen=True, slots=True, eq=False)
class ArrayForward:
    """See Forward.

    Attributes:
        runner: Began it.
        running: On the lanes.
        batch: Its sequences.
        params: Theirs.
        began_s: Seconds, of time.perf_counter.
    """

    runner: ArrayRunner
    running: CpuForward
    batch: PackedArrays
    params: Sequence[PoolingParams]
    began_s: float

    @property
    def is_done(self) -> bool:
        """See Forward."""
        return self.running.is_done

    def outputs(self) -> BatchOutputs:
        """See Forward."""
        try:
            output = ArrayOutput(*self.running.result())
            outputs = self.runner.pooler.pool(output, _describe(self.batch, self.params)).to_host()
        except MemoryError as error:
            raise DeviceMemoryError(str(error)) from error
        self.runner.record_time(self.batch.num_tokens, self.began_s)
        return outputs


class ArrayRunner(Runner):
    """A Runner of an encoder on a CPU. `load` makes one of a model that runs as arrays.

    Args:
        info: The model, on the CPU.
        tokenizer: For the clients.
        encoder: With its weights.
        dense: The Dense modules that follow the pooling.

    Attributes:
        pooler: Pools the outputs of forwards.
    """

    def __init__(
        self, info: ModelInfo, tokenizer: TokenizerSpec, encoder: ArrayEncoder, dense: Sequence[ArrayHead] = ()
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.sequence_pool = SequencePool()  # empty: inputs run whole
        self.num_lanes = encoder.machine.num_lanes
        self.keeps_order = False
        self._encoder = encoder
        self.pooler = array_pooler(info, encoder, dense)
        self._times: list[ForwardTime] = []
        self._ended_s = 0.0  # the last forward

    @classmethod
    def load(cls, info: ModelInfo, machine: Machine, config: EngineConfig) -> ArrayRunner:
        """Loads a model.

        Args:
            info: On the CPU, in its type; `why_torch` says nothing of it.
            machine: The C library.
            config: What to serve.

        Raises:
            ModelLoadError: The model cannot be served.
        """
        with load_errors(info):
            tokenizer = load_tokenizer(
                info, trust_remote_code=config.trust_remote_code, chat_template=config.chat_template
            )
            return cls(info, tokenizer, load_array_encoder(info, machine), load_dense(info, machine))

    @property
    def can_begin(self) -> bool:
        """See Runner."""
        return self._encoder.machine.num_free > 0

    def set_wakeup_fd(self, fd: int | None) -> None:
        """See Runner."""
        self._encoder.machine.set_wakeup_fd(fd)

    def begin(self, chunks: Sequence[PrefillChunk]) -> ArrayForward:
        """See Runner. All chunks are whole sequences, as the model attends both ways."""
        began_s = time.perf_counter()
        params = [chunk.sequence.request.params for chunk in chunks]
        try:
            batch = PackedArrays.build([chunk.sequence.prompt for chunk in chunks])
            running = self._encoder.begin(batch, need_attention=self.pooler.needs_attention(params))
        except MemoryError as error:
            raise DeviceMemoryError(str(error)) from error
        return ArrayForward(self, running, batch, params, began_s)

    def record_time(self, num_tokens: int, began_s: float) -> None:
        """Records the time of a forward. Where forwards overlap, each counts for the time since the last one ended."""
        now_s = time.perf_counter()
        self._times.append(ForwardTime(0, num_tokens, now_s - max(began_s, self._ended_s)))
        self._ended_s = now_s

    def warm_up(self) -> None:
        """See Runner."""
        with load_errors(self.info):
            warm_up(self.info, self.tokenizer, self.execute)

    def preempt(self, sequence: QueuedSequence, allocation: Allocation) -> None:
        """See Runner. Sequences that run whole have nothing to lose."""

    def forget(self, sequences: Sequence[QueuedSequence]) -> None:
        """See Runner. Nothing is kept of sequences that run whole."""

    def free_tokens(self) -> None:
        """See Runner. Asked of chunks alone, which there are none of."""

    def take_times(self) -> list[ForwardTime]:
        """See Runner."""
        times, self._times = self._times, []
        return times


def _describe(batch: PackedArrays, params: Sequence[PoolingParams]) -> PoolingMetadata:
    return PoolingMetadata(
        params=params,
        seq_lens=tuple(batch.lengths.tolist()),
        cu_seqlens=batch.cu_seqlens,
        token_ids=batch.input_ids,
        skip_tokens=batch.skip_tokens,
    )
