"""The Runner of models on the CPU with the C library and numpy. Does not import torch, which takes a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from penstock.kernels.cpu import BatchBlocks, CpuForward, CpuLibrary, OutputRows, PagedKvCache

from ..checkpoint.views import Floats
from ..executors.cpu.array_encoder import ArrayEncoder, ArrayOutput, PackedArrays
from ..executors.cpu.array_head import ArrayHead
from ..pooling import PoolingMetadata, TokenHeads
from ..pooling.array_ops import array_pooler
from ..protocol.batch_outputs import BatchOutputs, OutputGroup, distinct_params
from ..protocol.config import EngineConfig
from ..protocol.model_info import ModelInfo, TokenizerSpec
from ..protocol.tasks import PoolingType
from ..scheduling import (
    Allocation,
    InputSequence,
    KvCacheMetadata,
    PrefillChunk,
    adapters_of,
    allocations_of,
    num_long_tokens,
)
from .device.memory import MemoryGauge
from .loading.cpu_kernels import load_array_dense, load_array_encoder, load_array_token_heads
from .loading.load_errors import load_errors
from .loading.tokenizer_loader import load_tokenizer
from .runner import (
    CompletedForward,
    DeviceLimits,
    DeviceMemoryError,
    ForwardTime,
    PoolingRunner,
)
from .warm_up import warm_up

_POOLED_ROWS: Final[Mapping[tuple[PoolingType, ...], OutputRows]] = {
    (PoolingType.CLS,): OutputRows.FIRST,
    (PoolingType.LAST,): OutputRows.LAST,
}
"""Rows that the pooling of a model reads; others need all rows."""
_MIN_BATCH_PARTS: Final = 4
"""Minimum size of a batch in units of `min_part_tokens`, for which a thread computes as long as it reads weights. Two
threads that share such a batch compute for twice as long as they read weights."""
_MIN_BATCH_TOKENS: Final = 48
"""With fewer tokens in a batch of a small model, the time of the engine process outside the C library matters."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrayForward:
    """A forward that runs on the threads of the C library.

    Attributes:
        running: Handle of the forward in the C library.
        outputs: Waits for the forward and pools its rows; called once.
    """

    running: CpuForward
    outputs: Callable[[], BatchOutputs]

    @property
    def is_done(self) -> bool:
        """Whether the forward has ended. Pooling runs later, in `outputs`."""
        return self.running.is_done


@dataclass(frozen=True, slots=True)
class _ForwardStart:
    """The start and the size of a forward, for its ForwardTime.

    Attributes:
        started_s: Seconds, of time.perf_counter().
        chunk_tokens: Tokens in chunks of long sequences.
        short_tokens: Other tokens.
    """

    started_s: float
    chunk_tokens: int
    short_tokens: int

    @classmethod
    def now(cls, chunks: Sequence[PrefillChunk]) -> _ForwardStart:
        """Returns the current time and the tokens of `chunks`."""
        started_s = time.perf_counter()
        chunk_tokens = num_long_tokens(chunks)
        return cls(started_s, chunk_tokens, sum(chunk.num_tokens for chunk in chunks) - chunk_tokens)


