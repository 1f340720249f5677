"""The Runner of models on torch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from ..executors.torch.model_heads import Dense
from ..executors.torch.packed_batch import PackedBatch, PackedModel
from ..host import compute_threads
from ..pooling import TokenHeads
from ..pooling.model_pooler import OutputCopy
from ..pooling.tensor_ops import tensor_pooler
from ..protocol.batch_outputs import BatchOutputs
from ..protocol.config import EngineConfig
from ..protocol.model_info import ModelInfo, TokenizerSpec
from ..scheduling import (
    Allocation,
    CacheSpec,
    InputSequence,
    PrefillChunk,
    adapters_of,
    allocations_of,
    num_long_tokens,
)
from .cuda_graphs import ForwardGraphs, record_forwards
from .device.chunk_memory import ChunkMemory
from .device.device import device_errors, gauge_of, set_exact_products, total_memory
from .device.memory import MemoryGauge
from .device.stream import DeviceEvent, DeviceStream, EventWatcher, ForwardTimer, make_current, stream_of
from .loading.cpu_dtype import load_fastest
from .loading.load_errors import load_errors
from .loading.tokenizer_loader import load_tokenizer
from .loading.weights_loader import load_dense, load_model, load_token_heads, torch_dtype
from .runner import CompletedForward, ForwardTime, PoolingRunner
from .warm_up import GpuWarmUp, SampleBatches, warm_up

logger = logging.getLogger("penstock.engine")

_MAX_FORWARDS: Final = 2
"""Forwards that are queued on the device: the running one and the next."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceForward:
    """A forward on CUDA.

    Attributes:
        copy: The copy of its outputs to the host.
        ended: The event after the copy.
        watch: Waits for `ended` in a thread.
    """

    copy: OutputCopy
    ended: DeviceEvent
    watch: EventWatcher

    @property
    def is_done(self) -> bool:
        """Whether the device has reached the end of the forward. Raises DeviceLostError if it has failed."""
        self.watch.check()
        with device_errors():
            return self.ended.is_reached

    def outputs(self) -> BatchOutputs:
        """Waits for the copy of the outputs. Raises only DeviceLostError: `begin` raises the errors of a request."""
        with device_errors():
            self.ended.wait()
        return self.copy.outputs()


