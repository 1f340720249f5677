"""Terms of the attention scores with learned embeddings of distances (DeBERTa).

Shape letters: B sequences, L tokens, H heads, K head size, R rows of the table of distances, D model width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ....families.spec import DisentangledSpec
from .linear import Linear
from .norm import load_norm
from .weights import Weights


class Distances:
    """The table of distances, which all layers share.

    Attributes:
        rows_RD: [R, D], the embeddings after their norm.
    """

    def __init__(self, weights: Weights, spec: DisentangledSpec, max_len: int) -> None:
        self.spec = spec
        rows_RD = weights.tensor(spec.distances, spec.num_distances, weights_width(spec))
        self.rows_RD = rows_RD if spec.norm is None else load_norm(weights, spec.norm)(rows_RD)
        self._max_len = max_len
        row_of = torch.from_numpy(spec.row_of(np.arange(max_len - 1, -max_len, -1)))
        self._row_of = row_of.to(weights.device)

    def rows(self, length: int) -> Tensor:
        """Returns [L, L] int64, the row of the distance of each query and key."""
        nearest = self._row_of[self._max_len - length : self._max_len + length - 1]
        return nearest.unfold(0, length, 1).flip(0)


def weights_width(spec: DisentangledSpec) -> int:
    """Returns D."""
    projection = spec.key or spec.query
    assert projection is not None
    return projection.in_features


class DistanceTerms:
    """The terms of one layer."""

    def __init__(self, weights: Weights, distances: Distances, num_heads: int, scale: float) -> None:
        self._distances = distances
        self._keys_HKR, self._queries_HKR = (
            None
            if spec is None
            else Linear.load(weights, spec)(distances.rows_RD).unflatten(1, (num_heads, -1)).permute(1, 2, 0) * scale
            for spec in (distances.spec.key, distances.spec.query)
        )

    def __call__(self, q_BHLK: Tensor, k_BHLK: Tensor) -> Tensor:
        """Returns the scaled terms [B, H, L, L] of sequences of one length, in the type of q."""
        rows_LL = self._distances.rows(q_BHLK.shape[2]).expand(*q_BHLK.shape[:2], -1, -1)
        terms: list[Tensor] = []
        if self._keys_HKR is not None:
            terms.append((q_BHLK @ self._keys_HKR).gather(3, rows_LL))
        if self._queries_HKR is not None:
            # [B, H, key, R]. A key and a query use the row of the query and the key, so `rows_LL` is transposed.
            terms.append((k_BHLK @ self._queries_HKR).gather(3, rows_LL.mT).mT)
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]
