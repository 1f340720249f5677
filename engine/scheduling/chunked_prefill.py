"""Cuts long prompts into chunks and says whose chunk runs next.

Plain Python without torch; knows nothing about memory or devices. Sound only for models that read from left to right:
a chunk sees the chunks before it, which must be done and kept.

    >>> manager = ChunkedPrefillManager(chunk_size=512)
    >>> chunks = manager.create_chunks(request_id="req1", prompt_tokens=2048)
    >>> for chunk in manager.iterate_chunks("req1"):
    ...     is_done = manager.complete_chunk(chunk.chunk_id, output=list(chunk.tokens))
    >>> len(chunks), len(manager.merge_chunks("req1"))
    (4, 2048)

The order is first come, first served, where a level of priority counts as having come `ageing_s` earlier. As this never
changes while a request waits, nobody starves: whoever comes late enough comes behind it. (Source of the idea: the
virtual start times of Goyal, Vin, Cheng, "Start-time Fair Queueing", 1997.)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from ..protocol.errors import InvalidRequestError
from .chunk_boundaries import chunk_prompt
from .chunked_prefill_request import ChunkedRequest
from .chunked_prefill_table import ChunkedRequestTable
from .chunked_prefill_types import (
    ChunkedPrefillConfig,
    ChunkMetrics,
    ChunkPriority,
    ChunkState,
    ChunkStateError,
    PrefillChunk,
)

__all__ = [
    "ChunkMetrics",
    "ChunkPriority",
    "ChunkState",
    "ChunkStateError",
    "ChunkedPrefillConfig",
    "ChunkedPrefillManager",
    "ChunkedRequest",
    "PrefillChunk",
    "chunk_prompt",
    "create_prefill_manager",
]


class ChunkedPrefillManager(ChunkedRequestTable):
    """The requests in chunks, and whose chunk runs. Not thread-safe: its owner holds a lock.

    It knows nothing of memory. Where requests share a pool, give it those only that hold all that they need: one that
    had to wait for memory at its turn would hold up the others, who would give theirs back once they are done.

    Invariants: the chunks of a request cover its prompt without gap or overlap; they run in order, one at a time.
    """

    def peek(self) -> ChunkedRequest | None:
        """Returns the request whose chunk is next, or None where no chunk may run."""
        return self._queue.peek()

    def schedule_chunk(
        self, max_tokens: int | None = None, *, memory_pressure: float | None = None
    ) -> PrefillChunk | None:
        """Takes the next chunk: of the highest priority, waiting included, and with nothing of its request in flight.

        Args:
            max_tokens: Tokens that there is room for. A longer chunk is cut, and the rest waits as a chunk of its own,
                which is filled up from the one behind it when its turn comes.
            memory_pressure: Share of the memory that is taken now, 0 to 1, to size the chunk by in place of what was
                planned.

        Returns:
            The chunk, or None where none may run or the next needs more room: a chunk is not cut below the smallest
            size of its request.

        Raises:
            InvalidRequestError: `memory_pressure` is out of range.
        """
        request = self.peek()
        if request is None:
            return None
        size = request.planned_size
        if memory_pressure is not None and self.config.is_dynamic:
            size = self.config.sized(request.chunk_size, memory_pressure)
        if max_tokens is not None and max_tokens < size:
            smallest = self.config.smallest_chunk(size)
            if max_tokens < min(smallest, request.total_tokens - request.num_completed_tokens):
                return None
            size = max_tokens
        self._queue.pop()
        return self._take(request, size)

    def start_chunk(self, chunk_id: int) -> PrefillChunk:
        """Says that a scheduled chunk runs now.

        Raises:
            ChunkStateError: It is not scheduled.
        """
        chunk = self._find_in_flight(chunk_id, ChunkState.SCHEDULED)
        chunk.state = ChunkState.RUNNING
        chunk.started_s = self._clock()
        return chunk

    def complete_chunk(self, chunk_id: int, output: Any = None, kv_cache: Any = None) -> bool:
        """Says that a running chunk is done, and returns whether its whole request is.

        Args:
            chunk_id: The chunk.
            output: What it gave, for `merge_chunks`.
            kv_cache: Whatever holds the request's keys and values up to here; kept as the request's `kv_cache`.

        Raises:
            ChunkStateError: It does not run.
        """
        chunk = self._find_in_flight(chunk_id, ChunkState.RUNNING)
        request = self._leave_flight(chunk)
        chunk.state, chunk.output, chunk.error = ChunkState.COMPLETED, output, None
        request.in_flight = None
        request.completed.append(chunk)
        if kv_cache is not None:
            request.kv_cache = kv_cache
        self._metrics.completed_chunks += 1
        self._metrics.completed_tokens += chunk.num_tokens
        self._metrics.completed_requests += request.is_complete
        request.turn = (request.turn[0] + chunk.num_tokens * self.config.token_s, request.turn[1])
        if chunk.started_s is not None:
            self._metrics.run_s += self._clock() - chunk.started_s
        self._queue.push(request)
        return request.is_complete

    def fail_chunk(self, chunk_id: int, error: str | BaseException) -> bool:
        """Says that a chunk in flight failed, and returns whether it will be tried again.

        It waits again, so that its request goes on after its last completed chunk. After `max_retries` tries more the
        request has failed as a whole.

        Raises:
            ChunkStateError: It is not in flight.
        """
        chunk = self._find_in_flight(chunk_id, ChunkState.SCHEDULED, ChunkState.RUNNING)
        request = self._leave_flight(chunk)
        chunk.num_failures += 1
        chunk.error = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self._metrics.failed_chunks += 1
        if chunk.num_failures > self.config.max_retries:
            request.end(ChunkState.FAILED, chunk.error)
            self._metrics.failed_requests += 1
            return False
        request.put_back()
        self._queue.push(request)
        return True

    def preempt(self, request_id: Hashable, resume_at: int | None = None) -> int:
        """Sets a request back and returns the token at which it goes on.

        A chunk in flight waits again; what its run still gives must be dropped.

        Args:
            request_id: The request.
            resume_at: Token at which to go on, where what was completed after it is lost. None goes on after the last
                completed chunk. A completed chunk with an output is only redone as a whole.

        Raises:
            ChunkStateError: The request is unknown, complete or has failed.
            InvalidRequestError: Not all tokens before `resume_at` are completed.
        """
        request = self._find_unfinished(request_id, "preempted")
        num_completed = request.num_completed_tokens
        if resume_at is None:
            resume_at = num_completed
        if not 0 <= resume_at <= num_completed:
            raise InvalidRequestError(
                f"request {request_id!r} cannot go on at token {resume_at}; {num_completed} of {request.total_tokens} "
                "are completed.",
                param="resume_at",
            )
        if request.in_flight is not None:
            self._leave_flight(request.in_flight)
            request.put_back()
        request.rewind(resume_at)
        self._metrics.preemptions += 1
        self._queue.push(request)
        return request.num_completed_tokens

    def skip_cached(self, request_id: Hashable, num_cached_tokens: int) -> None:
        """Counts tokens at the start of a request as completed, since they were found in a cache.

        Args:
            request_id: The request, with no chunk in flight.
            num_cached_tokens: Tokens. Nothing is skipped where as many are completed.

        Raises:
            ChunkStateError: The request is unknown, complete or has failed, or a chunk of it is in flight.
            InvalidRequestError: They are all tokens of the prompt: the last one must run.
        """
        request = self._find_unfinished(request_id, "skipped over")
        if request.in_flight is not None:
            chunk = request.in_flight
            raise ChunkStateError(f"chunk {chunk.chunk_id} of request {request_id!r} is still {chunk.state}.")
        if num_cached_tokens >= request.total_tokens:
            raise InvalidRequestError(
                f"request {request_id!r} has {request.total_tokens} tokens; {num_cached_tokens} cannot be skipped, "
                "since the last one must run.",
                param="num_cached_tokens",
            )
        num_skipped = num_cached_tokens - request.num_completed_tokens
        if num_skipped > 0:
            request.skip_to(num_cached_tokens)
            self._metrics.cached_tokens += num_skipped

    def iterate_chunks(self, request_id: Hashable) -> Iterator[PrefillChunk]:
        """Yields the chunks of one request as they are to run, each started; the consumer completes or fails each.

        Ends when the request is complete or cancelled.

        Raises:
            ChunkStateError: The request is unknown or has failed, a chunk of it is in flight elsewhere, or the consumer
                went on without completing the last one.
        """
        request = self._find(request_id)
        while not request.is_complete and request.end_state is not ChunkState.CANCELLED:
            if request.end_state is ChunkState.FAILED:
                raise ChunkStateError(f"request {request_id!r} has failed: {request.error}")
            if request.in_flight is not None:
                chunk = request.in_flight
                raise ChunkStateError(f"chunk {chunk.chunk_id} of request {request_id!r} is still {chunk.state}.")
            yield self.start_chunk(self._take(request, request.planned_size).chunk_id)

    def _find_unfinished(self, request_id: Hashable, action: str) -> ChunkedRequest:
        request = self._find(request_id)
        if request.end_state is not None or request.is_complete:
            raise ChunkStateError(f"request {request_id!r} is {request.state}; it cannot be {action}.")
        return request

    def _take(self, request: ChunkedRequest, size: int) -> PrefillChunk:
        chunk = request.take(size)
        self._in_flight[chunk.chunk_id] = chunk
        return chunk

    def _leave_flight(self, chunk: PrefillChunk) -> ChunkedRequest:
        del self._in_flight[chunk.chunk_id]
        return self.requests[chunk.request_id]

    def _find_in_flight(self, chunk_id: int, *states: ChunkState) -> PrefillChunk:
        chunk = self._in_flight.get(chunk_id)
        if chunk is not None and chunk.state in states:
            return chunk
        wanted = " or ".join(states)
        for request in self.requests.values():
            for known in request.chunks:
                if known.chunk_id == chunk_id:
                    raise ChunkStateError(
                        f"chunk {chunk_id} of request {request.request_id!r} is {known.state}; it must be {wanted}."
                    )
        raise ChunkStateError(f"chunk {chunk_id!r} is unknown; its request may have been cancelled or removed.")


def create_prefill_manager(
    chunk_size: int = 512, threshold: int | None = None, dynamic: bool = True
) -> ChunkedPrefillManager:
    """Returns a manager that cuts prompts of more than `threshold` tokens (None takes `chunk_size`).

    Args:
        chunk_size: Tokens of a chunk.
        threshold: Tokens.
        dynamic: Whether chunks become smaller as memory runs short.
    """
    return ChunkedPrefillManager(ChunkedPrefillConfig(chunk_size=chunk_size, threshold=threshold, is_dynamic=dynamic))
