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

import itertools
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import asdict, replace
from typing import Any

from .chunked_prefill_request import ChunkedRequest, ChunkedRequestQueue
from .chunked_prefill_types import (
    ChunkedPrefillConfig,
    ChunkMetrics,
    ChunkPriority,
    ChunkState,
    ChunkStateError,
    PrefillChunk,
    Tokens,
)
from .errors import InvalidRequestError

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


class ChunkedPrefillManager:
    """The requests in chunks. Not thread-safe: its owner holds a lock.

    It knows nothing of memory. Where requests share a pool, give it those only that hold all that they need: one that
    had to wait for memory at its turn would hold up the others, who would give theirs back once they are done.

    Invariants: the chunks of a request cover its prompt without gap or overlap; they run in order, one at a time.
    A request that is complete or has failed is kept, for `merge_chunks` and questions, until `remove_request`.

    Args:
        config: How prompts are cut; None takes the defaults.
        tokenize_fn: Text to token ids, for `create_chunks_from_prompt`.
        chunk_size: Tokens of a chunk; in place of `config` where this is all there is to say.
        clock: Seconds. Monotonic time.

    Raises:
        ValueError: Both `config` and `chunk_size` are given, or `chunk_size` is less than 1.
    """

    def __init__(
        self,
        config: ChunkedPrefillConfig | None = None,
        tokenize_fn: Callable[[str], Tokens] | None = None,
        *,
        chunk_size: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if config is not None and chunk_size is not None:
            raise ValueError("chunk_size is part of config; give one of them.")
        if config is None:
            config = ChunkedPrefillConfig() if chunk_size is None else ChunkedPrefillConfig(chunk_size=chunk_size)
        self.config = config
        self.requests: dict[Hashable, ChunkedRequest] = {}
        self._tokenize = tokenize_fn
        self._clock = clock
        self._in_flight: dict[int, PrefillChunk] = {}
        self._ids = itertools.count()
        self._ties = itertools.count()
        self._queue = ChunkedRequestQueue()
        self._metrics = ChunkMetrics()

    def should_chunk(self, token_count: int) -> bool:
        """Whether a prompt of that many tokens is worth cutting."""
        threshold = self.config.threshold
        return token_count > (self.config.chunk_size if threshold is None else threshold)

    def compute_chunk_boundaries(
        self, total_tokens: int, chunk_size: int | None = None, memory_pressure: float = 0.0
    ) -> list[tuple[int, int]]:
        """Returns where each chunk of a prompt begins and ends (not included).

        Args:
            total_tokens: Tokens of the prompt.
            chunk_size: Tokens of a chunk when memory is free; None takes the config's.
            memory_pressure: Share of the memory that is taken, 0 to 1; chunks are the smaller, the higher it is.

        Raises:
            InvalidRequestError: An argument is out of range.
        """
        if total_tokens < 0:
            raise InvalidRequestError(f"total_tokens is {total_tokens}; it must be 0 or more.", param="total_tokens")
        size = self.config.sized(self.config.chunk_size if chunk_size is None else chunk_size, memory_pressure)
        return _boundaries(total_tokens, size)

    def create_chunks(
        self,
        request_id: Hashable,
        prompt_tokens: int | Tokens,
        priority: int = ChunkPriority.NORMAL,
        chunk_size: int | None = None,
        memory_pressure: float = 0.0,
        *,
        arrival_s: float | None = None,
    ) -> list[PrefillChunk]:
        """Takes a request in and returns its chunks, as they are planned.

        Args:
            request_id: Its name.
            prompt_tokens: Token ids, which are not copied, or their number.
            priority: Its level, a ChunkPriority or any other integer; higher goes first.
            chunk_size: Tokens of a chunk when memory is free; None takes the config's.
            memory_pressure: Share of the memory that is taken, 0 to 1.
            arrival_s: Seconds. Time of its arrival by the manager's clock; None takes now.

        Raises:
            InvalidRequestError: The name is in use, the prompt is empty, or an argument is out of range.
        """
        if request_id in self.requests:
            raise InvalidRequestError(f"request {request_id!r} is in chunks already.", param="request_id")
        prompt = range(prompt_tokens) if isinstance(prompt_tokens, int) else prompt_tokens
        if not len(prompt):
            raise InvalidRequestError(f"request {request_id!r} has no tokens.", param="prompt_tokens")
        base_size = self.config.chunk_size if chunk_size is None else chunk_size
        size = self.config.sized(base_size, memory_pressure)
        arrival_s = self._clock() if arrival_s is None else arrival_s
        request = ChunkedRequest(
            request_id=request_id,
            prompt=prompt,
            priority=priority,
            arrival_s=arrival_s,
            turn=(arrival_s - priority * self.config.ageing_s, next(self._ties)),
            chunk_size=base_size,
            planned_size=size,
            new_id=self._ids.__next__,
        )
        for index, (start, end) in enumerate(_boundaries(len(prompt), size)):
            request.pending.append(request.new_chunk(start, end, index))
        self.requests[request_id] = request
        self._queue.push(request)
        return list(request.pending)

    def create_chunks_from_prompt(
        self,
        request_id: Hashable,
        prompt: str,
        priority: int = ChunkPriority.NORMAL,
        chunk_size: int | None = None,
    ) -> list[PrefillChunk]:
        """Tokenizes a text and takes it in; otherwise as `create_chunks`.

        Raises:
            InvalidRequestError: As `create_chunks`, or the manager was made without a `tokenize_fn`.
        """
        if self._tokenize is None:
            raise InvalidRequestError("a text cannot be cut: the manager has no tokenize_fn.", param="prompt")
        return self.create_chunks(request_id, self._tokenize(prompt), priority, chunk_size)

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
        """Sets a request back, or forward, and returns the token at which it goes on.

        A chunk in flight waits again; what its run still gives must be dropped.

        Args:
            request_id: The request.
            resume_at: Token at which to go on: less than what was completed where that is lost, more where it was found
                in a cache. None goes on after the last completed chunk. A completed chunk with an output is only redone
                as a whole.

        Raises:
            ChunkStateError: The request is unknown, complete or has failed.
            InvalidRequestError: `resume_at` is not a token of the prompt.
        """
        request = self._find(request_id)
        if request.end_state is not None or request.is_complete:
            raise ChunkStateError(f"request {request_id!r} is {request.state}; it cannot be preempted.")
        if resume_at is None:
            resume_at = request.num_completed_tokens
        if not 0 <= resume_at < request.total_tokens:
            raise InvalidRequestError(
                f"request {request_id!r} cannot go on at token {resume_at}; it has {request.total_tokens}.",
                param="resume_at",
            )
        if request.in_flight is not None:
            self._leave_flight(request.in_flight)
            request.put_back()
        skipped = resume_at - request.num_completed_tokens
        if skipped > 0:
            request.skip_to(resume_at)
            self._metrics.cached_tokens += skipped
        else:
            request.rewind(resume_at)
            self._metrics.preemptions += 1
        self._queue.push(request)
        return request.num_completed_tokens

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

    def merge_chunks(self, request_id: Hashable) -> Any:
        """Returns the outputs of all chunks in order: lists and arrays joined to one, others as a list.

        Chunks that were found in a cache have no output and are left out.

        Raises:
            ChunkStateError: The request is unknown or not complete, or some of its chunks have an output but not all.
        """
        return self._find(request_id).merged_output()

    def cancel_request(self, request_id: Hashable) -> bool:
        """Ends a request and forgets it; returns whether it was known. What its run still gives must be dropped."""
        request = self.requests.get(request_id)
        if request is not None and request.end_state is None and not request.is_complete:
            self._metrics.cancelled_requests += 1
        return self.remove_request(request_id)

    def remove_request(self, request_id: Hashable) -> bool:
        """Forgets a request in whatever state, with its chunks and outputs; returns whether it was known."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return False
        if request.in_flight is not None:
            del self._in_flight[request.in_flight.chunk_id]
        if request.end_state is None and not request.is_complete:
            request.end(ChunkState.CANCELLED)
        self._queue.compact(len(self.requests))
        return True

    def clear(self) -> None:
        """Forgets all requests; counts of what was done stay."""
        for request_id in list(self.requests):
            self.cancel_request(request_id)

    def get_request(self, request_id: Hashable) -> ChunkedRequest | None:
        """Returns a request, or None where it is unknown."""
        return self.requests.get(request_id)

    def get_pending_count(self, request_id: Hashable | None = None) -> int:
        """Returns the number of chunks that wait, of one request (0 where it is unknown) or of all."""
        if request_id is None:
            return sum(len(request.pending) for request in self.requests.values())
        request = self.requests.get(request_id)
        return 0 if request is None else len(request.pending)

    def is_complete(self, request_id: Hashable) -> bool:
        """Whether every token of a request is done; False where it is unknown."""
        request = self.requests.get(request_id)
        return request is not None and request.is_complete

    def statistics(self) -> ChunkMetrics:
        """Returns the counts, as they are now."""
        return replace(
            self._metrics,
            num_requests=len(self.requests),
            num_pending_chunks=self.get_pending_count(),
            num_running_chunks=len(self._in_flight),
        )

    def get_stats(self) -> dict[str, float]:
        """Returns the counts by name."""
        metrics = self.statistics()
        return {**asdict(metrics), "mean_chunk_tokens": metrics.mean_chunk_tokens}

    def _take(self, request: ChunkedRequest, size: int) -> PrefillChunk:
        chunk = request.take(size)
        self._in_flight[chunk.chunk_id] = chunk
        return chunk

    def _leave_flight(self, chunk: PrefillChunk) -> ChunkedRequest:
        del self._in_flight[chunk.chunk_id]
        return self.requests[chunk.request_id]

    def _find(self, request_id: Hashable) -> ChunkedRequest:
        request = self.requests.get(request_id)
        if request is None:
            raise ChunkStateError(f"request {request_id!r} is unknown; it may have been cancelled or removed.")
        return request

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


def chunk_prompt(tokens: Tokens, chunk_size: int) -> list[Tokens]:
    """Cuts tokens into chunks of `chunk_size`; the last may be shorter.

    Raises:
        InvalidRequestError: `chunk_size` is less than 1.
    """
    if chunk_size < 1:
        raise InvalidRequestError(f"chunk_size is {chunk_size}; it must be at least 1.", param="chunk_size")
    return [tokens[start:end] for start, end in _boundaries(len(tokens), chunk_size)]


def _boundaries(total_tokens: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, total_tokens)) for start in range(0, total_tokens, size)]
