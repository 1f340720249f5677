"""What the loop asks of whatever runs the model. Plain Python: the loop knows no torch, and no device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..protocol.batch_outputs import BatchOutputs
from ..protocol.model_info import ModelInfo, TokenizerSpec
from ..scheduling import Allocation, Chunk, QueuedSequence, SequencePool


class DeviceMemoryError(Exception):
    """A forward found too little memory; nothing is left of it, and a smaller one may succeed."""


class DeviceLostError(Exception):
    """The device can run nothing any more: the process has to end, and another takes over."""


class ForwardTime(NamedTuple):
    """A forward that has ended.

    Attributes:
        chunk_tokens: Tokens of chunks of long sequences.
        whole_tokens: Other tokens.
        seconds: Seconds that it took on the device.
    """

    chunk_tokens: int
    whole_tokens: int
    seconds: float


class DeviceLimits(NamedTuple):
    """What of a device limits a forward.

    Attributes:
        memory: Bytes of memory that it has; None where it is the host's.
        max_tokens: Tokens for which one forward has found memory; None where nobody has tried.
    """

    memory: int | None = None
    max_tokens: int | None = None


class Forward(Protocol):
    """A forward that was begun."""

    @property
    def is_done(self) -> bool:
        """Whether `outputs` would wait for nothing."""
        ...

    def outputs(self) -> BatchOutputs:
        """Waits for the forward and pools it; to be called once. See Runner.execute for what it gives and raises."""
        ...


class Runner(Protocol):
    """One model on one device. Used by one thread at a time. Unless it says otherwise, one lane that keeps the order.

    Attributes:
        info: The model, on its device.
        tokenizer: For the frontend.
        sequence_pool: Memory of the sequences that run in chunks.
        num_lanes: Parts of the device that run forwards by themselves.
        keeps_order: Forwards run one after the other, in the order in which they were begun: then chunks of one prompt
            may be under way together. Their memory may be given to others meanwhile, as these run later.
        limits: Of the device.
    """

    info: ModelInfo
    tokenizer: TokenizerSpec
    sequence_pool: SequencePool
    num_lanes: int = 1
    keeps_order: bool = True
    limits: DeviceLimits = DeviceLimits()

    def warm_up(self) -> None:
        """Runs one small batch, on a GPU one of every kind, so that no request pays for what happens once.

        Raises:
            ModelLoadError: The model gives what is no answer: NaN or inf.
        """

    @property
    def has_room(self) -> bool:
        """Whether a part of the device has nothing to do, or soon would: a forward may begin beside others."""
        ...

    def ring(self, bell: int | None) -> None:
        """Names the descriptor that is written to where a forward ends, and where `has_room` becomes true.

        After a call with None nobody writes to the last one any more.
        """
        ...

    def begin(self, chunks: Sequence[Chunk]) -> Forward:
        """Begins a forward: as `execute`, but may return before its end.

        What sequences keep is as after its end: the next may go on with it at once, where `keeps_order`. Others under
        way have whole sequences alone where it is not kept. Raises as `execute` does.
        """
        ...

    def execute(self, chunks: Sequence[Chunk]) -> BatchOutputs:
        """Runs one forward and pools it. One that fails leaves no trace in what sequences keep.

        Args:
            chunks: Those that begin a sequence first, in ascending length; then those that go on with one. Tasks may be
                mixed.

        Returns:
            A sequence's arrays by output name: of its last chunk all that is left of its answer, of an earlier one the
            rows of a token-level answer that are ready.

        Raises:
            DeviceMemoryError: Memory was short.
            DeviceLostError: The device is lost for all requests.
        """
        return self.begin(chunks).outputs()

    def preempt(self, sequence: QueuedSequence, allocation: Allocation) -> None:
        """Saves what would be lost of a sequence whose memory others get. Raises as `execute` does."""

    def forget(self, sequences: Sequence[QueuedSequence]) -> None:
        """Drops what is kept of sequences that have ended or were cancelled: pooling states and saved copies."""

    def free_tokens(self) -> int | None:
        """Returns the tokens of a forward that find memory on the device now; None where that is not known."""

    def take_times(self) -> list[ForwardTime]:
        """Returns the times of the forwards that were seen to end since the last call."""
        ...


class EndedForward:
    """A forward that ran while it was begun.

    Args:
        result: What it gave, or raised.
    """

    is_done = True

    def __init__(self, result: BatchOutputs | Exception) -> None:
        self._result = result

    def outputs(self) -> BatchOutputs:
        """See Forward."""
        if isinstance(self._result, Exception):
            raise self._result
        return self._result
