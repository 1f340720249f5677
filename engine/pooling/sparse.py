"""Sparse vectors of a packed batch of whole sequences, as index-value pairs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.encoders.masked_lm import BLOCK_ROWS
from ..protocol.vectors import SparseKind, SparsePooling
from .heads import RowMap
from .metadata import PoolingMetadata

# Numbers held at once, 4 bytes each: rows over the whole vocabulary.
_MAX_VALUES: Final = 1 << 25

# [S, 2] float32, index and value of every entry that is not zero, and their number for each sequence.
SparsePairs = tuple[Tensor, tuple[int, ...]]


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
