"""Pooling arithmetic on tensors on any device, with kernels/pooling and torch.

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
from penstock.kernels.maxsim import maxsim
from penstock.kernels.pooling import PoolingKind, pool

from ..executors.torch.model_heads import BLOCK_ROWS
from ..executors.torch.packed_batch import PackedModel
from ..protocol.model_info import Activation, ModelInfo
from ..protocol.tasks import PoolingType
from .metadata import IntArray, PickedRows, PoolingMetadata
from .model_pooler import ModelPooler, TokenHeads
from .row_ops import RowFunction, VectorTransform

_KINDS: Final[dict[PoolingType, PoolingKind]] = {
    PoolingType.CLS: "cls",
    PoolingType.LAST: "last",
    PoolingType.MEAN: "mean",
    PoolingType.MAX: "max",
    PoolingType.MEAN_SQRT_LEN: "mean_sqrt_len",
    PoolingType.WEIGHTED_MEAN: "weighted_mean",
    PoolingType.ATTENTION: "weighted",
}

_MAX_LOGITS: Final = 1 << 27
"""Most logits in memory on a GPU. GPU products need thousands of rows: here 4,000 with a vocabulary of 30,000."""


class TensorOps:
    """RowOps with tensors on a device. RowOps describes the methods."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def pool(
        self,
        hidden_states: Tensor,
        metadata: PoolingMetadata,
        pooling_type: PoolingType,
        transform: VectorTransform,
        *,
        weights: Tensor | None = None,
    ) -> Tensor:
        device = hidden_states.device
        skip_tokens = metadata.skip_tokens
        return pool(
            hidden_states,
            on_device(metadata.cu_seqlens, device),
            _KINDS[pooling_type],
            **_kernel_arguments(transform, device),
            skip_tokens=None if skip_tokens is None else on_device(skip_tokens, device),
            weights=weights,
            max_seqlen=max(metadata.seq_lens, default=None),  # the CUDA kernel splits only long sequences
        )

    def transform(self, rows: Tensor, transform: VectorTransform) -> Tensor:
        if not transform.changes(rows.shape[1]):
            return rows.to(torch.float32, copy=True)
        # The pooling kernel only cuts and normalises sequences of one token.
        bounds = torch.arange(rows.shape[0] + 1, dtype=torch.int32, device=rows.device)
        return pool(rows, bounds, "cls", **_kernel_arguments(transform, rows.device))

    def rows_of(self, values: Any) -> Tensor:
        """Does not wait for the copy to a device."""
        return upload(as_rows(values), self._device)

    def to_float32(self, rows: Tensor) -> Tensor:
        return rows.float()

    def to_float64(self, rows: Tensor) -> Tensor:
        return rows.double()

    def copy(self, rows: Tensor) -> Tensor:
        return rows.clone()

    def maximum(self, rows: Tensor, others: Tensor) -> Tensor:
        return torch.maximum(rows, others)

    def pick(self, rows: Tensor, picked: PickedRows) -> Tensor:
        return rows[picked] if isinstance(picked, slice) else rows.index_select(0, on_device(picked, rows.device))

    def pick_columns(self, rows: Tensor, columns: Sequence[int]) -> Tensor:
        return rows[:, upload(torch.tensor(columns), rows.device)]

    def concat(self, parts: Sequence[Tensor], axis: int = 0) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)

    def row_weights(self, attention: Tensor, head: int | None) -> Tensor:
        """Also accepts weights [T]."""
        if attention.dim() not in (1, 2):
            raise ValueError(f"attention weights must be [T, H] or [T], got {list(attention.shape)}")
        if attention.dim() == 1:
            return attention.float().contiguous()
        return attention.float().mean(dim=1) if head is None else attention[:, head].float().contiguous()

    def log_saturation(self, logits: Tensor, *, twice: bool) -> Tensor:
        logits = logits.relu_().log1p_()
        return logits.log1p_() if twice else logits

    def nonzero_entries(self, values: Tensor) -> tuple[Tensor, list[int]]:
        if values.is_cuda:
            counts = counts_on_host((values != 0).sum(dim=1))
            indices = torch.nonzero_static(values, size=sum(counts))
        else:
            indices = values.nonzero()
            counts = counts_on_host(torch.bincount(indices[:, 0], minlength=len(values)))
        return torch.stack([indices[:, 1].float(), values[indices[:, 0], indices[:, 1]]], dim=1), counts

    def group_max(self, values: Tensor, groups: IntArray, num_groups: int) -> Tensor:
        largest = values.new_zeros(num_groups)
        return largest.scatter_reduce_(0, on_device(groups, values.device), values[:, 0], "amax")[:, None]

    def maxsim(
        self,
        queries: NDArray[np.float32],
        documents: Tensor,
        query_lens: Sequence[int],
        document_lens: Sequence[int],
        query_of: Sequence[int],
    ) -> Tensor:
        packed = on_device(queries, documents.device)
        return maxsim(packed, documents, query_lens=query_lens, document_lens=document_lens, query_of=query_of)

    def scores(self, logits: Tensor, info: ModelInfo, uses_activation: bool | NDArray[np.bool_]) -> Tensor:
        logits = logits.float()
        if (info.logit_mean, info.logit_sigma) != (0.0, 1.0):
            logits = (logits - info.logit_mean) / info.logit_sigma
        if uses_activation is False:
            return logits
        # A softmax over one class is always 1.
        is_sigmoid = info.activation is Activation.SIGMOID or logits.shape[1] == 1
        activated = logits.sigmoid() if is_sigmoid else logits.softmax(dim=1)
        if uses_activation is True:
            return activated
        return torch.where(on_device(uses_activation, logits.device)[:, None], activated, logits)


