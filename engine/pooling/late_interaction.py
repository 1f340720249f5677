"""Vectors of tokens as multi-vector models (ColBERT) answer with them, or compared with those of a query."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.maxsim import maxsim

from ..protocol.params import PoolingParams
from ..protocol.vectors import MultiVector
from .cut import distinct
from .metadata import PoolingMetadata
from .packing import prefix_sums, ranges


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
        self._skip_ids = torch.tensor(skip_ids, dtype=torch.int64)

    def select(self, metadata: PoolingMetadata) -> tuple[Tensor | None, tuple[int, ...]]:
        """Returns the rows that are kept [R] int64, None where it is all of them, and their number per sequence.

        Raises:
            ValueError: Some may have to go and the batch has no token ids.
        """
        if self._drops_first:
            bounds = prefix_sums(metadata.seq_lens)
            rows = ranges(np.minimum(bounds[:-1] + 1, bounds[1:]), bounds[1:])
            kept = torch.from_numpy(rows).to(metadata.cu_seqlens.device, non_blocking=True)
            return kept, tuple(max(length - 1, 0) for length in metadata.seq_lens)
        skips = {id(p): self._skips(p) for p in distinct(metadata.params)}
        if not any(skips.values()):
            return None, metadata.seq_lens
        if metadata.token_ids is None:
            raise ValueError("leaving tokens out of an answer needs the token ids of the batch")
        token_ids = metadata.token_ids
        is_kept = ~torch.isin(token_ids, self._skip_ids.to(token_ids.device))
        if not all(skips.values()):
            keeps_all = torch.tensor([not skips[id(p)] for p in metadata.params], device=token_ids.device)
            is_kept |= torch.repeat_interleave(
                keeps_all, metadata.cu_seqlens.diff().long(), output_size=token_ids.shape[0]
            )
        kept_before = torch.nn.functional.pad(is_kept.cumsum(0), (1, 0))
        row_lens = kept_before[metadata.cu_seqlens.long()].diff()
        return is_kept.nonzero()[:, 0], tuple(row_lens.tolist())

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
    packed = torch.from_numpy(np.concatenate(list(different.values()))).to(vectors.device, non_blocking=True)
    query_of = [places[id(query)] for query in queries]
    query_lens = [len(query) for query in different.values()]
    similarities = maxsim(packed, vectors, query_lens=query_lens, document_lens=row_lens, query_of=query_of)
    present = [n for n, length in enumerate(row_lens) if length]
    if len(present) < len(row_lens):
        similarities = similarities[torch.tensor(present, dtype=torch.int64, device=vectors.device)]
    return similarities, tuple(int(length > 0) for length in row_lens), tuple(query_lens[q] for q in query_of)
