"""The requests in chunks: taken in, asked about, removed. Plain Python; used through ChunkedPrefillManager."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable
from dataclasses import asdict, replace
from typing import Any

from ..protocol.errors import InvalidRequestError
from .chunk_boundaries import boundaries
from .chunked_prefill_queue import ChunkedRequestQueue
from .chunked_prefill_request import ChunkedRequest
from .chunked_prefill_types import (
    ChunkedPrefillConfig,
    ChunkMetrics,
    ChunkPriority,
    ChunkState,
    ChunkStateError,
    PrefillChunk,
    Tokens,
)


class ChunkedRequestTable:
    """What a ChunkedPrefillManager holds; whose chunk runs, and what becomes of it, is the manager's.

    A request that is complete or has failed is kept, for `merge_chunks` and questions, until `remove_request`.

    Args:
        config: How prompts are cut; None takes the defaults.
        tokenize_fn: Text to token ids, for `create_chunks_from_prompt`.
        chunk_size: Tokens of a chunk; in place of `config` where this is all there is to say.
        clock: Seconds. Monotonic time.

    Attributes:
        config: How prompts are cut.
        requests: By name.

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
        return boundaries(total_tokens, size)

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
        for index, (start, end) in enumerate(boundaries(len(prompt), size)):
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

    def _find(self, request_id: Hashable) -> ChunkedRequest:
        request = self.requests.get(request_id)
        if request is None:
            raise ChunkStateError(f"request {request_id!r} is unknown; it may have been cancelled or removed.")
        return request