def tensor_pooler(
    info: ModelInfo,
    model: PackedModel,
    dense: Sequence[RowFunction[Tensor]] = (),
    token_heads: TokenHeads[Tensor] | None = None,
) -> ModelPooler[Tensor]:
    """Returns the pooler of a torch model. See ModelPooler."""
    block_rows = BLOCK_ROWS
    if info.device != "cpu":
        block_rows *= max(_MAX_LOGITS // max(info.vocab_size, 1) // BLOCK_ROWS, 1)
    return ModelPooler(
        info,
        TensorOps(info.device),
        model.classify,
        model.classify_tokens,
        dense,
        token_heads,
        vocabulary_head=model.vocabulary_head,
        block_rows=block_rows,
    )


def counts_on_host(counts: Tensor) -> list[int]:
    """Copies counts to the host, which determine the shape of a result. Only here pooling waits for the device."""
    numbers: list[int] = counts.tolist()
    return numbers


def as_rows(values: Tensor | NDArray[Any]) -> Tensor:
    """Returns rows or weights as a tensor without gradient that may share their memory. float64 becomes float32."""
    if isinstance(values, Tensor):
        rows = values.detach()
    else:  # torch warns about read-only arrays
        rows = torch.as_tensor(values) if values.flags.writeable else torch.tensor(values)
    return rows.float() if rows.dtype is torch.float64 else rows


def on_device(values: Tensor | NDArray[Any], device: torch.device | str) -> Tensor:
    """Copies values of the host to a device. Does not wait for the copy."""
    return upload(values if isinstance(values, Tensor) else torch.from_numpy(values), device)


def _kernel_arguments(transform: VectorTransform, device: torch.device) -> dict[str, Any]:
    """Returns a transform as arguments of penstock.kernels.pooling."""
    normalize = transform.normalize if isinstance(transform.normalize, bool) else on_device(transform.normalize, device)
    if transform.widths is None:
        return {"dimensions": transform.width, "normalize": normalize}
    dimensions = on_device(transform.widths, device)
    return {"dimensions": dimensions, "max_dimensions": transform.width, "normalize": normalize}
