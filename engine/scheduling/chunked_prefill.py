"""Chunked prefill: long sequences run in chunks, one forward each. Plain Python without torch.

Requires a causal model: a chunk needs the keys and values, or states, of the chunks before it. ChunkSizeController
limits the tokens of all chunks of a forward. ChunkedPrefillManager cuts sequences into chunks. This module does not
manage memory or devices.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..protocol.config import ChunkedPrefillConfig
from ..protocol.errors import InvalidRequestError
from ..protocol.messages import ChunkMetrics, TokenizedInput
from ..protocol.params import PoolingParams
from ..protocol.tasks import PriorityLevel
from .sequence import ChunkId, ChunkState, ChunkStateError, InputSequence, PrefillChunk, Request

_BUSY_STEP_S: Final = 0.15
"""Seconds. Target time of the chunks of a forward while other sequences wait."""
_IDLE_STEP_S: Final = 1.0
"""Seconds. Target time while no other sequence waits. A new sequence waits for half of it on average."""
_OLD_SHARE: Final = 0.5
"""Share of the old value in the running means."""
_BUSY_MIN_TOKENS: Final = 128
"""Tokens. Smaller chunks take about as long, because each forward has a fixed cost."""
_IDLE_MIN_TOKENS: Final = 512
_ROUND_TO: Final = 16


class ChunkSizeController:
    """Sizes chunks, and forwards with or without chunks, so that a forward takes about a fixed time.

    The cost of a token grows with its context and differs between machines. Chunks are small while other sequences
    wait. Otherwise they are large, so that the pauses between forwards cost little.

    Args:
        max_tokens: Maximum number of tokens in all chunks of a forward: `chunk_size` of ChunkedPrefillConfig.
        is_dynamic: Adapt to the times of past forwards. Otherwise sizes are fixed.

    Attributes:
        seconds_per_token: Seconds per token in forwards of at least half of `max_tokens`; None before the first one.
    """

    def __init__(self, max_tokens: int, *, is_dynamic: bool = True) -> None:
        self.seconds_per_token: float | None = None
        self._max_tokens = max_tokens
        self._is_dynamic = is_dynamic
        self._chunk_seconds_per_token: float | None = None  # seconds per token in chunks
        self._short_seconds_per_token: float | None = None  # seconds per token in sequences that run whole

    def max_chunk_tokens(self, token_budget: int, config: ChunkedPrefillConfig, *, others_wait: bool) -> int:
        """Returns the maximum number of tokens in all chunks of a forward, at least the minimum chunk size."""
        fixed = token_budget // 2 if others_wait else token_budget
        num_tokens = self._timed_tokens(others_wait=others_wait) if config.is_dynamic else fixed
        return min(max(num_tokens, config.min_chunk_size), token_budget)

    def max_forward_tokens(self, token_budget: int) -> int:
        """Returns the maximum number of tokens in the next forward, which is less than the budget on a slow device."""
        num_tokens = max(int(_IDLE_STEP_S / (self.seconds_per_token or _IDLE_STEP_S)), _IDLE_MIN_TOKENS)
        return min(num_tokens, token_budget) if self._is_dynamic else token_budget

    def record(self, chunk_tokens: int, short_tokens: int, step_s: float) -> None:
        """Records the time of a forward. See ForwardTime."""
        num_tokens = chunk_tokens + short_tokens
        if 2 * num_tokens >= self.max_forward_tokens(self._max_tokens):
            self.seconds_per_token = _mean(self.seconds_per_token, max(step_s / num_tokens, 1e-9))
        if not chunk_tokens:
            self._short_seconds_per_token = _mean(self._short_seconds_per_token, step_s / max(short_tokens, 1))
            return
        others_s = short_tokens * (self._short_seconds_per_token or 0.0)
        # The time of whole sequences is an estimate, so chunks count for at least half of their share of the tokens.
        chunk_s = max(step_s - others_s, step_s * chunk_tokens / (2 * num_tokens))
        self._chunk_seconds_per_token = _mean(self._chunk_seconds_per_token, max(chunk_s / chunk_tokens, 1e-9))

    def _timed_tokens(self, *, others_wait: bool) -> int:
        if self._chunk_seconds_per_token is None:
            return max(self._max_tokens // 4, 1)
        step_s, min_tokens = (_BUSY_STEP_S, _BUSY_MIN_TOKENS) if others_wait else (_IDLE_STEP_S, _IDLE_MIN_TOKENS)
        num_tokens = int(step_s / self._chunk_seconds_per_token)
        return min(max(num_tokens - num_tokens % _ROUND_TO, min_tokens), self._max_tokens)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else _OLD_SHARE * old + (1 - _OLD_SHARE) * new


def _by_priority(sequence: InputSequence) -> int:
    return sequence.request.priority


class ChunkedPrefillManager:
    """Splits sequences into chunks and schedules the chunks.

    The Scheduler adds a sequence with `add`. `schedule_chunk` returns its chunks. The Scheduler reports a chunk with
    `start`, and later with `complete` or `fail`. Callers without a Scheduler use the methods at the end of the class.
    Not thread-safe: the caller uses one thread or holds a lock.
    Invariants: the chunks of a sequence cover it without gap or overlap. They run in order, and one at a time unless
    `allow_next_chunk` allows the next.

    Args:
        config: Size of chunks; None takes the defaults.
        tokenize_fn: Converts a text to token ids, for `create_chunks_from_prompt`.
        chunk_size: Tokens of a chunk, instead of `config`. ValueError if both are given, or if below 1.
        order: Sort key of a sequence: the smallest runs first. Equal ones run in order of arrival. Default: the
            priority.

    Attributes:
        config: Size of chunks.
        sequences: The sequences by their id.
    """

    def __init__(
        self,
        config: ChunkedPrefillConfig | None = None,
        tokenize_fn: Callable[[str], Sequence[int]] | None = None,
        *,
        chunk_size: int | None = None,
        order: Callable[[InputSequence], Any] = _by_priority,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if config is not None and chunk_size is not None:
            raise ValueError("chunk_size is part of config; give one of them.")
        default = ChunkedPrefillConfig() if chunk_size is None else ChunkedPrefillConfig(chunk_size=chunk_size)
        self.config = config or default
        self.sequences: dict[Hashable, InputSequence] = {}
        self._tokenize = tokenize_fn
        self._order = order
        self._clock = clock
        self._metrics = ChunkMetrics()

    def should_chunk(self, token_count: int) -> bool:
        """Whether a sequence of `token_count` tokens should run in chunks."""
        threshold = self.config.threshold
        return token_count > (self.config.chunk_size if threshold is None else threshold)

    def add(self, sequence: InputSequence) -> None:
        """Adds a sequence, which is not empty. Raises ChunkStateError if its id is in use."""
        if sequence.sequence_id in self.sequences:
            raise ChunkStateError(f"sequence {sequence.sequence_id!r} was added already.")
        self.sequences[sequence.sequence_id] = sequence

    def skip_cached(self, sequence_id: Hashable, num_cached_tokens: int) -> None:
        """Skips tokens at the start of a sequence because their keys and values are cached.

        Raises:
            ChunkStateError: The sequence is unknown, complete or has failed, or a chunk of it is in flight.
            InvalidRequestError: `num_cached_tokens` includes the last token, which must run.
        """
        sequence = self._find_unfinished(sequence_id)
        self._check_idle(sequence)
        if num_cached_tokens >= sequence.num_tokens:
            message = f"sequence {sequence_id!r} has {sequence.num_tokens} tokens; the last one must run."
            raise InvalidRequestError(message, param="num_cached_tokens")
        self._metrics.cached_tokens += max(num_cached_tokens - sequence.num_computed_tokens, 0)
        sequence.num_computed_tokens = max(num_cached_tokens, sequence.num_computed_tokens)

    def peek(self) -> InputSequence | None:
        """Returns the next sequence to run; None if no chunk may run."""
        return min(
            (sequence for sequence in self.sequences.values() if sequence.is_ready), key=self._order, default=None
        )

    def schedule_chunk(self, max_tokens: int | None = None, *, memory_pressure: float = 0.0) -> PrefillChunk | None:
        """Cuts and returns the next chunk; None if no chunk may run, or it needs more than `max_tokens`.

        Args:
            max_tokens: Most tokens of the chunk. Only the last chunk of a sequence is smaller than the smallest chunk
                size.
            memory_pressure: Share of a full chunk that does not fit into memory, 0 to 1; else InvalidRequestError.
        """
        sequence = self.peek()
        if sequence is None:
            return None
        num_remaining = sequence.num_tokens - sequence.num_scheduled_tokens
        size = min(self.config.sized(sequence.chunk_size or self.config.chunk_size, memory_pressure), num_remaining)
        if max_tokens is not None and max_tokens < min(self.config.min_chunk_size, size):
            return None
        return self._next_chunk(sequence, size if max_tokens is None else min(size, max_tokens))

    def start(self, chunk: PrefillChunk) -> None:
        """Records the start of a chunk. Raises ChunkStateError if it is not scheduled."""
        _check_state(chunk, ChunkState.SCHEDULED)
        chunk.state = ChunkState.RUNNING
        chunk.started_s = self._clock()

    def allow_next_chunk(self, chunk: PrefillChunk) -> None:
        """Allows the next chunk of a sequence while this one runs, on a device that runs forwards in order.

        Raises:
            ChunkStateError: The chunk does not run, or the next one was allowed before.
        """
        _check_state(chunk, ChunkState.RUNNING)
        sequence = chunk.sequence
        if chunk is not sequence.chunk:
            raise ChunkStateError(
                f"chunk {chunk.chunk_id} of sequence {sequence.sequence_id!r} has been followed already."
            )
        sequence.earlier_chunks = sequence.chunks_in_flight
        sequence.chunk = None

    def complete(self, chunk: PrefillChunk) -> bool:
        """Records the end of a running chunk. Returns whether its sequence is complete.

        Raises:
            ChunkStateError: The chunk does not run, or an earlier chunk of its sequence still runs.
        """
        _check_state(chunk, ChunkState.RUNNING)
        sequence = chunk.sequence
        if chunk is not sequence.chunks_in_flight[0]:
            raise ChunkStateError(
                f"chunk {chunk.chunk_id} of sequence {sequence.sequence_id!r} runs after another one."
            )
        if chunk is sequence.chunk:
            sequence.chunk = None
        sequence.earlier_chunks = sequence.earlier_chunks[1:]
        chunk.state = ChunkState.COMPLETED
        sequence.num_computed_tokens = chunk.end
        sequence.num_failures = 0
        sequence.error = None
        self._metrics.completed_chunks += 1
        self._metrics.completed_tokens += chunk.num_tokens
        self._metrics.completed_sequences += sequence.is_complete
        self._metrics.run_s += self._clock() - chunk.started_s
        return sequence.is_complete

    def fail(self, chunk: PrefillChunk, error: str | BaseException) -> bool:
        """Records the failure of a chunk. Returns whether its sequence will be retried after the last completed chunk.

        Drops all chunks of the sequence in flight. After `max_retries` retries the sequence has failed.

        Raises:
            ChunkStateError: The chunk is not in flight.
        """
        _check_state(chunk, ChunkState.SCHEDULED, ChunkState.RUNNING)
        sequence = chunk.sequence
        sequence.num_failures += 1
        sequence.error = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        sequence.has_failed = sequence.num_failures > self.config.max_retries
        sequence.drop_chunks(ChunkState.FAILED if sequence.has_failed else ChunkState.PENDING)
        self._metrics.failed_chunks += 1
        self._metrics.failed_sequences += sequence.has_failed
        return not sequence.has_failed

    def preempt(self, sequence_id: Hashable) -> None:
        """Removes a sequence and resets it to its first token. `add` runs it again.

        Raises:
            ChunkStateError: The sequence is unknown, complete or has failed.
        """
        sequence = self._find_unfinished(sequence_id)
        sequence.reset()
        del self.sequences[sequence_id]
        self._metrics.preemptions += 1

    def remove(self, sequence_id: Hashable) -> bool:
        """Removes a sequence, and cancels it if it is neither complete nor failed. Returns False for an unknown id."""
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is None:
            return False
        self._metrics.cancelled_sequences += not (sequence.is_complete or sequence.has_failed)
        sequence.drop_chunks(ChunkState.CANCELLED)
        return True

    def statistics(self) -> ChunkMetrics:
        """Returns the counters and gauges as they are now."""
        num_chunks = sum(len(sequence.chunks_in_flight) for sequence in self.sequences.values())
        return msgspec.structs.replace(
            self._metrics, num_running_sequences=len(self.sequences), num_running_chunks=num_chunks
        )

    def _next_chunk(self, sequence: InputSequence, size: int) -> PrefillChunk:
        start = sequence.num_scheduled_tokens
        sequence.chunk = PrefillChunk(sequence, start, min(start + size, sequence.num_tokens), ChunkState.SCHEDULED)
        return sequence.chunk

    def _find(self, sequence_id: Hashable) -> InputSequence:
        if (sequence := self.sequences.get(sequence_id)) is None:
            raise ChunkStateError(f"sequence {sequence_id!r} is unknown; it may have been removed.")
        return sequence

    def _find_unfinished(self, sequence_id: Hashable) -> InputSequence:
        sequence = self._find(sequence_id)
        if sequence.has_failed or sequence.is_complete:
            raise ChunkStateError(f"sequence {sequence_id!r} {'has failed' if sequence.has_failed else 'is complete'}.")
        return sequence

    def _check_idle(self, sequence: InputSequence) -> None:
        if sequence.chunks_in_flight:
            chunk = sequence.chunks_in_flight[0]
            raise ChunkStateError(
                f"chunk {chunk.chunk_id} of sequence {sequence.sequence_id!r} is still {chunk.state}."
            )

    # Only library callers use the methods below. docs/internals/names.md explains their names.
    # Their `request_id` is the id of a sequence.

    @property
    def requests(self) -> Mapping[Hashable, StandaloneSequence]:
        """The specification's name of `sequences`."""
        return cast("Mapping[Hashable, StandaloneSequence]", self.sequences)

    def create_chunks(
        self,
        request_id: Hashable,
        prompt_tokens: int | Sequence[int] | NDArray[np.int32],
        priority: int = PriorityLevel.NORMAL,
        chunk_size: int | None = None,
        memory_pressure: float = 0.0,
    ) -> list[PrefillChunk]:
        """Adds a sequence and returns its expected chunks.

        The returned chunks stay PENDING. `schedule_chunk` and `iterate_chunks` return the chunks to run, which are
        shorter if memory is short.

        Args:
            request_id: Id of the sequence.
            prompt_tokens: Token ids (not copied) or their number.
            priority: A ChunkPriority or any other integer; lower runs first.
            chunk_size: Tokens of a chunk while memory is free; None takes the configured size.
            memory_pressure: Share of a full chunk that does not fit into memory, 0 to 1.

        Raises:
            InvalidRequestError: The id is in use, the sequence is empty, or an argument is out of range.

        >>> from penstock.engine.scheduling import ChunkedPrefillManager
        >>> manager = ChunkedPrefillManager(chunk_size=512)
        >>> chunks = manager.create_chunks(request_id="req1", prompt_tokens=2048)
        >>> for chunk in manager.iterate_chunks("req1"):
        ...     is_done = manager.complete_chunk(chunk.chunk_id, output=list(chunk.tokens))
        >>> len(chunks), len(manager.merge_chunks("req1"))
        (4, 2048)
        """
        tokens = range(prompt_tokens) if isinstance(prompt_tokens, int) else prompt_tokens
        bounds = self.compute_chunk_boundaries(len(tokens), chunk_size, memory_pressure)
        if not bounds:
            raise InvalidRequestError(f"request {request_id!r} has no tokens.", param="prompt_tokens")
        if request_id in self.sequences:
            raise InvalidRequestError(f"request {request_id!r} was added already.", param="request_id")
        sequence = StandaloneSequence(
            sequence_id=request_id,
            tokens=cast("TokenizedInput", tokens),  # the manager only takes slices of it
            num_tokens=len(tokens),
            request=Request(0, PoolingParams(), priority=priority),
            chunk_size=bounds[0][1],
        )
        self.add(sequence)
        return [PrefillChunk(sequence, start, end) for start, end in bounds]

    def create_chunks_from_prompt(
        self, request_id: Hashable, prompt: str, priority: int = PriorityLevel.NORMAL, chunk_size: int | None = None
    ) -> list[PrefillChunk]:
        """Tokenizes a text and adds it; see `create_chunks`. InvalidRequestError without a `tokenize_fn`."""
        if self._tokenize is None:
            raise InvalidRequestError("a text cannot be tokenized: the manager has no tokenize_fn.", param="prompt")
        return self.create_chunks(request_id, self._tokenize(prompt), priority, chunk_size)

    def compute_chunk_boundaries(
        self, total_tokens: int, chunk_size: int | None = None, memory_pressure: float = 0.0
    ) -> list[tuple[int, int]]:
        """Returns start and end (exclusive) of each chunk of a sequence. The last chunk may be shorter.

        Raises:
            InvalidRequestError: An argument is out of range; see `create_chunks`.
        """
        if total_tokens < 0:
            raise InvalidRequestError(f"total_tokens is {total_tokens}; it must be 0 or more.", param="total_tokens")
        size = self.config.sized(self.config.chunk_size if chunk_size is None else chunk_size, memory_pressure)
        return [(start, min(start + size, total_tokens)) for start in range(0, total_tokens, size)]

    def iterate_chunks(self, request_id: Hashable) -> Iterator[PrefillChunk]:
        """Starts and yields the chunks of one sequence in order, until it is complete or removed.

        Raises:
            ChunkStateError: The sequence is unknown or has failed, or the last chunk was neither completed nor failed.
        """
        sequence = self._find(request_id)
        while self.sequences.get(request_id) is sequence and not sequence.is_complete:
            if sequence.has_failed:
                raise ChunkStateError(f"sequence {request_id!r} has failed: {sequence.error}")
            self._check_idle(sequence)
            chunk = self._next_chunk(sequence, sequence.chunk_size or self.config.chunk_size)
            self.start(chunk)
            yield chunk

    def start_chunk(self, chunk_id: ChunkId) -> PrefillChunk:
        """Records the start of a chunk, and returns it; see `start`."""
        chunk = self._find_chunk(chunk_id)
        self.start(chunk)
        return chunk

    def complete_chunk(self, chunk_id: ChunkId, output: Any = None, kv_cache: Any = None) -> bool:
        """Records the end of a running chunk; see `complete`.

        Args:
            chunk_id: Id of the chunk.
            output: Output of the chunk, stored for `merge_chunks`; None: nothing.
            kv_cache: Keys and values so far, stored in the sequence for the next chunk; None: nothing.
        """
        chunk = self._find_chunk(chunk_id)
        is_complete = self.complete(chunk)
        sequence = self.requests[chunk.sequence_id]
        if output is not None:
            sequence.outputs += (output,)
        if kv_cache is not None:
            sequence.kv_cache = kv_cache
        return is_complete

    def fail_chunk(self, chunk_id: ChunkId, error: str | BaseException) -> bool:
        """Records the failure of a chunk; see `fail`."""
        return self.fail(self._find_chunk(chunk_id), error)

    def merge_chunks(self, request_id: Hashable) -> Any:
        """Returns the outputs of a complete sequence in order. Joins lists and numpy arrays; returns others as a list.

        Raises:
            ChunkStateError: The sequence is unknown or not complete.
        """
        sequence = self._find(request_id)
        if not sequence.is_complete:
            done = f"{sequence.num_computed_tokens} of {sequence.num_tokens} tokens are completed"
            raise ChunkStateError(f"sequence {request_id!r} is not complete: {done}.")
        outputs = self.requests[request_id].outputs
        if outputs and all(isinstance(output, np.ndarray) for output in outputs):
            return np.concatenate(outputs)
        return list(itertools.chain(*outputs)) if all(isinstance(output, list) for output in outputs) else list(outputs)

    def remove_request(self, request_id: Hashable) -> bool:
        """Removes a sequence; see `remove`."""
        return self.remove(request_id)

    def _find_chunk(self, chunk_id: ChunkId) -> PrefillChunk:
        sequence_id, start = chunk_id
        for chunk in self._find(sequence_id).chunks_in_flight:
            if chunk.start == start:
                return chunk
        raise ChunkStateError(f"chunk {chunk_id} of sequence {sequence_id!r} is not in flight.")


