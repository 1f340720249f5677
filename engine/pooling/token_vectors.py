"""Other answers than one dense vector: token vectors (ColBERT) and their similarities, and sparse vectors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.maxsim import maxsim

from ..models.encoders.masked_lm import BLOCK_ROWS
from ..protocol.output_groups import distinct
from ..protocol.params import PoolingParams
from ..protocol.vectors import MultiVector, SparseKind, SparsePooling
from .heads import RowMap
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
        kept_before = F.pad(is_kept.cumsum(0), (1, 0))
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


# Numbers held at once, 4 bytes each: rows over the whole vocabulary.
_MAX_VALUES: Final = 1 << 25

# [S, 2] float32, index and value of every entry that is not zero, and their number for each sequence.
SparsePairs = tuple[Tensor, tuple[int, ...]]


def counts_on_host(counts: Tensor) -> list[int]:
    """Returns numbers that the shape of an answer follows from. The one place of pooling where the host waits."""
    numbers: list[int] = counts.tolist()
    return numbers


class SparsePooler:
    """Makes sparse vectors as one model does. Stateless.

    Args:
        recipe: Of the model.
        head: VOCABULARY_LOGITS: hidden states [R, D] to logits [R, V] float32, for R up to BLOCK_ROWS.
            TOKEN_WEIGHTS: hidden states [T, D] to weights [T, 1] float32.
        vocab_size: V.
        unweighted_ids: TOKEN_WEIGHTS: tokens that have no weight.
    """

    def __init__(self, recipe: SparsePooling, head: RowMap, vocab_size: int, unweighted_ids: Sequence[int]) -> None:
        self._recipe = recipe
        self._head = head
        self._vocab_size = vocab_size
        self._unweighted_ids = torch.tensor(unweighted_ids, dtype=torch.int64)

    def pool(self, hidden_states: Tensor, metadata: PoolingMetadata) -> SparsePairs:
        """Pools all rows [T, D] of the sequences that `metadata` describes.

        Raises:
            ValueError: Token weights are asked for and the batch has no token ids.
        """
        if self._recipe.kind is SparseKind.TOKEN_WEIGHTS:
            return self._pool_weights(hidden_states, metadata)
        parts, counts = [], []
        seq_lens, ends = metadata.seq_lens, list(accumulate(metadata.seq_lens))
        step = max(_MAX_VALUES // self._vocab_size, 1)
        for first in range(0, len(seq_lens), step):
            group = range(first, min(first + step, len(seq_lens)))
            values = self._pool_logits(hidden_states, [(ends[n] - seq_lens[n], ends[n]) for n in group])
            places = values.nonzero()
            pairs = torch.stack([places[:, 1].float(), values[places[:, 0], places[:, 1]]], dim=1)
            parts.append(pairs)
            counts += torch.bincount(places[:, 0], minlength=len(group)).tolist()
        return torch.cat(parts), tuple(counts)

    def _pool_logits(self, hidden_states: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """Returns [N, V] of the sequences that lie between `bounds`, one after the other."""
        recipe, device = self._recipe, hidden_states.device
        pooled = torch.zeros(len(bounds), self._vocab_size, device=device)
        current = 0
        for start in range(bounds[0][0], bounds[-1][1], BLOCK_ROWS):
            end = min(start + BLOCK_ROWS, bounds[-1][1])
            logits = F.relu(self._head(hidden_states[start:end]))
            if recipe.is_sum:
                logits = self._saturated(logits)
            while current < len(bounds) and bounds[current][0] < end:
                first, last = bounds[current]
                own, row = logits[max(first - start, 0) : last - start], pooled[current]
                if len(own) and recipe.is_sum:
                    row += own.sum(dim=0)
                elif len(own):
                    torch.maximum(row, own.amax(dim=0), out=row)
                if last > end:
                    break
                current += 1
        # The logarithm keeps the order, so that of a maximum it is taken once.
        return pooled if recipe.is_sum else self._saturated(pooled)

    def _saturated(self, values: Tensor) -> Tensor:
        values = values.log1p()
        return values.log1p() if self._recipe.log_twice else values

    def _pool_weights(self, hidden_states: Tensor, metadata: PoolingMetadata) -> SparsePairs:
        """Keeps the largest weight of each token of a sequence."""
        if metadata.token_ids is None:
            raise ValueError("sparse vectors of token weights need the token ids of the batch")
        token_ids, device = metadata.token_ids, hidden_states.device
        weights = F.relu(self._head(hidden_states).float())[:, 0]
        weights = weights.masked_fill(torch.isin(token_ids, self._unweighted_ids.to(device)), 0.0)
        lengths = metadata.cu_seqlens.diff().long()
        sequences = torch.repeat_interleave(lengths, output_size=len(token_ids))
        keys, places = torch.unique(sequences * self._vocab_size + token_ids, return_inverse=True)
        largest = weights.new_zeros(len(keys)).scatter_reduce_(0, places, weights, "amax")
        is_kept = largest != 0
        kept_keys = keys[is_kept]
        counts = torch.bincount(kept_keys // self._vocab_size, minlength=len(lengths))
        pairs = torch.stack([(kept_keys % self._vocab_size).float(), largest[is_kept]], dim=1)
        return pairs, tuple(counts.tolist())
