"""The records of scheduling: a request, its sequences, their chunks, and a batch. Plain Python without torch.

A sequence waits in the FairQueue, then runs, then ends. A preempted sequence waits again. A forward runs one chunk of a
sequence: a short sequence after its cached prefix, or a part of a long one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..protocol.messages import SubmitRequest, TokenizedInput
from ..protocol.model_info import ModelInfo
from ..protocol.params import PoolingParams
from ..protocol.tasks import PoolingTask, PoolingType
from .kv_cache_pool import block_keys
from .sequence_pool import Allocation

ChunkId = tuple[Hashable, int]
"""The id of a sequence, and the first token of the chunk."""


class ChunkStateError(ValueError):
    """A chunk or its sequence is unknown, or is in the wrong state for the call. Always a bug of the caller."""


class ChunkState(StrEnum):
    """State of a chunk. A sequence has none: see its `is_queued`, `chunk`, `is_complete` and `has_failed`."""

    PENDING = "pending"  # expected; or it failed or was preempted, and its tokens will be scheduled again
    SCHEDULED = "scheduled"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"  # too often to be retried
    CANCELLED = "cancelled"  # its sequence was removed


@dataclass(slots=True, eq=False)
class PrefillChunk:
    """Consecutive tokens of one sequence that run in one forward: a part of it, or also a whole short sequence."""

    sequence: InputSequence
    start: int  # index of its first token
    end: int  # index after its last token
    state: ChunkState = ChunkState.PENDING
    started_s: float = 0.0  # Seconds, monotonic

    @property
    def sequence_id(self) -> Hashable:
        """InputSequence.sequence_id."""
        return self.sequence.sequence_id

    @property
    def chunk_id(self) -> ChunkId:
        """The id of its sequence and its first token."""
        return self.sequence_id, self.start

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward runs."""
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        """Whether it is the end of its sequence."""
        return self.end == self.sequence.num_tokens

    @property
    def tokens(self) -> Any:
        """Its part of `InputSequence.tokens`: a TokenizedInput; in a StandaloneSequence a list, an array or a range."""
        return self.sequence.tokens[self.start : self.end]


@dataclass(slots=True, eq=False, kw_only=True)
class InputSequence:
    """One input of a request, from its arrival to its end.

    Attributes:
        sequence_id: Id of the sequence: in the engine the pair of request id and index.
        tokens: The tokenized input.
        num_tokens: Tokens of the whole input.
        request: The request that it belongs to.
        index: Index among the inputs of the request.
        block_keys: Keys of its full blocks in the prefix cache; empty if it does not use the cache.
        is_long: Whether it runs in chunks, with memory for its whole length.
        is_queued: Whether it waits in the FairQueue, which sets it.
        num_computed_tokens: Tokens at the start that are computed or cached.
        num_pooled_tokens: Pooled tokens. They stay pooled if the sequence is preempted and runs them again.
        chunk: The last chunk that is scheduled or runs. The next chunk must wait for it.
        earlier_chunks: Chunks that run before `chunk`, in order; see ChunkedPrefillManager.allow_next_chunk.
        num_failures: Failures since the last completed chunk.
        error: The last failure.
        has_failed: Whether it failed too often to be retried.
        allocation: Its memory in the sequence pool.
        chunk_size: Tokens of a chunk while memory is free; 0: the configured size.
    """

    sequence_id: Hashable
    tokens: TokenizedInput = field(repr=False)
    num_tokens: int
    request: Request = field(repr=False)
    index: int = 0
    block_keys: Sequence[bytes] = ()
    is_long: bool = False
    is_queued: bool = False
    num_computed_tokens: int = 0
    num_pooled_tokens: int = 0
    chunk: PrefillChunk | None = None
    earlier_chunks: tuple[PrefillChunk, ...] = ()
    num_failures: int = 0
    error: str | None = None
    has_failed: bool = False
    allocation: Allocation | None = None
    chunk_size: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether every token is done."""
        return self.num_computed_tokens == self.num_tokens

    @property
    def chunks_in_flight(self) -> tuple[PrefillChunk, ...]:
        """Chunks that are scheduled or run, in order."""
        return self.earlier_chunks if self.chunk is None else (*self.earlier_chunks, self.chunk)

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens at the start that are done or in flight: its next chunk starts after them."""
        in_flight = self.chunks_in_flight
        return in_flight[-1].end if in_flight else self.num_computed_tokens

    @property
    def is_ready(self) -> bool:
        """Whether its next chunk may be scheduled."""
        return self.chunk is None and not self.has_failed and self.num_scheduled_tokens < self.num_tokens

    def is_in_flight(self, chunk: PrefillChunk) -> bool:
        """Whether a chunk is in flight: neither completed nor dropped."""
        return chunk is self.chunk or chunk in self.earlier_chunks

    def drop_chunks(self, state: ChunkState) -> None:
        """Drops the chunks in flight. Their results must be ignored."""
        for chunk in self.chunks_in_flight:
            chunk.state = state
        self.earlier_chunks = ()
        self.chunk = None

    def reset(self) -> None:
        """Resets the sequence to its first token."""
        self.drop_chunks(ChunkState.PENDING)
        self.num_computed_tokens = 0


