"""Chunked prefill: long prompts in chunks that are cut as their turn comes. Plain Python without torch.

>>> manager = ChunkedPrefillManager(chunk_size=512)
>>> chunks = manager.create_chunks(request_id="req1", prompt_tokens=2048)
>>> for chunk in manager.iterate_chunks("req1"):
...     is_done = manager.complete_chunk(chunk.chunk_id, output=list(chunk.tokens))
>>> len(chunks), len(manager.merge_chunks("req1"))
(4, 2048)
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..protocol.config import ChunkedPrefillConfig
from ..protocol.errors import InvalidRequestError
from ..protocol.tasks import ChunkPriority
from .chunk_queue import ChunkQueue, ChunkStateError
from .sequence import ChunkedRequest, PrefillChunk, R, Status


class ChunkedPrefillManager(ChunkQueue[R]):
    """A ChunkQueue that can be used without a scheduler as well.

    What requests to the server pass is in ChunkQueue. The methods here take prompts in, hand out their chunks and join
    what these gave, for whoever runs a model by hand.

    Args:
        config: How prompts are cut; None takes the defaults.
        tokenize_fn: Text to token ids, for `create_chunks_from_prompt`.
        chunk_size: Tokens of a chunk, where this is all there is to say. ValueError beside `config`, or if below 1.
        clock: Seconds. Monotonic time.
    """

    def __init__(
        self,
        config: ChunkedPrefillConfig | None = None,
        tokenize_fn: Callable[[str], Sequence[int]] | None = None,
        *,
        chunk_size: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if config is not None and chunk_size is not None:
            raise ValueError("chunk_size is part of config; give one of them.")
        given = ChunkedPrefillConfig() if chunk_size is None else ChunkedPrefillConfig(chunk_size=chunk_size)
        super().__init__(config or given, clock)
        self._tokenize = tokenize_fn

    def create_chunks(
        self,
        request_id: Hashable,
        prompt_tokens: int | Sequence[int] | NDArray[np.int32],
        priority: int = ChunkPriority.NORMAL,
        chunk_size: int | None = None,
        memory_pressure: float = 0.0,
        *,
        arrival_s: float | None = None,
    ) -> list[PrefillChunk[R]]:
        """Takes in a prompt and returns a forecast of its chunks.

        The chunks that run are cut later, when the prompt is next, and may be shorter if memory is short then. They
        come from `schedule_chunk` or `iterate_chunks`; those of the forecast stay PENDING and cannot be started.

        Raises InvalidRequestError where the name is in use, the prompt is empty, or an argument is out of range.

        Args:
            request_id: Its name.
            prompt_tokens: Token ids, which are not copied, or their number.
            priority: A ChunkPriority or any other level; lower goes first.
            chunk_size: Tokens of a chunk while memory is free; None takes the config's.
            memory_pressure: Share of a full chunk for which there is no memory, 0 to 1.
            arrival_s: Seconds. Time of its arrival by the manager's clock; None takes now.
        """
        prompt = range(prompt_tokens) if isinstance(prompt_tokens, int) else prompt_tokens
        bounds = self.compute_chunk_boundaries(len(prompt), chunk_size, memory_pressure)
        turn_s = (self._clock() if arrival_s is None else arrival_s) + priority * self.config.ageing_s
        size = bounds[0][1] if bounds else 0
        request = cast("R", ChunkedRequest(request_id, prompt, len(prompt), turn_s, turn_s, size))
        self.add(request)
        return [PrefillChunk(request, start, end, index) for index, (start, end) in enumerate(bounds)]

    def create_chunks_from_prompt(
        self, request_id: Hashable, prompt: str, priority: int = ChunkPriority.NORMAL, chunk_size: int | None = None
    ) -> list[PrefillChunk[R]]:
        """Tokenizes a text and takes it in; see `create_chunks`. InvalidRequestError if there is no `tokenize_fn`."""
        if self._tokenize is None:
            raise InvalidRequestError("a text cannot be cut: the manager has no tokenize_fn.", param="prompt")
        return self.create_chunks(request_id, self._tokenize(prompt), priority, chunk_size)

    def compute_chunk_boundaries(
        self, total_tokens: int, chunk_size: int | None = None, memory_pressure: float = 0.0
    ) -> list[tuple[int, int]]:
        """Returns where each chunk of a prompt begins and ends (not included); the last may be shorter.

        Raises InvalidRequestError where an argument is out of range; see `create_chunks` for what they are.
        """
        if total_tokens < 0:
            raise InvalidRequestError(f"total_tokens is {total_tokens}; it must be 0 or more.", param="total_tokens")
        size = self.config.sized(self.config.chunk_size if chunk_size is None else chunk_size, memory_pressure)
        return [(start, min(start + size, total_tokens)) for start in range(0, total_tokens, size)]

    def iterate_chunks(self, request_id: Hashable) -> Iterator[PrefillChunk[R]]:
        """Yields the chunks of one prompt in order, each started, until it is complete or removed.

        Raises ChunkStateError where it is unknown or has failed, or the last chunk was neither completed nor failed.
        """
        request = self._find(request_id)
        while request.status is Status.RUNNING and not request.is_complete:
            if request.has_failed:
                raise ChunkStateError(f"request {request_id!r} has failed: {request.error}")
            self._ensure_idle(request)
            yield self.start_chunk(self._cut(request, request.chunk_size or self.config.chunk_size).chunk_id)

    def merge_chunks(self, request_id: Hashable) -> Any:
        """Returns the outputs of all chunks in order: lists, arrays and torch tensors joined to one, others as a list.

        Raises ChunkStateError where the prompt is unknown or not complete, or some of its chunks gave none.
        """
        request = self._find(request_id)
        if not request.is_complete:
            done = f"{request.num_done} of {request.num_tokens} tokens are completed"
            raise ChunkStateError(f"request {request_id!r} is {request.state}; {done}.")
        outputs = [chunk.output for chunk in request.completed]
        if outputs and len(outputs) < request.num_chunks:
            raise ChunkStateError(f"request {request_id!r}: {request.num_chunks - len(outputs)} chunks have no output.")
        if outputs and all(isinstance(output, np.ndarray) for output in outputs):
            return np.concatenate(outputs)
        torch = sys.modules.get("torch")  # without it no output is a tensor
        if outputs and torch is not None and all(isinstance(output, torch.Tensor) for output in outputs):
            return torch.cat(outputs)
        return list(itertools.chain(*outputs)) if all(isinstance(output, list) for output in outputs) else outputs

    def get_request(self, request_id: Hashable) -> R | None:
        """Returns a prompt, or None where it is unknown."""
        return self.requests.get(request_id)

    def is_complete(self, request_id: Hashable) -> bool:
        """Whether every token of a prompt is done; False where it is unknown."""
        return request_id in self.requests and self.requests[request_id].is_complete

    def get_pending_count(self, request_id: Hashable | None = None) -> int:
        """Returns the number of chunks that wait, of one prompt (0 where it is unknown) or of all."""
        known = [r for r in self.requests.values() if request_id in (None, r.request_id) and not r.has_failed]
        left = ((r, r.num_tokens - r.num_cut) for r in known)
        return sum(-(-num_tokens // (r.chunk_size or self.config.chunk_size)) for r, num_tokens in left)

    def clear(self) -> None:
        """Ends and forgets all prompts; counts of what was done stay."""
        for request_id in list(self.requests):
            self.cancel_request(request_id)

    def get_stats(self) -> dict[str, float]:
        """Returns the counts by name."""
        now = self.statistics()
        means = {"num_pending_chunks": self.get_pending_count(), "mean_chunk_tokens": now.mean_chunk_tokens}
        return msgspec.structs.asdict(now) | means


def create_prefill_manager(
    chunk_size: int = 512, threshold: int | None = None, dynamic: bool = True
) -> ChunkedPrefillManager[ChunkedRequest]:
    """Returns a manager of chunks of `chunk_size` tokens for prompts of more than `threshold` (None: `chunk_size`).

    With `dynamic`, chunks become smaller as memory runs short.
    """
    return ChunkedPrefillManager(ChunkedPrefillConfig(chunk_size=chunk_size, threshold=threshold, is_dynamic=dynamic))


def chunk_prompt(tokens: Sequence[int], chunk_size: int) -> list[Sequence[int]]:
    """Returns the tokens in chunks of `chunk_size`; the last may be shorter. InvalidRequestError if that is below 1."""
    bounds = create_prefill_manager().compute_chunk_boundaries(len(tokens), chunk_size)
    return [tokens[start:end] for start, end in bounds]
