"""The methods of ChunkedPrefillManager for callers that run a model without a Scheduler. Requests do not use them.

The specification names the methods and their parameters. It calls a sequence a request: `request_id` is the id of a
sequence.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..protocol.config import ChunkedPrefillConfig
from ..protocol.errors import InvalidRequestError
from ..protocol.messages import TokenizedInput
from ..protocol.params import PoolingParams
from ..protocol.tasks import ChunkPriority
from .sequence import ChunkId, ChunkStateError, InputSequence, PrefillChunk, Request, SequenceStatus


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


class StandalonePrefill(ABC):
    """Base class of ChunkedPrefillManager with the methods for callers without a Scheduler.

    Attributes:
        config: Size of chunks.
        sequences: The sequences by their id.
    """

    config: ChunkedPrefillConfig
    sequences: dict[Hashable, InputSequence]

    def __init__(self, tokenize_fn: Callable[[str], Sequence[int]] | None) -> None:
        self._tokenize = tokenize_fn

    @property
    def requests(self) -> Mapping[Hashable, StandaloneSequence]:
        """The specification's name of `sequences`."""
        return cast("Mapping[Hashable, StandaloneSequence]", self.sequences)

    def create_chunks(
        self,
        request_id: Hashable,
        prompt_tokens: int | Sequence[int] | NDArray[np.int32],
        priority: int = ChunkPriority.NORMAL,
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
        self, request_id: Hashable, prompt: str, priority: int = ChunkPriority.NORMAL, chunk_size: int | None = None
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
        while sequence.status is SequenceStatus.RUNNING and not sequence.is_complete:
            if sequence.has_failed:
                raise ChunkStateError(f"sequence {request_id!r} has failed: {sequence.error}")
            self._check_idle(sequence)
            size = sequence.chunk_size or self.config.chunk_size
            yield self.start_chunk(self._next_chunk(sequence, size).chunk_id)

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

    def _store_output(self, sequence: InputSequence, output: Any, kv_cache: Any) -> None:
        """Stores the output of a completed chunk, and its keys and values for the next one; None: nothing."""
        assert isinstance(sequence, StandaloneSequence), "only create_chunks adds sequences with outputs"
        if output is not None:
            sequence.outputs += (output,)
        if kv_cache is not None:
            sequence.kv_cache = kv_cache

    @abstractmethod
    def add(self, sequence: InputSequence) -> None:
        """Adds a sequence."""

    @abstractmethod
    def remove(self, sequence_id: Hashable) -> bool:
        """Removes a sequence. Returns False for an unknown id."""

    @abstractmethod
    def start_chunk(self, chunk_id: ChunkId) -> PrefillChunk:
        """Records the start of a chunk."""

    @abstractmethod
    def _next_chunk(self, sequence: InputSequence, size: int) -> PrefillChunk: ...

    @abstractmethod
    def _find(self, sequence_id: Hashable) -> InputSequence: ...

    @abstractmethod
    def _check_idle(self, sequence: InputSequence) -> None: ...


def chunk_prompt(tokens: Sequence[int], chunk_size: int) -> list[Sequence[int]]:
    """Cuts tokens into chunks; the last may be shorter. Raises InvalidRequestError if `chunk_size` is below 1."""
    size = ChunkedPrefillConfig().sized(chunk_size, 0.0)
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]