@dataclass(slots=True, eq=False)
class Request:
    """A request in the engine process, with one InputSequence for each input."""

    request_id: int
    params: PoolingParams  # resolved
    arrival_s: float = 0.0  # Seconds, monotonic
    priority: int = 0  # lower runs first
    deadline_s: float | None = None  # Seconds, monotonic
    client: str = ""
    needs_last_row: bool = False  # the result depends on the last token only: cached tokens need not run
    sequences: list[InputSequence] = field(default_factory=list)  # one per input, in order
    num_unfinished: int = 0  # sequences that have not finished
    started_s: float | None = None  # Seconds, monotonic: when its first forward started
    # Set by FairQueue:
    size_class: int = 0  # number of its size class
    virtual_arrival: float = 0.0  # sort key within its class: tokens
    priority_tokens: float = 0.0  # tokens of its priority: it runs that much earlier
    arrival_number: int = 0  # number of the request in order of arrival

    @property
    def preemption_order(self) -> tuple[int, int, int]:
        """Sort key of the requests of a client in preemption: by priority, then size, then arrival."""
        return self.priority, self.size_class, self.arrival_number


def allocations_of(chunks: Sequence[PrefillChunk]) -> list[Allocation | None]:
    """Returns the allocation of each chunk's sequence. A forward reads them once: a cancellation sets them to None.

    Raises:
        ValueError: A chunk has no allocation because its request was cancelled. The other chunks can run again.
    """
    allocations = [chunk.sequence.allocation for chunk in chunks]
    if any(a is None and (c.start or c.sequence.is_long) for c, a in zip(chunks, allocations, strict=True)):
        raise ValueError("a chunk lost its memory before it ran")
    return allocations


def adapters_of(chunks: Sequence[PrefillChunk], numbers: Mapping[str, int]) -> NDArray[np.int32] | None:
    """Returns the number of each chunk's adapter, [N]; -1: no adapter. None if no chunk has one.

    Args:
        chunks: N chunks.
        numbers: Numbers of the model's adapters by name. If queries have a model of their own, which has no adapters:
            those of the model of documents.
    """
    if not numbers:
        return None
    names = [chunk.sequence.request.params.adapter for chunk in chunks]
    if not any(names):
        return None
    return np.array([-1 if name is None else numbers[name] for name in names], np.int32)


def num_long_tokens(chunks: Sequence[PrefillChunk]) -> int:
    """Returns the number of tokens in chunks of long sequences."""
    return sum(chunk.num_tokens for chunk in chunks if chunk.sequence.is_long)


class RequestBuilder:
    """Builds the scheduler's records of the requests for one model. Thread-safe.

    Args:
        block_size: Tokens of a block of the prefix cache; None without a cache.
        seed: Text that makes block keys differ between models. The adapter of a request is appended, and its namespace,
            so that the latency of a request does not reveal prefixes sent with other API keys.
    """

    def __init__(self, info: ModelInfo, block_size: int | None, seed: str) -> None:
        self._block_size = block_size
        self._seed = seed.encode()
        self._pools_last_row = info.sequence_pooling == (PoolingType.LAST,)

    def build(self, submitted: SubmitRequest, now_s: float) -> Request:
        """Returns the request, with one sequence per input. `now_s`: seconds, monotonic time of its arrival."""
        params = submitted.params
        # If only the last row is pooled, the prefix cache may replace the rows before it.
        needs_last_row = self._pools_last_row and params.task not in (
            PoolingTask.TOKEN_EMBED,
            PoolingTask.TOKEN_CLASSIFY,
        )
        request = Request(
            request_id=submitted.request_id,
            params=params,
            arrival_s=now_s,
            priority=submitted.priority,
            deadline_s=None if submitted.timeout_s is None else now_s + submitted.timeout_s,
            client=submitted.client,
            needs_last_row=needs_last_row,
        )
        # Neither the path of a model nor the name of an adapter has these bytes.
        seed = self._seed if params.adapter is None else self._seed + b"\1" + params.adapter.encode()
        seed = seed + b"\0" + submitted.namespace.encode() if submitted.namespace else seed
        block_size = self._block_size
        request.sequences = [
            InputSequence(
                sequence_id=(request.request_id, index),
                tokens=tokens,
                num_tokens=len(tokens.token_ids),
                request=request,
                index=index,
                block_keys=() if block_size is None else block_keys(tokens.token_ids, block_size, seed),
            )
            for index, tokens in enumerate(submitted.inputs)
        ]
        return request


@dataclass(slots=True)
class ForwardBudget:
    """Tokens and sequences that may still be added to a forward."""

    num_tokens: int
    num_seqs: int
    is_empty: bool = True  # no sequence was added yet

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` tokens fits. The first one may exceed the tokens."""
        return self.num_seqs > 0 and (num_tokens <= self.num_tokens or self.is_empty)

    def add(self, num_tokens: int) -> bool:
        """Adds a sequence if it fits. Returns whether it was added."""
        if not self.fits(num_tokens):
            return False
        self.num_tokens -= num_tokens
        self.num_seqs -= 1
        self.is_empty = False
        return True


@dataclass(slots=True)
class Batch:
    """The chunks of one forward, and the other changes that `Scheduler.schedule` made.

    Attributes:
        chunks: Chunks that start a sequence, in ascending length; then the later chunks, in ascending length.
        num_long_chunks: Number of chunks of long sequences.
        expired_requests: Requests that `schedule` has ended, because their deadline has passed.
        preempted_sequences: Sequences that wait again, each with the memory that it had.
        ended_sequences: Long sequences that ended since the last batch.
        num_deferred: Waiting sequences that did not fit into the batch.
    """

    chunks: list[PrefillChunk] = field(default_factory=list)
    num_long_chunks: int = 0
    expired_requests: list[Request] = field(default_factory=list)
    preempted_sequences: list[tuple[InputSequence, Allocation]] = field(default_factory=list)
    ended_sequences: list[InputSequence] = field(default_factory=list)
    num_deferred: int = 0
