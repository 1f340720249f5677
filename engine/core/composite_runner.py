"""The Runner of a model with several parts: static embeddings for queries, or an encoder of images.

sentence-transformers calls a model with static embeddings for queries a Router.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..protocol.batch_outputs import BatchOutputs, HostArray
from ..scheduling import Allocation, InputSequence, PrefillChunk
from .runner import CompletedForward, Forward, ForwardTime, Runner


class _Part(NamedTuple):
    """The forward of one part of a batch.

    Attributes:
        forward: The started forward of one runner.
        indices: Indices of its sequences in the batch.
    """

    forward: Forward
    indices: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class _CompositeForward:
    """The forwards of one batch.

    Attributes:
        parts: At least two.
    """

    parts: list[_Part]

    @property
    def is_done(self) -> bool:
        """Whether the forwards of all parts have ended."""
        return all(part.forward.is_done for part in self.parts)

    def outputs(self) -> BatchOutputs:
        """Waits for all parts. Raises the error of the first part that failed."""
        results = [(part.forward.outputs(), part.indices) for part in self.parts]
        is_finite = np.empty(sum(outputs.num_seqs for outputs, _ in results), np.bool_)
        arrays: tuple[HostArray, ...] = ()
        for outputs, indices in results:
            is_finite[indices] = outputs.is_finite
            arrays += _at(outputs.arrays, indices)
        return BatchOutputs(len(is_finite), arrays, is_finite)


def _at(arrays: Sequence[HostArray], indices: list[int]) -> tuple[HostArray, ...]:
    """Returns the results of a part of a batch as results of the batch. `indices`: the sequences of the part."""
    moved = []
    for array in arrays:
        own = range(len(indices)) if array.indices is None else array.indices
        moved.append(replace(array, indices=[indices[i] for i in own]))
    return tuple(moved)


class CompositeRunner(Runner):
    """Runs queries or images with other models than the other sequences. See Runner.

    The parts share the lanes (threads) of one C library. Static embeddings run at once, and take no device time.

    Args:
        documents: Runs all other sequences.
        queries: Runs sequences with PoolingParams.is_query; None: `documents` runs them.
        images: Runs sequences with images; None: there are none.
    """

    def __init__(self, documents: Runner, *, queries: Runner | None = None, images: Runner | None = None) -> None:
        self._documents = documents
        self._queries = queries
        self._images = images
        self._runners = [runner for runner in (queries, images, documents) if runner is not None]
        self.info = replace(
            documents.info,
            query_model=None if queries is None else queries.info,
            image=None if images is None else images.info,
        )
        self.tokenizer = replace(documents.tokenizer, query_tokenizer=None if queries is None else queries.tokenizer)
        self.sequence_pool = documents.sequence_pool
        self.max_forwards = documents.max_forwards
        self.is_ordered = documents.is_ordered
        self.limits = documents.limits

    def warm_up(self) -> None:
        """Warms up all models. The limits are those of `documents`."""
        for runner in self._runners:
            runner.warm_up()
        self.limits = self._documents.limits

    @property
    def has_capacity(self) -> bool:
        """Whether `documents` has capacity: all parts share its lanes."""
        return self._documents.has_capacity

    def set_wakeup_fd(self, fd: int | None) -> None:
        """Sets the descriptor of `documents`. All parts run in its C library."""
        self._documents.set_wakeup_fd(fd)

    def begin(self, chunks: Sequence[PrefillChunk]) -> Forward:
        """Starts a forward of each model that has sequences in the batch. Queries have ended when it returns."""
        routes: dict[Runner, list[int]] = {}
        for index, chunk in enumerate(chunks):
            routes.setdefault(self._runner_of(chunk), []).append(index)
        if len(routes) == 1:
            return self._begin(next(iter(routes)), chunks)
        return _CompositeForward(
            [_Part(self._begin(runner, [chunks[i] for i in indices]), indices) for runner, indices in routes.items()]
        )

    def preempt(self, sequence: InputSequence, allocation: Allocation) -> None:
        """Only `documents` has sequences in chunks."""
        self._documents.preempt(sequence, allocation)

    def drop_states(self, sequences: Sequence[InputSequence]) -> None:
        """Only `documents` has sequences in chunks."""
        self._documents.drop_states(sequences)

    def free_tokens(self) -> int | None:
        """Returns the tokens that `documents` has memory for."""
        return self._documents.free_tokens()

    def take_times(self) -> list[ForwardTime]:
        """Returns the times of the forwards of all models."""
        return [time for runner in self._runners for time in runner.take_times()]

    def _begin(self, runner: Runner, chunks: Sequence[PrefillChunk]) -> Forward:
        """Starts a part of a batch. Queries end at once: nothing would report their end to the loop."""
        return CompletedForward(runner.execute(chunks)) if runner is self._queries else runner.begin(chunks)

    def _runner_of(self, chunk: PrefillChunk) -> Runner:
        if self._images is not None and chunk.sequence.tokens.images:
            return self._images
        if self._queries is not None and chunk.sequence.request.params.is_query:
            return self._queries
        return self._documents
