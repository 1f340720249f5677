"""The interface between the loop and the runners, and the code that both runners share. Plain Python without torch.

PoolingRunner has the shared code: the memory of sequences in chunks and their pooling states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Generic, NamedTuple, Protocol

from ..model_files.draft import config_parts
from ..pooling import ChunkedPoolingManager, ModelPooler
from ..pooling.row_ops import R
from ..protocol.batch_outputs import BatchOutputs
from ..protocol.config import EngineConfig
from ..protocol.model_info import ModelInfo, TokenizerSpec
from ..scheduling import Allocation, CacheSpec, InputSequence, PoolSize, PrefillChunk, SequencePool
from ..scheduling.cache_spec import make_pool
from .device.memory import MemoryGauge, TokenMemoryEstimator

_HALF_TYPES: Final = ("bfloat16", "float16")


class DeviceMemoryError(Exception):
    """A forward ran out of memory and changed nothing. A smaller one may succeed."""


class DeviceLostError(Exception):
    """The device has failed. The process must end; a new one replaces it."""


class ForwardTime(NamedTuple):
    """The time of a finished forward.

    Attributes:
        chunk_tokens: Tokens in chunks of long sequences.
        short_tokens: Other tokens.
        seconds: Seconds on the device.
    """

    chunk_tokens: int
    short_tokens: int
    seconds: float


class DeviceLimits(NamedTuple):
    """The limits of a device.

    Attributes:
        memory: Bytes of device memory; None if the device uses the memory of the host.
        max_tokens: Tokens of the largest forward that fits into memory; None if it was not measured.
        min_batch_tokens: Tokens below which smaller batches hardly save time. Used if `max_forwards` is above 1.
    """

    memory: int | None = None
    max_tokens: int | None = None
    min_batch_tokens: int = 1


class Forward(Protocol):
    """A started forward. A failed forward changes no state of its sequences."""

    @property
    def is_done(self) -> bool:
        """Whether `outputs` returns without waiting."""
        ...

    def outputs(self) -> BatchOutputs:
        """Waits for the forward and returns its pooled outputs. Called once.

        Returns:
            The arrays of each sequence by output name. The last chunk of a sequence returns the rest of its result, an
            earlier one the finished rows of a token-level result.

        Raises:
            DeviceMemoryError: Memory was short.
            DeviceLostError: The device is lost for all requests.
        """
        ...


class Runner(ABC):
    """One model on one device. Used by one thread at a time.

    Attributes:
        info: The model with its resolved device.
        tokenizer: Tokenizer, sent to the engine clients.
        sequence_pool: Memory of the sequences that run in chunks.
        max_forwards: Forwards that can run at the same time: with the C library, one on each of its threads (lanes).
        is_ordered: Forwards run one after the other, in the order of `begin`. Several chunks of one sequence may then
            be in flight, and later forwards may reuse the memory of a cancelled one.
        limits: Limits of the device.
    """

    info: ModelInfo
    tokenizer: TokenizerSpec
    sequence_pool: SequencePool
    max_forwards: int = 1
    is_ordered: bool = True
    limits: DeviceLimits = DeviceLimits()

    @abstractmethod
    def warm_up(self) -> None:
        """Runs a small batch, and on a GPU a batch of every kind, so that no request waits for one-time work.

        Raises:
            ModelLoadError: The model returns NaN or inf.
        """

    @property
    @abstractmethod
    def has_capacity(self) -> bool:
        """Whether another forward may start now, beside those in flight."""

    @abstractmethod
    def set_wakeup_fd(self, fd: int | None) -> None:
        """Sets the file descriptor to write to when a forward ends or `has_capacity` becomes True; None: none.

        After this call the runner does not write to the previous descriptor.
        """

    @abstractmethod
    def begin(self, chunks: Sequence[PrefillChunk]) -> Forward:
        """Starts one forward. May return before the forward ends.

        If `is_ordered`, the pooling states include the forward when this returns, so that the next chunks of the same
        sequences may start at once. Otherwise `Forward.outputs` stores the states, and only forwards of whole sequences
        overlap.

        Args:
            chunks: First the chunks that start a sequence, in ascending length, then the later chunks. Tasks may be
                mixed.

        Raises:
            DeviceMemoryError: Memory was short.
            DeviceLostError: The device is lost for all requests.
        """

    def execute(self, chunks: Sequence[PrefillChunk]) -> BatchOutputs:
        """Starts a forward, waits for it and returns its outputs. Raises the errors of both steps."""
        return self.begin(chunks).outputs()

    @abstractmethod
    def preempt(self, sequence: InputSequence, allocation: Allocation) -> None:
        """Saves the SSM states of a preempted sequence. Raises the errors of `execute`."""

    @abstractmethod
    def drop_states(self, sequences: Sequence[InputSequence]) -> None:
        """Drops the pooling states and saved SSM states of sequences that have ended or were cancelled."""

    @abstractmethod
    def free_tokens(self) -> int | None:
        """Returns the tokens of the largest forward that fits into the free memory; None if unknown."""

    @abstractmethod
    def take_times(self) -> list[ForwardTime]:
        """Returns the times of the forwards that have ended since the last call."""


class CompletedForward:
    """A forward that is complete when `Runner.begin` returns.

    Args:
        result: Its outputs, or its error.
    """

    is_done = True

    def __init__(self, result: BatchOutputs | Exception) -> None:
        self._result = result

    def outputs(self) -> BatchOutputs:
        """Returns the outputs at once, or raises the error of the forward."""
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class PoolingRunner(Runner, Generic[R]):
    """Base class of the two runners: memory sizes and pooling states."""

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: TokenizerSpec,
        pooler: ModelPooler[R],
        config: EngineConfig,
        gauge: MemoryGauge,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.sequence_pool = SequencePool()
        self._config = config
        self._adapter_numbers = {adapter.name: number for number, adapter in enumerate(info.served_adapters)}
        self._pooler = pooler
        self._pooling_states = ChunkedPoolingManager[R](
            info.hidden_size, strategy=info.sequence_pooling or info.token_pooling, ops=pooler.ops
        )
        self._gauge = gauge
        self._memory_estimator = TokenMemoryEstimator(gauge, _token_bytes(info))

    def drop_states(self, sequences: Sequence[InputSequence]) -> None:
        """Drops the pooling states. ModelRunner also drops saved SSM states."""
        for sequence in sequences:
            self._pooling_states.cancel(sequence)

    def free_tokens(self) -> int:
        """Estimates the tokens from the free memory and the measured bytes of a token."""
        return self._memory_estimator.free_tokens()

    def _make_pool(self, spec: CacheSpec, itemsize: int, free_bytes: int) -> PoolSize | None:
        """Creates the pool of sequences in chunks: `kv_cache_memory` bytes, or a share of `free_bytes`."""
        config = self._config
        num_bytes = config.cache.kv_cache_memory
        if num_bytes is None:
            num_bytes = int(free_bytes * config.cache.cache_memory_fraction / config.num_engines)
        max_num_seqs = config.scheduler.seqs(self.info.device)
        sized_pool = make_pool(
            spec,
            config,
            num_bytes=num_bytes,
            itemsize=itemsize,
            max_num_seqs=max_num_seqs,
            is_reserved=self.info.device != "cpu",
        )
        if sized_pool is None:
            return None
        pool_size, self.sequence_pool = sized_pool
        return pool_size

    def _uses_chunks(self) -> bool:
        """Whether the operator wants chunks or a prefix cache."""
        return self._config.scheduler.enable_chunked_prefill or self._config.cache.enable_prefix_caching


def _token_bytes(info: ModelInfo) -> int:
    """Estimates the bytes per token of a forward: the rows of a layer and of its MLP."""
    config = config_parts(info.config)[-1]
    hidden = config.get("hidden_size")
    inner = config.get("intermediate_size")  # `inner` is a list if layers differ
    hidden = hidden if isinstance(hidden, int) and hidden > info.hidden_size else info.hidden_size
    width = 8 * hidden + 4 * (inner if isinstance(inner, int) and inner > 0 else 4 * hidden)
    return width * (2 if info.dtype in _HALF_TYPES else 4)