class ModelRunner(PoolingRunner[torch.Tensor]):
    """Runs a model on torch. See Runner.

    Args:
        token_heads: Token heads; None if the model has none.
        gauge: Measures the largest forward before the memory of chunks is sized. None: the gauge of a GPU; no
            measurement on a CPU.
        stream: Stream of the forwards; None: the stream of the model's device.
    """

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: TokenizerSpec,
        model: PackedModel,
        dense: Sequence[Dense],
        config: EngineConfig,
        token_heads: TokenHeads[torch.Tensor] | None = None,
        gauge: MemoryGauge | None = None,
        stream: DeviceStream | None = None,
    ) -> None:
        self._device = torch.device(info.device)
        pooler = tensor_pooler(info, model, dense, token_heads)
        super().__init__(info, tokenizer, pooler, config, gauge_of(self._device))
        self._model = model
        self._memory: ChunkMemory | None = None
        self._stream = stream or stream_of(self._device)
        self._timer = ForwardTimer(self._stream)
        self._watch = EventWatcher(self._device)
        self._in_flight: deque[DeviceEvent] = deque()  # ends of forwards
        self._samples = SampleBatches(info, tokenizer)
        self._gpu_warm_up: GpuWarmUp | None = None
        self._graphs: ForwardGraphs | None = None
        self._reserve_memory(gauge)

    @classmethod
    def load(cls, info: ModelInfo, config: EngineConfig) -> ModelRunner:
        """Loads a model.

        Makes the model's device the current device of the calling thread. The same thread must run the forwards.

        Args:
            info: The model with its resolved device; see choose_kernels.
            config: Model and limits.

        Raises:
            ModelLoadError: The model cannot be served.
        """
        torch.set_num_threads(compute_threads(config.num_threads, config.num_engines))
        make_current(torch.device(info.device))
        if info.device != "cpu":
            set_exact_products()
        with _torch_load_errors(info):
            tokenizer = load_tokenizer(
                info, trust_remote_code=config.trust_remote_code, chat_template=config.chat_template
            )
            if config.dtype == "auto" and info.device == "cpu" and not info.packed:
                info, model = load_fastest(info, tokenizer, trust_remote_code=config.trust_remote_code)
            else:
                model = load_model(info, trust_remote_code=config.trust_remote_code)
            return cls(info, tokenizer, model, load_dense(info), config, load_token_heads(info, tokenizer))

    @property
    def has_capacity(self) -> bool:
        """Whether at most one forward is in flight: the next one is queued while one runs."""
        with device_errors():
            while self._in_flight and self._in_flight[0].is_reached:
                self._in_flight.popleft()
        return len(self._in_flight) < _MAX_FORWARDS

    def set_wakeup_fd(self, fd: int | None) -> None:
        """Sets the descriptor that is written to when the device reaches the end of a forward."""
        self._watch.set_wakeup_fd(fd)

    def begin(self, chunks: Sequence[PrefillChunk]) -> CompletedForward | DeviceForward:
        """Starts a forward. On CUDA returns after queueing the work, while earlier forwards may run."""
        with device_errors():
            return self._begin(chunks)

    def preempt(self, sequence: InputSequence, allocation: Allocation) -> None:
        """Saves the states of a model without KV blocks. Other models compute the tokens again."""
        if self._memory is not None:
            with device_errors():
                self._memory.save(sequence, allocation)

    def drop_states(self, sequences: Sequence[InputSequence]) -> None:
        """Drops the pooling states and the saved SSM states."""
        super().drop_states(sequences)
        if self._memory is not None:
            for sequence in sequences:
                self._memory.drop_states(sequence)

    def take_times(self) -> list[ForwardTime]:
        """Returns the times that ForwardTimer measured with events of the device."""
        return self._timer.take()

    def warm_up(self) -> None:
        """Runs a batch. On a GPU also compiles the kernels and records CUDA graphs."""
        with _torch_load_errors(self.info):
            warm_up(self.info, self.tokenizer, self.execute)
            if self._gpu_warm_up is not None:
                self._gpu_warm_up.compile(self.sequence_pool, self.limits)
            if self._config.cuda_graphs:
                self._graphs = record_forwards(
                    self._model, self.info, self._samples, self._device, self._config.scheduler
                )
                if self._gpu_warm_up is not None and self._model.is_recordable:
                    self._gpu_warm_up.allocate_again(self.limits)
            if self._gpu_warm_up is not None:
                self.take_times()  # discards them: they include compilation

    @torch.inference_mode()
    def _begin(self, chunks: Sequence[PrefillChunk]) -> CompletedForward | DeviceForward:
        cache = None
        adapters = adapters_of(chunks, self._adapter_numbers)
        allocations = allocations_of(chunks)
        if any(allocation is not None for allocation in allocations):
            assert self._memory is not None, "only a runner with memory for chunks runs chunks"
            self._memory.restore(chunks)
            cache = self._memory.batch_cache(chunks, allocations)
        if cache is None:
            batch = PackedBatch.build([chunk.sequence.tokens for chunk in chunks], self._device, adapters=adapters)
        else:
            starts = [chunk.start for chunk in chunks]
            tokens = [chunk.tokens for chunk in chunks]
            batch = PackedBatch.build(tokens, self._device, starts=starts, cache=cache, adapters=adapters)
        metadata = self._pooler.batch_metadata(chunks, batch, self._pooling_states, has_allocations=cache is not None)
        chunk_tokens = num_long_tokens(chunks)
        if chunk_tokens:
            self._memory_estimator.begin()
        self._timer.begin()
        forward = self._model.forward if self._graphs is None else self._graphs.forward
        output = forward(batch, need_attention=self._pooler.needs_attention(metadata.params))
        pooled = self._pooler.pool(output, metadata, self._pooling_states)
        result = pooled.begin_copy(self._stream.to_host) if self._stream.is_asynchronous else pooled.to_host()
        if self._memory is not None and cache is not None:
            self._pooling_states.commit(metadata, pooled.states)
            self._memory.advance(chunks)
        ended = self._timer.end(chunk_tokens, batch.num_tokens - chunk_tokens)
        if chunk_tokens:
            self._memory_estimator.end(batch.num_tokens)  # torch counts allocations when they are requested
        if isinstance(result, BatchOutputs):
            return CompletedForward(result)
        self._in_flight.append(ended)
        self._watch.add(ended)
        return DeviceForward(result, ended, self._watch)

    def _reserve_memory(self, gauge: MemoryGauge | None) -> None:
        """Reserves the memory of sequences in chunks: a share of the memory that the largest forward leaves free.

        Raises:
            DeviceMemoryError: Memory is too short even for a small forward.
            ModelLoadError: `kv_cache_memory` is too small for one sequence.
        """
        config = self._config
        spec = self._model.cache_spec if self._uses_chunks() else None
        runs_whole = spec is None or not config.scheduler.enable_chunked_prefill
        has_fixed_size = config.cache.kv_cache_memory is not None
        if spec is not None and has_fixed_size:
            self._reserve_chunks(spec, free_bytes=0)
        if gauge is None and self._device.type == "cuda":
            gauge = self._gauge
        forward_bytes = 0  # of the largest forward
        if gauge is not None:
            memory = total_memory(self._device)
            self._gpu_warm_up = GpuWarmUp(self.info, self._samples, self.begin, config.scheduler, gauge, memory)
            self.limits, forward_bytes = self._gpu_warm_up.find_limits(is_whole=runs_whole)
        if spec is not None and not has_fixed_size:
            self._reserve_chunks(spec, free_bytes=max((gauge or self._gauge).available() - forward_bytes, 0))
            if self._gpu_warm_up is not None and self._memory is None and not runs_whole:
                # No sequence fits into the memory of chunks: inputs of every length run whole.
                self.limits, _ = self._gpu_warm_up.find_limits(is_whole=True)
        self.take_times()

    def _reserve_chunks(self, spec: CacheSpec, *, free_bytes: int) -> None:
        """Reserves the memory of sequences in chunks, if at least one fits; see `_make_pool`."""
        dtype = torch_dtype(self.info.dtype)
        pool_size = self._make_pool(spec, dtype.itemsize, free_bytes)
        if pool_size is not None:
            block_size = self._config.cache.kv_block_size
            self._memory = ChunkMemory(
                spec, pool_size, block_size=block_size, dtype=dtype, device=self._device, stream=self._stream
            )


@contextmanager
def _torch_load_errors(info: ModelInfo) -> Iterator[None]:
    """Like load_errors, but also recognises torch's out-of-memory errors."""
    with load_errors(info), device_errors():
        yield