class ArrayRunner(PoolingRunner[Floats]):
    """Runs an encoder or a decoder on a CPU with the C library.

    `begin` packs a batch and starts its forward. `_finish` waits for the forward and pools its rows. The base class
    holds the ModelPooler (`_pooler`) and the ChunkedPoolingManager (`_pooling_states`).

    Args:
        token_heads: Token heads; None if the model has none.
    """

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: TokenizerSpec,
        encoder: ArrayEncoder,
        config: EngineConfig,
        dense: Sequence[ArrayHead] = (),
        token_heads: TokenHeads[Floats] | None = None,
    ) -> None:
        super().__init__(info, tokenizer, array_pooler(info, encoder, dense, token_heads), config, MemoryGauge())
        self.is_ordered = False
        self.max_forwards = encoder.library.num_lanes
        self.limits = DeviceLimits(min_batch_tokens=max(_MIN_BATCH_PARTS * encoder.min_part_tokens, _MIN_BATCH_TOKENS))
        self._encoder = encoder
        self._pooled_rows = OutputRows.ALL
        if encoder.has_layers and encoder.attention_pool is None:
            self._pooled_rows = _POOLED_ROWS.get(info.sequence_pooling, OutputRows.ALL)
        self._kv_cache: PagedKvCache | None = None
        self._times: list[ForwardTime] = []
        self._ended_s = 0.0  # end of the last forward
        if encoder.cache_spec is not None and self._uses_chunks():
            self._allocate_kv_blocks()

    @classmethod
    def load(
        cls, info: ModelInfo, library: CpuLibrary, config: EngineConfig, tokenizer: TokenizerSpec | None = None
    ) -> ArrayRunner:
        """Loads a model.

        Args:
            info: The model, with the device and dtype that choose_kernels has set.
            library: The C library.
            config: Model and limits.
            tokenizer: Tokenizer, if the model has none of its own.

        Raises:
            ModelLoadError: The model cannot be served.
        """
        with load_errors(info):
            tokenizer = tokenizer or load_tokenizer(
                info, trust_remote_code=config.trust_remote_code, chat_template=config.chat_template
            )
            encoder = load_array_encoder(info, library)
            dense = load_array_dense(info, library)
            encoder.calibrate()
            return cls(info, tokenizer, encoder, config, dense, load_array_token_heads(info, tokenizer, library))

    @property
    def has_capacity(self) -> bool:
        """Whether a lane of the C library is free."""
        return self._encoder.library.num_free > 0

    def set_wakeup_fd(self, fd: int | None) -> None:
        """Sets the file descriptor that threads of the C library write to when a forward ends; see Runner."""
        self._encoder.library.set_wakeup_fd(fd)

    def begin(self, chunks: Sequence[PrefillChunk]) -> ArrayForward | CompletedForward:
        """Starts a forward on a free lane; see Runner.

        A batch with chunks of long sequences has ended when this returns: another sequence may get the blocks of a
        cancelled one at once, and the duration without other batches sets the size of the next chunks.
        """
        start = _ForwardStart.now(chunks)
        try:
            adapters = adapters_of(chunks, self._adapter_numbers)
            allocations = allocations_of(chunks)
            if all(allocation is None for allocation in allocations):
                batch = PackedArrays.build([c.sequence.tokens for c in chunks], adapters=adapters)
                return self._begin(chunks, batch, start)
            assert self._kv_cache is not None, "only a runner with KV blocks runs chunks"
            kv_metadata = KvCacheMetadata.of(chunks, allocations, self._config.cache.kv_block_size)
            kv_blocks = BatchBlocks(self._kv_cache, *kv_metadata)
            starts = [c.start for c in chunks]
            batch = PackedArrays.build([c.tokens for c in chunks], starts, kv_blocks, adapters)
            if not start.chunk_tokens:
                return self._begin(chunks, batch, start)
            self._memory_estimator.begin()
            outputs = self._begin(chunks, batch, start).outputs()
            self._memory_estimator.end(batch.num_tokens)
            return CompletedForward(outputs)
        except MemoryError as error:
            raise DeviceMemoryError(str(error)) from error

    def warm_up(self) -> None:
        """Runs the texts of `warm_up` in warm_up.py. Other errors than those of Runner become ModelLoadError, too."""
        with load_errors(self.info):
            warm_up(self.info, self.tokenizer, self.execute)

    def preempt(self, sequence: InputSequence, allocation: Allocation) -> None:
        """Does nothing: models of the C library have no recurrent states."""

    def take_times(self) -> list[ForwardTime]:
        """Returns the times of forwards since the last call; a forward counts after `outputs`. Overlaps count once."""
        times = self._times
        self._times = []
        return times

    def _begin(self, chunks: Sequence[PrefillChunk], batch: PackedArrays, start: _ForwardStart) -> ArrayForward:
        """Starts the forward of a packed batch. If only the first or last rows are pooled, it returns only those."""
        output_rows = self._pooled_rows
        if output_rows is not OutputRows.ALL and not self._reads_pooled_rows_only(chunks, batch):
            output_rows = OutputRows.ALL
        is_pooled = output_rows is not OutputRows.ALL or self._encoder.attention_pool is not None
        rows = batch.with_first_tokens() if is_pooled else batch
        metadata = self._pooler.batch_metadata(
            chunks, rows, self._pooling_states, has_allocations=batch.kv_blocks is not None
        )
        needs_attention = self._pooler.needs_attention(metadata.params)
        running = self._encoder.begin(batch, need_attention=needs_attention, output_rows=output_rows)
        return ArrayForward(running, partial(self._finish, running, batch, metadata, start))

    def _reads_pooled_rows_only(self, chunks: Sequence[PrefillChunk], batch: PackedArrays) -> bool:
        """Returns whether all sequences are whole, and no task needs rows of tokens."""
        if any(each is not None for each in (batch.kv_blocks, batch.adapters, batch.skip_tokens)):
            return False
        params = distinct_params([chunk.sequence.request.params for chunk in chunks])
        return not any(group.is_token_level for each in params for group in OutputGroup.all_of(each))

    def _finish(
        self, running: CpuForward, batch: PackedArrays, metadata: PoolingMetadata, start: _ForwardStart
    ) -> BatchOutputs:
        try:
            output = ArrayOutput(*running.result())
            if self._encoder.attention_pool is not None:
                rows = self._encoder.attention_pool(output.hidden_states, batch.cu_seqlens)
                output = output._replace(hidden_states=rows)
            pooled = self._pooler.pool(output, metadata, self._pooling_states)
            outputs = pooled.to_host()
        except MemoryError as error:
            raise DeviceMemoryError(str(error)) from error
        self._pooling_states.commit(metadata, pooled.states)
        now_s = time.perf_counter()
        # The time of overlapping forwards counts from the end of the previous one.
        seconds = now_s - max(start.started_s, self._ended_s)
        self._times.append(ForwardTime(start.chunk_tokens, start.short_tokens, seconds))
        self._ended_s = now_s
        return outputs

    def _allocate_kv_blocks(self) -> None:
        spec = self._encoder.cache_spec
        itemsize = self._encoder.kv_itemsize
        assert spec is not None, "only decoders have KV blocks"
        pool_size = self._make_pool(spec, itemsize, self._gauge.available())
        if pool_size is None:
            return
        layer = spec.kv_layers[0]
        shape = (pool_size.num_blocks, self._config.cache.kv_block_size, layer.num_kv_heads, layer.head_size)
        self._kv_cache = PagedKvCache.allocate(len(spec.kv_layers), shape, itemsize)
        # The forwards of a decoder take long compared with the work between them. Large batches, which the lanes share,
        # divide the tokens more evenly than a batch for each lane.
        self.limits = DeviceLimits(min_batch_tokens=self._config.scheduler.token_budget("cpu"))
