"""Pooling arithmetic on tensors, on any device: kernels/pooling, and torch.

Shape letters: T packed tokens of N sequences, R rows, D model width, W columns, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.backends import upload
from penstock.kernels.cpu import Machine
from penstock.kernels.maxsim import maxsim
from penstock.kernels.pooling import PoolingKind, pool

from ..executors.torch.base import PackedModel
from ..protocol.model_info import Activation, ModelInfo
from ..protocol.tasks import PoolingType
from .heads import Cut, RowMap
from .metadata import PickedRows, PoolingMetadata
from .model_pooler import ModelPooler, TokenMaps
from .sparse import SparsePooler

_KINDS: Final[dict[PoolingType, PoolingKind]] = {
    PoolingType.CLS: "cls",
    PoolingType.LAST: "last",
    PoolingType.MEAN: "mean",
    PoolingType.MAX: "max",
    PoolingType.MEAN_SQRT_LEN: "mean_sqrt_len",
    PoolingType.WEIGHTED_MEAN: "weighted_mean",
    PoolingType.ATTENTION: "weighted",
}


class TensorOps:
    """See RowOps.

    Args:
        device: Where rows are pooled.
        machine: The C library, which then pools float32 rows on a CPU.
    """

    def __init__(self, device: torch.device | str = "cpu", machine: Machine | None = None) -> None:
        self._device = torch.device(device)
        self._machine = machine

    def pool(
        self,
        hidden_states: Tensor,
        metadata: PoolingMetadata,
        pooling_type: PoolingType,
        cut: Cut,
        *,
        weights: Tensor | None = None,
        indices: Sequence[int] | None = None,
    ) -> Tensor:
        """See RowOps. Of sequences that do not lie together the others are pooled along: one pass is cheaper."""
        picked = None
        if indices is not None and indices[-1] - indices[0] < len(indices):
            rows, metadata = metadata.select(indices)
            hidden_states = hidden_states[rows]
            weights = None if weights is None else weights[rows]
        elif indices is not None:
            picked = np.array(indices)
            cut = cut.among(indices, metadata.num_seqs)
        device = hidden_states.device
        skip_tokens = metadata.skip_tokens
        pooled = pool(
            hidden_states,
            on_device(metadata.cu_seqlens, device),
            _KINDS[pooling_type],
            **_kernel_arguments(cut, device),
            skip_tokens=None if skip_tokens is None else on_device(skip_tokens, device),
            weights=weights,
            max_seqlen=max(metadata.seq_lens, default=None),  # short sequences need not be shared out on CUDA
            machine=self._machine,
        )
        return pooled if picked is None else self.pick(pooled, picked)

    def cut(self, rows: Tensor, cut: Cut) -> Tensor:
        """See RowOps."""
        if not cut.changes(rows.shape[1]):
            return rows.to(torch.float32, copy=True)
        # Every row is a sequence of one token: the fused kernel then only cuts and normalises.
        bounds = torch.arange(rows.shape[0] + 1, dtype=torch.int32, device=rows.device)
        return pool(rows, bounds, "cls", **_kernel_arguments(cut, rows.device))

    def rows_of(self, values: Any) -> Tensor:
        """See RowOps. The host does not wait for the copy to a device."""
        return upload(as_rows(values), self._device)

    def floats(self, rows: Tensor) -> Tensor:
        """See RowOps."""
        return rows.float()

    def doubles(self, rows: Tensor) -> Tensor:
        """See RowOps."""
        return rows.double()

    def copied(self, rows: Tensor) -> Tensor:
        """See RowOps."""
        return rows.clone()

    def maximum(self, rows: Tensor, others: Tensor) -> Tensor:
        """See RowOps."""
        return torch.maximum(rows, others)

    def pick(self, rows: Tensor, picked: PickedRows) -> Tensor:
        """See RowOps."""
        return rows[picked] if isinstance(picked, slice) else rows.index_select(0, on_device(picked, rows.device))

    def pick_columns(self, rows: Tensor, columns: Sequence[int]) -> Tensor:
        """See RowOps."""
        return rows[:, upload(torch.tensor(columns), rows.device)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """See RowOps."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """See RowOps."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def row_weights(self, attention: Tensor, head: int | None) -> Tensor:
        """See RowOps. Weights that are [T] already are taken as they are."""
        if attention.dim() not in (1, 2):
            raise ValueError(f"attention weights must be [T, H] or [T], got {list(attention.shape)}")
        if attention.dim() == 1:
            return attention.float().contiguous()
        return attention.float().mean(dim=1) if head is None else attention[:, head].float().contiguous()

    def scores(self, logits: Tensor, info: ModelInfo, uses_activation: bool | NDArray[np.bool_]) -> Tensor:
        """See RowOps."""
        logits = logits.float()
        if (info.logit_mean, info.logit_sigma) != (0.0, 1.0):
            logits = (logits - info.logit_mean) / info.logit_sigma
        if uses_activation is False:
            return logits
        # A softmax over one class would always say 1.
        is_sigmoid = info.activation is Activation.SIGMOID or logits.shape[1] == 1
        activated = logits.sigmoid() if is_sigmoid else logits.softmax(dim=1)
        if uses_activation is True:
            return activated
        return torch.where(on_device(uses_activation, logits.device)[:, None], activated, logits)


