"""Pooling arithmetic on numpy arrays with the C library. Does not import torch.

Shape letters: T packed tokens of N sequences, R rows, D model width, H heads, W columns, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu import CpuLibrary, Format, PoolingCode

from ..checkpoint.views import Floats
from ..executors.cpu.array_encoder import ArrayEncoder
from ..executors.cpu.array_head import ArrayHead
from ..protocol.model_info import Activation, ModelInfo
from ..protocol.tasks import PoolingType
from .metadata import IntArray, PickedRows, PoolingMetadata, prefix_sums
from .model_pooler import ModelPooler, TokenHeads
from .row_ops import VectorTransform

_POOLINGS: Final = {
    PoolingType.CLS: PoolingCode.CLS,
    PoolingType.LAST: PoolingCode.LAST,
    PoolingType.MEAN: PoolingCode.MEAN,
    PoolingType.MAX: PoolingCode.MAX,
    PoolingType.MEAN_SQRT_LEN: PoolingCode.MEAN_SQRT_LEN,
    PoolingType.WEIGHTED_MEAN: PoolingCode.WEIGHTED_MEAN,
    PoolingType.ATTENTION: PoolingCode.WEIGHTED,
}


_BLOCK_ROWS: Final = 128
"""Rows of vocabulary logits to compute at once."""


class ArrayOps:
    """RowOps with float32 numpy arrays. RowOps describes the methods."""

    def __init__(self, library: CpuLibrary) -> None:
        self._library = library

    def pool(
        self,
        hidden_states: Floats,
        metadata: PoolingMetadata,
        pooling_type: PoolingType,
        transform: VectorTransform,
        *,
        weights: Floats | None = None,
    ) -> Floats:
        bounds = np.asarray(metadata.cu_seqlens)
        code = _POOLINGS[pooling_type]
        skips = metadata.skip_tokens
        return self._pool(hidden_states, bounds[:-1], np.diff(bounds), code, transform, skips, weights)

    def transform(self, rows: Floats, transform: VectorTransform) -> Floats:
        starts = np.arange(len(rows), dtype=np.int32)
        return self._pool(rows, starts, np.ones_like(starts), PoolingCode.CLS, transform)

    def rows_of(self, values: Any) -> Floats:
        rows: Floats = np.asarray(values)
        return np.ascontiguousarray(rows, np.float32) if rows.dtype.kind == "f" else rows

    def to_float32(self, rows: Floats) -> Floats:
        return rows.astype(np.float32, copy=False)

    def to_float64(self, rows: Floats) -> Floats:
        return rows.astype(np.float64)  # pyright: ignore[reportReturnType]

    def copy(self, rows: Floats) -> Floats:
        return rows.copy()

    def maximum(self, rows: Floats, others: Floats) -> Floats:
        return np.maximum(rows, others)

    def pick(self, rows: Floats, picked: PickedRows) -> Floats:
        return rows[picked]

    def pick_columns(self, rows: Floats, columns: Sequence[int]) -> Floats:
        return rows[:, list(columns)]

    def concat(self, parts: Sequence[Floats], axis: int = 0) -> Floats:
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)

    def row_weights(self, attention: Floats, head: int | None) -> Floats:
        weights: Floats = attention.mean(axis=1) if head is None else np.ascontiguousarray(attention[:, head])
        return weights

    def log_saturation(self, logits: Floats, *, twice: bool) -> Floats:
        np.log1p(np.maximum(logits, 0, out=logits), out=logits)
        return np.log1p(logits, out=logits) if twice else logits

    def nonzero_entries(self, values: Floats) -> tuple[Floats, list[int]]:
        rows, columns = np.nonzero(values)
        pairs = np.stack([columns.astype(np.float32), values[rows, columns]], axis=1)
        return pairs, np.bincount(rows, minlength=len(values)).tolist()

    def group_max(self, values: Floats, groups: IntArray, num_groups: int) -> Floats:
        largest = np.zeros((num_groups, 1), np.float32)
        np.maximum.at(largest[:, 0], groups, values[:, 0])
        return largest

    def maxsim(
        self,
        queries: Floats,
        documents: Floats,
        query_lens: Sequence[int],
        document_lens: Sequence[int],
        query_of: Sequence[int],
    ) -> Floats:
        """Consecutive documents with the same query share one product."""
        largest = np.zeros((len(document_lens), max(query_lens)), np.float32)
        query_bounds, bounds = prefix_sums(query_lens), prefix_sums(document_lens)
        present = np.flatnonzero(document_lens).tolist()
        for query, run in groupby(present, key=query_of.__getitem__):
            members = list(run)
            first, end = bounds[members[0]], bounds[members[-1] + 1]
            packed = self._library.pack(queries[query_bounds[query] : query_bounds[query + 1]], None, Format.F32)
            similarities = self._library.product(packed, documents[first:end])
            largest[members, : query_lens[query]] = np.maximum.reduceat(similarities, bounds[members] - first)
        return largest

    def scores(self, logits: Floats, info: ModelInfo, uses_activation: bool | NDArray[np.bool_]) -> Floats:
        if (info.logit_mean, info.logit_sigma) != (0.0, 1.0):
            logits = (logits - np.float32(info.logit_mean)) / np.float32(info.logit_sigma)
        if uses_activation is False or not logits.size:
            return logits
        activated = _activated(logits, info.activation)
        return activated if uses_activation is True else np.where(uses_activation[:, None], activated, logits)

    def _pool(
        self,
        rows: Floats,
        starts: NDArray[np.int32],
        lengths: NDArray[np.int32],
        pooling: PoolingCode,
        transform: VectorTransform,
        skips: NDArray[np.int32] | None = None,
        weights: Floats | None = None,
    ) -> Floats:
        return self._library.pool(
            rows,
            starts,
            lengths,
            pooling,
            width=transform.width or rows.shape[1],
            dimensions=transform.widths,
            normalize=np.broadcast_to(transform.normalize, len(starts)).astype(np.uint8),
            skips=skips,
            weights=weights,
        )


def array_pooler(
    info: ModelInfo, encoder: ArrayEncoder, dense: Sequence[ArrayHead], token_heads: TokenHeads[Floats] | None = None
) -> ModelPooler[Floats]:
    """Returns the pooler of a model of the C library. See ModelPooler."""
    return ModelPooler(
        info,
        ArrayOps(encoder.library),
        encoder.classify,
        encoder.classify_tokens,
        dense,
        token_heads,
        vocabulary_head=encoder.vocabulary_head,
        block_rows=_BLOCK_ROWS,
    )


def _activated(logits: Floats, activation: Activation) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):  # exp overflows to a score of 0; NaN fails its request later
        # A softmax over one class is always 1.
        if activation is Activation.SIGMOID or logits.shape[1] == 1:
            exp: Floats = np.exp(-logits)
            return np.reciprocal(np.add(exp, 1, out=exp), out=exp)
        exp = np.exp(logits - logits.max(axis=1, keepdims=True))
        np.divide(exp, exp.sum(axis=1, keepdims=True), out=exp)
        return exp
