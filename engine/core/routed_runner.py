"""The Runner of a model with a static embedding for queries (a Router of sentence-transformers)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..protocol.batch_outputs import BatchOutputs, HostArray
from ..scheduling import Allocation, InputSequence, PrefillChunk
from .runner import CompletedForward, Forward, ForwardTime, Runner


@dataclass(frozen=True, slots=True, eq=False)
class _RoutedForward:
    """A forward of documents, with the outputs of the queries of the same batch.

    Attributes:
        forward: The forward of the documents.
        documents: Their indices in the batch.
        queries: Outputs of the queries.
        query_indices: Their indices in the batch.
    """

    forward: Forward
    documents: list[int]
    queries: BatchOutputs
    query_indices: list[int]

    @property
    def is_done(self) -> bool:
        """See Forward."""
        return self.forward.is_done

    def outputs(self) -> BatchOutputs:
        """See Forward."""
        documents = self.forward.outputs()
        is_finite = np.empty(documents.num_seqs + self.queries.num_seqs, np.bool_)
        is_finite[self.documents], is_finite[self.query_indices] = documents.is_finite, self.queries.is_finite
        arrays = _at(documents.arrays, self.documents) + _at(self.queries.arrays, self.query_indices)
        return BatchOutputs(len(is_finite), arrays, is_finite)


def _at(arrays: Sequence[HostArray], indices: list[int]) -> tuple[HostArray, ...]:
    """Returns the results of a part of a batch as results of the batch. `indices`: the sequences of the part."""
    return tuple(
        replace(array, indices=indices if array.indices is None else [indices[i] for i in array.indices])
        for array in arrays
    )


class RoutedRunner(Runner):
    """Runs queries and documents with different models. See Runner.

    Queries have no layers: they run at once, and take no device time.

    Args:
        documents: Runs documents.
        queries: Runs queries, which have PoolingParams.is_query.
    """

    def __init__(self, documents: Runner, queries: Runner) -> None:
        self._documents = documents
        self._queries = queries
        self.info = replace(documents.info, query=queries.info)
        self.tokenizer = replace(documents.tokenizer, query=queries.tokenizer)
        self.sequence_pool = documents.sequence_pool
        self.num_lanes = documents.num_lanes
        self.keeps_order = documents.keeps_order
        self.limits = documents.limits

    def warm_up(self) -> None:
        """See Runner."""
        self._queries.warm_up()
        self._documents.warm_up()
        self.limits = self._documents.limits

    @property
    def has_capacity(self) -> bool:
        """See Runner."""
        return self._documents.has_capacity

    def set_wakeup_fd(self, fd: int | None) -> None:
        """See Runner."""
        self._documents.set_wakeup_fd(fd)

    def begin(self, chunks: Sequence[PrefillChunk]) -> Forward:
        """See Runner."""
        query_indices = [i for i, chunk in enumerate(chunks) if chunk.sequence.request.params.is_query]
        if not query_indices:
            return self._documents.begin(chunks)
        queries = self._queries.execute([chunks[i] for i in query_indices])
        if len(query_indices) == len(chunks):
            return CompletedForward(queries)
        is_query = set(query_indices)
        documents = [i for i in range(len(chunks)) if i not in is_query]
        return _RoutedForward(self._documents.begin([chunks[i] for i in documents]), documents, queries, query_indices)

    def preempt(self, sequence: InputSequence, allocation: Allocation) -> None:
        """See Runner."""
        self._documents.preempt(sequence, allocation)

    def forget(self, sequences: Sequence[InputSequence]) -> None:
        """See Runner."""
        self._documents.forget(sequences)

    def free_tokens(self) -> int | None:
        """See Runner."""
        return self._documents.free_tokens()

    def take_times(self) -> list[ForwardTime]:
        """See Runner."""
        return self._queries.take_times() + self._documents.take_times()