def tensor_pooler(
    info: ModelInfo,
    model: PackedModel,
    dense: Sequence[RowMap[Tensor]] = (),
    maps: TokenMaps[Tensor] | None = None,
) -> ModelPooler[Tensor]:
    """Returns the pooler of a model that gives tensors. See ModelPooler."""
    maps = maps or TokenMaps()
    sparse = None if info.sparse is None else SparsePooler.of(info, model, maps).pool
    return ModelPooler(
        info,
        TensorOps(info.device, model.machine),
        model.classify,
        model.classify_tokens,
        dense,
        maps,
        sparse=sparse,
        compare=compare,
    )


def as_rows(values: Tensor | NDArray[Any]) -> Tensor:
    """Returns rows or weights as a tensor without gradient, which may share their memory; float64 as float32."""
    if isinstance(values, Tensor):
        rows = values.detach()
    else:  # torch warns of arrays that nobody may write to
        rows = torch.as_tensor(values) if values.flags.writeable else torch.tensor(values)
    return rows.float() if rows.dtype is torch.float64 else rows


def on_device(values: Tensor | NDArray[Any], device: torch.device | str) -> Tensor:
    """Returns values of the host on the device of the rows; the host does not wait for the copy."""
    return upload(values if isinstance(values, Tensor) else torch.from_numpy(values), device)


def compare(
    vectors: Tensor, row_lens: Sequence[int], queries: Sequence[NDArray[np.float32] | None]
) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """Compares the vectors of documents, or of parts of them, with those of their queries (ColBERT).

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
    packed = on_device(np.concatenate(list(different.values())), vectors.device)
    query_of = [places[id(query)] for query in queries]
    query_lens = [len(query) for query in different.values()]
    similarities = maxsim(packed, vectors, query_lens=query_lens, document_lens=row_lens, query_of=query_of)
    present = np.flatnonzero(row_lens)
    if len(present) < len(row_lens):
        similarities = similarities[on_device(present, vectors.device)]
    return similarities, tuple(int(length > 0) for length in row_lens), tuple(query_lens[q] for q in query_of)


def _kernel_arguments(cut: Cut, device: torch.device) -> dict[str, Any]:
    """A cut as penstock.kernels.pooling takes it."""
    normalize = cut.normalize if isinstance(cut.normalize, bool) else on_device(cut.normalize, device)
    if cut.widths is None:
        return {"dimensions": cut.width, "normalize": normalize}
    return {"dimensions": on_device(cut.widths, device), "max_dimensions": cut.width, "normalize": normalize}
