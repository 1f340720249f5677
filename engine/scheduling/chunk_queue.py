"""Which long prompts are being read, and whose chunk runs next. Plain Python without torch.

Sound only for models that read from left to right: a chunk sees the chunks before it, which must be done and kept.
Knows nothing of memory or devices: what is added must hold all that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic

import msgspec

from ..protocol.config import ChunkedPrefillConfig
from ..protocol.errors import InvalidRequestError
from ..protocol.messages import ChunkMetrics
from .sequence import ChunkState, PrefillChunk, R, Status

ChunkId = tuple[Hashable, int]


class ChunkStateError(ValueError):
    """A chunk or its prompt is unknown, or is not in the state that the call needs. Always the caller's bug."""


class ChunkQueue(Generic[R]):
    """Prompts in chunks, and the order in which their chunks run.

    Not thread-safe: its owner calls it from one thread, as the engine does, or holds a lock.
    The chunk that is due first runs first: at the turn of its prompt, and later for every token that ran.
    A prompt that comes later is due later, so no prompt starves.
    Invariants: the chunks of a prompt cover it without gap or overlap; they run in order, one at a time unless `go_on`
    says that the device keeps the order.

    Args:
        config: How prompts are cut.
        clock: Seconds. Monotonic time.
    """

    def __init__(self, config: ChunkedPrefillConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.requests: dict[Hashable, R] = {}  # that are being read, by name
        self._metrics = ChunkMetrics()
        self._clock = clock

    def add(self, request: R) -> None:
        """Takes in a prompt, whose chunks may run from now on. InvalidRequestError if it is empty, or known by name."""
        if request.request_id in self.requests:
            raise InvalidRequestError(f"request {request.request_id!r} is in chunks already.", param="request_id")
        if request.num_tokens < 1:
            raise InvalidRequestError(f"request {request.request_id!r} has no tokens.", param="prompt_tokens")
        request.status = Status.RUNNING
        self.requests[request.request_id] = request

    def should_chunk(self, token_count: int) -> bool:
        """Whether a prompt of that many tokens is worth cutting."""
        threshold = self.config.threshold
        return token_count > (self.config.chunk_size if threshold is None else threshold)

    def is_due(self, request: R, max_tokens: int) -> bool:
        """Whether a prompt should be added now: the next chunks of the others leave room, or are due later."""
        others = self.requests.values()
        left = sum(min(other.num_tokens - other.num_cut, self.config.chunk_size) for other in others)
        return left < max_tokens or all(request.due_s < other.due_s for other in others)

    def peek(self) -> R | None:
        """Returns the prompt whose chunk is due first, or None where no chunk may run."""
        return min((r for r in self.requests.values() if r.is_ready), key=lambda r: r.due_s, default=None)

    def schedule_chunk(self, max_tokens: int | None = None, *, memory_pressure: float = 0.0) -> PrefillChunk[R] | None:
        """Cuts and returns the chunk that is due first; None where none may run, or the next needs more room.

        Args:
            max_tokens: Tokens that there is room for; but for the end of a prompt, none is cut below the smallest size.
            memory_pressure: Share of a full chunk for which there is no memory, 0 to 1; else InvalidRequestError.
        """
        if (request := self.peek()) is None:
            return None
        num_left = request.num_tokens - request.num_cut
        size = min(self.config.sized(request.chunk_size or self.config.chunk_size, memory_pressure), num_left)
        if max_tokens is not None and max_tokens < min(self.config.min_chunk_size, size):
            return None
        return self._cut(request, size if max_tokens is None else min(size, max_tokens))

    def start_chunk(self, chunk_id: ChunkId) -> PrefillChunk[R]:
        """Records that a scheduled chunk runs now. Raises ChunkStateError where it is not scheduled."""
        chunk = self._find_chunk(chunk_id, ChunkState.SCHEDULED)
        chunk.state, chunk.started_s = ChunkState.RUNNING, self._clock()
        return chunk

    def go_on(self, chunk_id: ChunkId) -> None:
        """Lets the next chunk of a prompt be cut while this one runs: the device will run them in this order.

        It is due later by what this one takes. ChunkStateError where that does not run, or was gone on from before.
        """
        chunk = self._find_chunk(chunk_id, ChunkState.RUNNING)
        request = chunk.sequence
        if chunk is not request.chunk:
            raise ChunkStateError(f"chunk {chunk_id} of request {request.request_id!r} was gone on from before.")
        request.begun, request.chunk = (*request.begun, chunk), None
        request.due_s += chunk.num_tokens * self.config.token_s

    def complete_chunk(self, chunk_id: ChunkId, output: Any = None, kv_cache: Any = None) -> bool:
        """Records that a running chunk is done, and returns whether its whole prompt is.

        Kept are `output`, what it gave, for `merge_chunks`, and `kv_cache`, what holds the keys and values up to here.
        ChunkStateError where it does not run, or one before it does.
        """
        chunk = self._find_chunk(chunk_id, ChunkState.RUNNING)
        request = chunk.sequence
        if request.begun and chunk is not request.begun[0]:
            raise ChunkStateError(f"chunk {chunk_id} of request {request.request_id!r} has one before it that runs.")
        if chunk is request.chunk:
            self.go_on(chunk_id)
        chunk.state, chunk.output = ChunkState.COMPLETED, output
        request.begun, request.num_done = request.begun[1:], chunk.end
        request.num_chunks += 1
        request.num_failures, request.error = 0, None
        request.completed += [] if output is None else [chunk]
        request.kv_cache = request.kv_cache if kv_cache is None else kv_cache
        self._metrics.completed_chunks += 1
        self._metrics.completed_tokens += chunk.num_tokens
        self._metrics.completed_requests += request.is_complete
        self._metrics.run_s += self._clock() - chunk.started_s
        return request.is_complete

    def fail_chunk(self, chunk_id: ChunkId, error: str | BaseException) -> bool:
        """Records that a chunk failed, and returns whether its prompt is tried again after the last completed chunk.

        What runs behind it is taken back with it. After `max_retries` tries more the prompt has failed as a whole.
        ChunkStateError if the chunk is not under way.
        """
        chunk = self._find_chunk(chunk_id, ChunkState.SCHEDULED, ChunkState.RUNNING)
        request = chunk.sequence
        request.num_failures += 1
        request.error = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        request.has_failed = request.num_failures > self.config.max_retries
        request.drop_chunks(ChunkState.FAILED if request.has_failed else ChunkState.PENDING)
        self._metrics.failed_chunks += 1
        self._metrics.failed_requests += request.has_failed
        return not request.has_failed

    def preempt(self, request_id: Hashable) -> None:
        """Sets a prompt back to its first token: what was done of it is lost, and what its chunks still give is too.

        Raises ChunkStateError where it is unknown, complete or has failed.
        """
        request = self._find_unfinished(request_id, "preempted")
        request.drop_chunks(ChunkState.PENDING)
        request.num_done = request.num_cached = request.num_chunks = 0
        request.completed, request.kv_cache, request.due_s = [], None, request.turn_s
        self._metrics.preemptions += 1

    def skip_cached(self, request_id: Hashable, num_cached_tokens: int) -> None:
        """Counts tokens at the start of a prompt as done, since what later ones read of them was found in a cache.

        Raises ChunkStateError where the prompt is unknown, complete or has failed, or a chunk of it is under way;
        InvalidRequestError where they are all tokens of the prompt: the last one must run.
        """
        request = self._find_unfinished(request_id, "skipped over")
        self._ensure_idle(request)
        if num_cached_tokens >= request.num_tokens:
            reason = f"{num_cached_tokens} cannot be skipped, since the last one must run."
            message = f"request {request_id!r} has {request.num_tokens} tokens; {reason}"
            raise InvalidRequestError(message, param="num_cached_tokens")
        num_skipped = max(num_cached_tokens - request.num_done, 0)
        request.num_done += num_skipped
        request.num_cached += num_skipped
        self._metrics.cached_tokens += num_skipped

    def remove_request(self, request_id: Hashable) -> bool:
        """Forgets a prompt wherever it stands, with its chunks, and returns whether it was known."""
        if (request := self.requests.pop(request_id, None)) is not None:
            request.status = Status.ENDED
            request.drop_chunks(ChunkState.CANCELLED)
        return request is not None

    def cancel_request(self, request_id: Hashable) -> bool:
        """Ends a prompt and forgets it; returns whether it was known. See `remove_request`."""
        request = self.requests.get(request_id)
        self._metrics.cancelled_requests += request is not None and not (request.is_complete or request.has_failed)
        return self.remove_request(request_id)

    def statistics(self) -> ChunkMetrics:
        """Returns the counts, as they are now."""
        num_running = sum(len(r.begun) + (r.chunk is not None) for r in self.requests.values())
        return msgspec.structs.replace(self._metrics, num_requests=len(self.requests), num_running_chunks=num_running)

    def _cut(self, request: R, size: int) -> PrefillChunk[R]:
        start, index = request.num_cut, request.num_chunks + len(request.begun)
        end = min(start + size, request.num_tokens)
        request.chunk = PrefillChunk(request, start, end, index, ChunkState.SCHEDULED)
        return request.chunk

    def _find(self, request_id: Hashable) -> R:
        if (request := self.requests.get(request_id)) is None:
            raise ChunkStateError(f"request {request_id!r} is unknown; it may have been cancelled or removed.")
        return request

    def _find_unfinished(self, request_id: Hashable, action: str) -> R:
        request = self._find(request_id)
        if request.has_failed or request.is_complete:
            raise ChunkStateError(f"request {request_id!r} is {request.state}; it cannot be {action}.")
        return request

    def _find_chunk(self, chunk_id: ChunkId, *states: ChunkState) -> PrefillChunk[R]:
        request_id, start = chunk_id
        request = self._find(request_id)
        under_way = request.begun if request.chunk is None else (*request.begun, request.chunk)
        if (chunk := next((chunk for chunk in under_way if chunk.start == start), None)) is not None:
            if (found := chunk.state) in states:
                return chunk
        elif start < request.num_done:
            found = ChunkState.COMPLETED
        else:
            found = ChunkState.FAILED if request.has_failed else ChunkState.PENDING
        needed = " or ".join(states)
        raise ChunkStateError(f"chunk {chunk_id} of request {request_id!r} is {found}; it must be {needed}.")

    def _ensure_idle(self, request: R) -> None:
        if (chunk := request.begun[0] if request.begun else request.chunk) is not None:
            raise ChunkStateError(f"chunk {chunk.chunk_id} of request {request.request_id!r} is still {chunk.state}.")
