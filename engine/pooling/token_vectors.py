"""Other answers than one dense vector: token vectors (ColBERT) and their similarities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.maxsim import maxsim
from penstock.kernels.upload import upload

from ..protocol.batch_outputs import distinct_params
from ..protocol.params import PoolingParams
from ..protocol.vectors import MultiVector
from .metadata import PoolingMetadata
from .packing import kept_rows, prefix_sums, ranges


class VectorFilter:
    """Leaves out the vectors of tokens that mean nothing by themselves, such as punctuation in a document.

    Args:
        recipe: Of the model; None keeps all.
        skip_ids: Token ids that are left out.
        drops_first: The first token of every sequence is left out, too.
    """

    def __init__(self, recipe: MultiVector | None, skip_ids: Sequence[int], *, drops_first: bool = False) -> None:
        self._recipe = recipe
        self._drops_first = drops_first
        self._skip_ids = np.array(skip_ids, np.int64)

    def select(self, metadata: PoolingMetadata) -> tuple[Tensor | None, tuple[int, ...]]:
        """Returns the rows that are kept [R] int64, None where it is all of them, and their number per sequence.

        Raises:
            ValueError: Some may have to go and the batch has no token ids.
        """
        if self._drops_first:
            bounds = prefix_sums(metadata.seq_lens)
            rows = ranges(np.minimum(bounds[:-1] + 1, bounds[1:]), bounds[1:])
            kept = upload(torch.from_numpy(rows), metadata.cu_seqlens.device)
            return kept, tuple(max(length - 1, 0) for length in metadata.seq_lens)
        skips = {id(p): self._skips(p) for p in distinct_params(metadata.params)}
        if not any(skips.values()):
            return None, metadata.seq_lens
        if metadata.token_ids is None:
            raise ValueError("leaving tokens out of an answer needs the token ids of the batch")
        is_kept = ~np.isin(metadata.token_ids, self._skip_ids)
        if not all(skips.values()):
            is_kept |= np.repeat([not skips[id(p)] for p in metadata.params], metadata.seq_lens)
        return kept_rows(is_kept, metadata.seq_lens, metadata.cu_seqlens.device)

    def _skips(self, params: PoolingParams) -> bool:
        return self._recipe is not None and len(self._skip_ids) > 0 and self._recipe.skips(is_query=params.is_query)


def compare(
    vectors: Tensor, row_lens: Sequence[int], queries: Sequence[NDArray[np.float32] | None]
) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """Compares the vectors of documents, or of parts of them, with those of their queries.

    Args:
        vectors: [R, W] float32.
        row_lens: Vectors of each document; they sum to R.
        queries: [Q, W] float32 each, on the host.

    Returns:
        [P, max Q] float32: for every document that has vectors here, their largest similarity to each vector of its
        query; the rows of each document, 1 or 0; and the columns of each document.

    Raises:
        ValueError: A document has no query.
    """
    different: dict[int, NDArray[np.float32]] = {}
    for query in queries:
        if query is None:
            raise ValueError("a document needs the vectors of a query to be compared with")
        different.setdefault(id(query), query)
    places = {key: place for place, key in enumerate(different)}
    packed = upload(torch.from_numpy(np.concatenate(list(different.values()))), vectors.device)
    query_of = [places[id(query)] for query in queries]
    query_lens = [len(query) for query in different.values()]
    similarities = maxsim(packed, vectors, query_lens=query_lens, document_lens=row_lens, query_of=query_of)
    present = [n for n, length in enumerate(row_lens) if length]
    if len(present) < len(row_lens):
        similarities = similarities[upload(torch.tensor(present, dtype=torch.int64), vectors.device)]
    return similarities, tuple(int(length > 0) for length in row_lens), tuple(query_lens[q] for q in query_of)