@dataclass(slots=True, eq=False, kw_only=True)
class StandaloneSequence(InputSequence):
    """A sequence of a caller without a Scheduler. Its `tokens` are token ids, or a range of positions.

    Attributes:
        outputs: Outputs of its completed chunks.
        kv_cache: Argument of `complete_chunk` for the last chunk.
    """

    outputs: tuple[Any, ...] = field(default=(), repr=False)
    kv_cache: Any = field(default=None, repr=False)

    def reset(self) -> None:
        """Resets the sequence to its first token."""
        InputSequence.reset(self)
        self.outputs = ()
        self.kv_cache = None


def _check_state(chunk: PrefillChunk, *states: ChunkState) -> None:
    found = chunk.state if chunk.sequence.is_in_flight(chunk) else "not in flight"
    if found not in states:
        raise ChunkStateError(
            f"chunk {chunk.chunk_id} of sequence {chunk.sequence_id!r} is {found}; it must be {' or '.join(states)}."
        )


def create_prefill_manager(
    chunk_size: int = 512, threshold: int | None = None, dynamic: bool = True
) -> ChunkedPrefillManager:
    """Returns a manager that splits sequences of more than `threshold` tokens (None: `chunk_size`) into chunks.

    With `dynamic`, chunks are smaller while memory is short.
    """
    return ChunkedPrefillManager(ChunkedPrefillConfig(chunk_size=chunk_size, threshold=threshold, is_dynamic=dynamic))


def chunk_prompt(tokens: Sequence[int], chunk_size: int) -> list[Sequence[int]]:
    """Cuts tokens into chunks; the last may be shorter. Raises InvalidRequestError if `chunk_size` is below 1."""
    size = ChunkedPrefillConfig().sized(chunk_size, 0.0)
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]
