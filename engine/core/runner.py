"""The interface between the loop and the two runners. Plain Python without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..protocol.batch_outputs import BatchOutputs
from ..protocol.model_info import ModelInfo, TokenizerSpec
from ..scheduling import Allocation, PrefillChunk, QueuedSequence, SequencePool


class DeviceMemoryError(Exception):
    """A forward found too little memory. It changed nothing, and a smaller one may succeed."""


class DeviceLostError(Exception):
    """The device has failed. The process must end, and a new one replaces it."""


class ForwardTime(NamedTuple):
    """The time of a finished forward.

    Attributes:
        chunk_tokens: Tokens of chunks of long sequences.
        whole_tokens: Other tokens.
        seconds: Seconds on the device.
    """

    chunk_tokens: int
    whole_tokens: int
    seconds: float


class DeviceLimits(NamedTuple):
    """The limits of a device.

    Attributes:
        memory: Bytes; None if the device uses the memory of the host.
        max_tokens: Tokens for which one forward has found memory; None if that was not measured.
    """

    memory: int | None = None
    max_tokens: int | None = None


class Forward(Protocol):
    """A started forward."""

    @property
    def is_done(self) -> bool:
        """Whether `outputs` returns without waiting."""
        ...

    def outputs(self) -> BatchOutputs:
        """Waits for the forward and returns its pooled outputs, once. See Runner.execute for results and errors."""
        ...


class Runner(Protocol):
    """One model on one device. Used by one thread at a time.

    Attributes:
        info: The model, on its device.
        tokenizer: For the client of the engine.
        sequence_pool: Memory of the sequences that run in chunks.
        num_lanes: Parts of the device that run forwards independently.
        keeps_order: Forwards run one after the other, in the order in which they were started. Several chunks of one
            prompt may then be under way, and their memory may already be given to forwards that start later.
        limits: Of the device.
    """

    info: ModelInfo
    tokenizer: TokenizerSpec
    sequence_pool: SequencePool
    num_lanes: int = 1
    keeps_order: bool = True
    limits: DeviceLimits = DeviceLimits()

    def warm_up(self) -> None:
        """Runs one small batch, on a GPU one of every kind, so that no request waits for one-time work.

        Raises:
            ModelLoadError: The model returns NaN or inf.
        """

    @property
    def can_begin(self) -> bool:
        """Whether a forward may start beside those under way, because a part of the device is or will soon be idle."""
        ...

    def set_wakeup_fd(self, fd: int | None) -> None:
        """Sets the file descriptor that is written to when a forward ends or `can_begin` becomes true; None for none.

        The runner no longer writes to the previous one after this call.
        """
        ...

    def begin(self, chunks: Sequence[PrefillChunk]) -> Forward:
        """Starts a forward: as `execute`, but may return before its end. Raises the errors of `execute`.

        Pooling states and cursors are already those after the forward. If `keeps_order`, the next chunks of the same
        sequences may start at once. Otherwise forwards under way hold whole sequences only.
        """
        ...

    def execute(self, chunks: Sequence[PrefillChunk]) -> BatchOutputs:
        """Runs one forward and pools it. A failed forward changes no state of its sequences.

        Args:
            chunks: First the chunks that start a sequence, in ascending length, then the later chunks. Tasks may be
                mixed.

        Returns:
            The arrays of each sequence by output name. The last chunk of a sequence returns the rest of its result, an
            earlier one the finished rows of a token-level result.

        Raises:
            DeviceMemoryError: Memory was short.
            DeviceLostError: The device is lost for all requests.
        """
        return self.begin(chunks).outputs()

    def preempt(self, sequence: QueuedSequence, allocation: Allocation) -> None:
        """Saves the SSM states of a sequence that loses its memory. Raises the errors of `execute`."""

    def forget(self, sequences: Sequence[QueuedSequence]) -> None:
        """Drops the pooling states and saved SSM states of sequences that have ended or were cancelled."""

    def free_tokens(self) -> int | None:
        """Returns the tokens of a forward for which the device has memory now; None if that is not known."""

    def take_times(self) -> list[ForwardTime]:
        """Returns the times of the forwards that have ended since the last call."""
        ...


class EndedForward:
    """A forward that ended before `Runner.begin` returned.

    Args:
        result: Its outputs, or its error.
    """

    is_done = True

    def __init__(self, result: BatchOutputs | Exception) -> None:
        self._result = result

    def outputs(self) -> BatchOutputs:
        """See Forward."""
        if isinstance(self._result, Exception):
            raise self._result
        return self._result
