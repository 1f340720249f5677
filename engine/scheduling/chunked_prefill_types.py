"""What chunked prefill speaks of: its settings, a chunk and its states, and counts. Plain Python.

    PENDING --schedule--> SCHEDULED --start--> RUNNING --complete--> COMPLETED
       ^                      |                   |
       +--- preempt, fail ----+-------------------+---- too many failures ---> FAILED

A pending chunk of a request that is cancelled or failed, or whose tokens went to a neighbour, is CANCELLED.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import InvalidRequestError

Tokens: TypeAlias = Sequence[int] | NDArray[np.int32]
"""Token ids."""


class ChunkStateError(ValueError):
    """A chunk or a request is unknown, or is not in the state that the call needs. Always the caller's bug."""


class ChunkPriority(IntEnum):
    """Higher goes first. Any other integer is a level as well."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
    CRITICAL = 3


class ChunkState(StrEnum):
    """Where a chunk, or a whole request, stands."""

    PENDING = "pending"
    SCHEDULED = "scheduled"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedPrefillConfig:
    """How prompts are cut.

    Attributes:
        chunk_size: Tokens of a chunk.
        threshold: Tokens. Longer prompts are worth cutting; None takes `chunk_size`.
        min_chunk_size: Tokens. Chunks are not made smaller, but for what is left at the end of a prompt. Where a
            request asks for chunks smaller than this, theirs is the smallest size.
        is_dynamic: Whether chunks become smaller as memory runs short.
        ageing_s: Seconds of waiting that are worth one level of priority.
        token_s: Seconds by which a request's turn is later for every token of it that ran, so that others get a turn
            before a very long one is done; 0 runs them one after the other.
        max_retries: Failures of one chunk that are tried again; one more fails the request.
    """

    chunk_size: int = 512
    threshold: int | None = None
    min_chunk_size: int = 64
    is_dynamic: bool = True
    ageing_s: float = 1.0
    token_s: float = 0.0
    max_retries: int = 2

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and its value."""
        for name, least in (("chunk_size", 1), ("threshold", 0), ("min_chunk_size", 1), ("max_retries", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}.")
        for name in ("ageing_s", "token_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more.")

    def smallest_chunk(self, chunk_size: int) -> int:
        """Tokens of the smallest chunk of a request that asked for chunks of `chunk_size`."""
        return min(self.min_chunk_size, chunk_size)

    def sized(self, chunk_size: int, memory_pressure: float) -> int:
        """Tokens of a chunk when `memory_pressure`, 0 to 1, of the memory is taken, in steps of the smallest chunk.

        Raises:
            InvalidRequestError: An argument is out of range.
        """
        if chunk_size < 1:
            raise InvalidRequestError(f"chunk_size is {chunk_size}; it must be at least 1.", param="chunk_size")
        if not 0 <= memory_pressure <= 1:
            raise InvalidRequestError(
                f"memory_pressure is {memory_pressure}; it must lie between 0 and 1.", param="memory_pressure"
            )
        if not self.is_dynamic or memory_pressure == 0:
            return chunk_size
        step = self.smallest_chunk(chunk_size)
        return max(step, int(chunk_size * (1 - memory_pressure)) // step * step)


@dataclass(slots=True, eq=False)
class PrefillChunk:
    """Consecutive tokens of one prompt that go through the model in one pass.

    Attributes:
        chunk_id: Its number, unique in its manager.
        request_id: The request that it belongs to.
        start: First token.
        end: Token after its last. Pending chunks may be cut, or filled up from the one behind.
        prompt: The whole prompt, as it was given.
        index: Its place among the chunks of its request, final once it is scheduled.
        state: Where it stands.
        num_failures: Times that it failed.
        error: What its last failure was.
        output: What its run gave, where the caller hands it in.
        is_cached: Whether it never ran because its keys and values were found in a cache.
        started_s: Seconds. Monotonic time at which it last began to run.
    """

    chunk_id: int
    request_id: Hashable
    start: int
    end: int
    prompt: Tokens = field(repr=False)
    index: int
    state: ChunkState = ChunkState.PENDING
    num_failures: int = 0
    error: str | None = None
    output: Any = field(default=None, repr=False)
    is_cached: bool = False
    started_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return self.end - self.start

    @property
    def tokens(self) -> Tokens:
        """Its token ids; their positions where the prompt was given as a number of tokens."""
        return self.prompt[self.start : self.end]


@dataclass(slots=True)
class ChunkMetrics:
    """What a manager has done since it was made, and what it holds now.

    Attributes:
        num_requests: Requests that it holds.
        num_pending_chunks: Chunks that wait now.
        num_running_chunks: Chunks in flight now.
        completed_requests: Requests whose every token was done.
        failed_requests: Requests that failed too often.
        cancelled_requests: Requests that were cancelled.
        completed_chunks: Chunks that were completed.
        completed_tokens: Tokens of those chunks.
        cached_tokens: Tokens that were skipped, since they were found in a cache.
        failed_chunks: Failures of chunks.
        preemptions: Times that a request was set back.
        run_s: Seconds that completed chunks ran, summed.
    """

    num_requests: int = 0
    num_pending_chunks: int = 0
    num_running_chunks: int = 0
    completed_requests: int = 0
    failed_requests: int = 0
    cancelled_requests: int = 0
    completed_chunks: int = 0
    completed_tokens: int = 0
    cached_tokens: int = 0
    failed_chunks: int = 0
    preemptions: int = 0
    run_s: float = 0.0

    @property
    def mean_chunk_tokens(self) -> float:
        """Tokens of a completed chunk, on average; 0 where none is."""
        return self.completed_tokens / self.completed_chunks if self.completed_chunks else 0.0
