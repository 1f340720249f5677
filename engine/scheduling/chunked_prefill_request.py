"""One prompt in chunks. Plain Python; used through ChunkedPrefillManager."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .chunked_prefill_types import ChunkState, ChunkStateError, PrefillChunk, Tokens


@dataclass(slots=True, eq=False)
class ChunkedRequest:
    """A prompt in chunks: some completed, at most one in flight, the others pending, in the order of their tokens.

    Attributes:
        request_id: Its name.
        prompt: Token ids, or a range where only their number is known.
        priority: Its level; higher goes first.
        arrival_s: Seconds. Monotonic time of its arrival.
        turn: The lower, the sooner. Only changes while it is not queued.
        chunk_size: Tokens of a chunk when memory is free.
        planned_size: Tokens of a chunk as it was first cut.
        new_id: Gives the next free chunk id.
        pending: Chunks that wait.
        completed: Chunks that are done.
        in_flight: The chunk that is scheduled or runs.
        kv_cache: What the caller handed in with the last completed chunk, if anything.
        end_state: FAILED or CANCELLED once it has ended that way.
        error: Why it failed.
        is_queued: Whether the queue has an entry for it.
    """

    request_id: Hashable
    prompt: Tokens = field(repr=False)
    priority: int
    arrival_s: float
    turn: tuple[float, int]
    chunk_size: int
    planned_size: int
    new_id: Callable[[], int] = field(repr=False)
    pending: deque[PrefillChunk] = field(default_factory=deque)
    completed: list[PrefillChunk] = field(default_factory=list)
    in_flight: PrefillChunk | None = None
    kv_cache: Any = field(default=None, repr=False)
    end_state: ChunkState | None = None
    error: str | None = None
    is_queued: bool = False

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def num_completed_tokens(self) -> int:
        """Tokens at the start that are done."""
        return self.completed[-1].end if self.completed else 0

    @property
    def chunks(self) -> list[PrefillChunk]:
        """All chunks in the order of their tokens."""
        return [*self.completed, *([self.in_flight] if self.in_flight else []), *self.pending]

    @property
    def is_complete(self) -> bool:
        """Whether every token is done."""
        return self.num_completed_tokens == self.total_tokens

    @property
    def is_ready(self) -> bool:
        """Whether its next chunk may be scheduled."""
        return self.end_state is None and self.in_flight is None and bool(self.pending)

    @property
    def state(self) -> ChunkState:
        """Where it stands as a whole."""
        if self.end_state is not None:
            return self.end_state
        if self.is_complete:
            return ChunkState.COMPLETED
        return ChunkState.PENDING if self.in_flight is None else self.in_flight.state

    def new_chunk(self, start: int, end: int, index: int) -> PrefillChunk:
        """Returns a chunk of its tokens that belongs nowhere yet."""
        return PrefillChunk(self.new_id(), self.request_id, start, end, self.prompt, index)

    def take(self, size: int) -> PrefillChunk:
        """Moves its next chunk into flight, cut or filled up from the chunks behind to `size` tokens."""
        chunk = self.pending.popleft()
        if chunk.num_tokens > size:
            self.pending.appendleft(self.new_chunk(chunk.start + size, chunk.end, chunk.index + 1))
            chunk.end = chunk.start + size
        while self.pending and chunk.num_tokens < size:
            following = self.pending[0]
            chunk.end = min(following.end, chunk.start + size)
            following.start = chunk.end
            if not following.num_tokens:
                self.pending.popleft().state = ChunkState.CANCELLED
        chunk.index = len(self.completed)
        chunk.state = ChunkState.SCHEDULED
        self.in_flight = chunk
        return chunk

    def put_back(self) -> None:
        """Returns the chunk in flight, if there is one, to the head of those that wait."""
        if self.in_flight is not None:
            self._wait_again(self.in_flight)
            self.in_flight = None

    def rewind(self, position: int) -> None:
        """Lets what was completed from `position` on wait again; it has no chunk in flight.

        A completed chunk around `position` is cut there, or waits again as a whole if it has an output, which cannot be
        cut.
        """
        while self.num_completed_tokens > position:
            chunk = self.completed.pop()
            self.kv_cache = None
            if chunk.start < position and chunk.output is None:
                self.pending.appendleft(self.new_chunk(position, chunk.end, chunk.index + 1))
                chunk.end = position
                self.completed.append(chunk)
            else:
                self._wait_again(chunk)

    def skip_to(self, position: int) -> None:
        """Counts what waits before `position` as completed, since it was found in a cache; it has none in flight."""
        while self.num_completed_tokens < position:
            chunk = self.pending.popleft()
            if chunk.end > position:
                self.pending.appendleft(self.new_chunk(position, chunk.end, chunk.index + 1))
                chunk.end = position
            chunk.index, chunk.state, chunk.is_cached = len(self.completed), ChunkState.COMPLETED, True
            self.completed.append(chunk)

    def end(self, state: ChunkState, error: str | None = None) -> None:
        """Ends it as FAILED or CANCELLED; so end its chunk in flight and, as CANCELLED, those that wait."""
        self.end_state, self.error = state, error
        if self.in_flight is not None:
            self.in_flight.state = state
            self.in_flight = None
        for chunk in self.pending:
            chunk.state = ChunkState.CANCELLED
        self.pending.clear()
        self.kv_cache = None

    def merged_output(self) -> Any:
        """Returns the outputs of all chunks in order: lists and arrays joined to one, others as a list.

        Raises:
            ChunkStateError: It is not complete, or some of its chunks have an output but not all.
        """
        if not self.is_complete:
            raise ChunkStateError(
                f"request {self.request_id!r} is {self.state}; {self.num_completed_tokens} of {self.total_tokens} "
                "tokens are completed."
            )
        outputs = [chunk.output for chunk in self.completed if not chunk.is_cached]
        given = [output for output in outputs if output is not None]
        if given and len(given) < len(outputs):
            raise ChunkStateError(f"request {self.request_id!r}: {len(outputs) - len(given)} chunks have no output.")
        if given and all(isinstance(output, np.ndarray) for output in given):
            return np.concatenate(given)
        if all(isinstance(output, list) for output in given):
            return [item for output in given for item in output]
        return given

    def _wait_again(self, chunk: PrefillChunk) -> None:
        chunk.state, chunk.output, chunk.is_cached = ChunkState.PENDING, None, False
        self.pending.appendleft(chunk)
