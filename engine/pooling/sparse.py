"""Sparse vectors: of logits over the vocabulary (SPLADE), or of one weight for each token (bge-m3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.backends import upload
from penstock.kernels.pooling import MAX_TRITON_WIDTH, pool

from ..executors.torch.base import PackedModel
from ..executors.torch.heads import BLOCK_ROWS
from ..protocol.model_info import ModelInfo
from ..protocol.multi_vector import SparseKind, SparsePooling
from .heads import RowMap
from .metadata import IntArray, PoolingMetadata, prefix_sums
from .model_pooler import TokenMaps

# Numbers held at once, 4 bytes each: rows over the whole vocabulary.
_MAX_VALUES: Final = 1 << 25
# Logits held at once on a GPU, whose products want thousands of rows: about 4,000 over a vocabulary of 30,000.
_MAX_LOGITS: Final = 1 << 27

# [S, 2] float32, index and value of every entry, and their number for each sequence. Those of TOKEN_WEIGHTS that are 0
# are left out on the host (`SparseVector.of`): how many there are, only the device knows.
SparsePairs = tuple[Tensor, tuple[int, ...]]


def counts_on_host(counts: Tensor) -> list[int]:
    """Returns numbers that the shape of an answer follows from. The one place of pooling where the host waits."""
    numbers: list[int] = counts.tolist()
    return numbers


class SparsePooler:
    """Makes sparse vectors as one model does. Stateless.

    Args:
        recipe: Of the model.
        head: VOCABULARY_LOGITS: hidden states [R, D] to logits [R, V] of any float type, for R up to BLOCK_ROWS on a
            CPU. On CUDA columns may follow the V of the vocabulary; they are left out. TOKEN_WEIGHTS: hidden states
            [T, D] to weights [T, 1] float32.
        vocab_size: V.
        unweighted_ids: TOKEN_WEIGHTS: tokens that have no weight.
    """

    def __init__(
        self, recipe: SparsePooling, head: RowMap[Tensor], vocab_size: int, unweighted_ids: Sequence[int]
    ) -> None:
        self._recipe = recipe
        self._head = head
        self._vocab_size = vocab_size
        self._unweighted_ids = np.array(unweighted_ids, np.int64)

    @classmethod
    def of(cls, info: ModelInfo, model: PackedModel, maps: TokenMaps[Tensor]) -> SparsePooler:
        """Returns the pooler of a model that has sparse vectors."""
        recipe = info.sparse
        assert recipe is not None, "the model has sparse vectors"
        head = model.vocabulary_head if recipe.kind is SparseKind.VOCABULARY_LOGITS else maps.weights
        assert head is not None, "the loader reads the head that ModelInfo names"
        return cls(recipe, head, info.vocab_size, maps.unweighted_ids)

    def pool(self, hidden_states: Tensor, metadata: PoolingMetadata) -> SparsePairs:
        """Pools all rows [T, D] of the sequences that `metadata` describes.

        Raises:
            ValueError: Token weights are asked for and the batch has no token ids.
        """
        if self._recipe.kind is SparseKind.TOKEN_WEIGHTS:
            return self._pool_weights(hidden_states, metadata)
        parts, counts = [], []
        bounds = prefix_sums(metadata.seq_lens)
        step = max(_MAX_VALUES // self._vocab_size, 1)
        pool_logits = self._pool_in_large_blocks if hidden_states.is_cuda else self._pool_in_small_blocks
        for first in range(0, metadata.num_seqs, step):
            values = pool_logits(hidden_states, bounds[first : first + step + 1])
            places, own_counts = _entries(values)
            parts.append(torch.stack([places[:, 1].float(), values[places[:, 0], places[:, 1]]], dim=1))
            counts += own_counts
        return torch.cat(parts), tuple(counts)

    def _pool_in_small_blocks(self, hidden_states: Tensor, bounds: IntArray) -> Tensor:
        """Returns [N, V] float32 of the sequences between `bounds`: blocks that one kernel of oneDNN serves."""
        recipe, device = self._recipe, hidden_states.device
        pooled = torch.zeros(len(bounds) - 1, self._vocab_size, device=device)
        firsts, ends = bounds[:-1].tolist(), bounds[1:].tolist()
        current = 0
        for start in range(firsts[0], ends[-1], BLOCK_ROWS):
            end = min(start + BLOCK_ROWS, ends[-1])
            logits = F.relu(self._head(hidden_states[start:end]))
            if recipe.is_sum:
                logits = self._saturated(logits)
            while current < len(firsts) and firsts[current] < end:
                first, last = firsts[current], ends[current]
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

    def _pool_in_large_blocks(self, hidden_states: Tensor, bounds: IntArray) -> Tensor:
        """As `_pool_in_small_blocks`: products of thousands of rows, and the pooling kernel over stripes of columns."""
        recipe, device = self._recipe, hidden_states.device
        pooled = torch.zeros(len(bounds) - 1, self._vocab_size, device=device)
        step = max(_MAX_LOGITS // self._vocab_size // BLOCK_ROWS, 1) * BLOCK_ROWS
        for start in range(int(bounds[0]), int(bounds[-1]), step):
            end = min(start + step, int(bounds[-1]))
            logits = self._head(hidden_states[start:end])
            if recipe.is_sum:
                logits = self._saturated(logits.relu_())
            first, last = np.searchsorted(bounds, start, "right") - 1, np.searchsorted(bounds, end, "left")
            own_bounds = bounds[first : last + 1].clip(start, end) - start
            cu_seqlens = upload(torch.from_numpy(own_bounds.astype(np.int32)), device)
            lengths = cu_seqlens.diff()[:, None]
            for column in range(0, self._vocab_size, MAX_TRITON_WIDTH):
                # The head may give columns beyond the vocabulary, so that rows are aligned: they are cut here.
                stripe, sums = logits[:, column : column + MAX_TRITON_WIDTH], pooled[first:last]
                sums = sums[:, column : column + MAX_TRITON_WIDTH]
                rows = pool(stripe, cu_seqlens, "mean" if recipe.is_sum else "max")[:, : sums.shape[1]]
                if recipe.is_sum:
                    sums += rows * lengths
                else:
                    torch.maximum(sums, rows, out=sums)
        # Maxima below 0 have met the zeros that `pooled` began with.
        return pooled if recipe.is_sum else self._saturated(pooled)

    def _saturated(self, values: Tensor) -> Tensor:
        values = values.log1p()
        return values.log1p() if self._recipe.log_twice else values

    def _pool_weights(self, hidden_states: Tensor, metadata: PoolingMetadata) -> SparsePairs:
        """Keeps the largest weight of each token of a sequence; which tokens those are, the host knows."""
        if metadata.token_ids is None:
            raise ValueError("sparse vectors of token weights need the token ids of the batch")
        device = hidden_states.device
        rows = np.flatnonzero(~np.isin(metadata.token_ids, self._unweighted_ids))
        sequences = np.repeat(np.arange(metadata.num_seqs), metadata.seq_lens)
        keys, places = np.unique(sequences[rows] * self._vocab_size + metadata.token_ids[rows], return_inverse=True)
        weights = F.relu(self._head(hidden_states).float())[:, 0]
        largest = weights.new_zeros(len(keys))
        weights = weights[upload(torch.from_numpy(rows), device)]
        largest.scatter_reduce_(0, upload(torch.from_numpy(places), device), weights, "amax")
        tokens = upload(torch.from_numpy((keys % self._vocab_size).astype(np.float32)), device)
        counts = np.bincount(keys // self._vocab_size, minlength=metadata.num_seqs)
        return torch.stack([tokens, largest], dim=1), tuple(counts.tolist())


def _entries(values: Tensor) -> tuple[Tensor, list[int]]:
    """Returns row and column [S, 2] of the entries of [N, V] that are not 0, in order, and how many each row has."""
    if not values.is_cuda:
        places = values.nonzero()
        return places, counts_on_host(torch.bincount(places[:, 0], minlength=len(values)))
    counts = counts_on_host((values != 0).sum(dim=1))
    return torch.nonzero_static(values, size=sum(counts)), counts
