"""Encoders that the native kernels run, of models whose other parts need torch: sparse vectors, ColBERT, old files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...native.array_encoder import ArrayEncoder
from ...native.heads import ArrayHead
from ...native.packed_arrays import PackedArrays
from ..base import Head, ModelOutput, PackedModel

if TYPE_CHECKING:
    from ...packed_batch import PackedBatch


class NativeKernelsModel(PackedModel):
    """An ArrayEncoder between tensors, which share its memory.

    Args:
        encoder: Runs the model.
    """

    def __init__(self, encoder: ArrayEncoder) -> None:
        self._encoder = encoder
        self.machine = encoder.machine
        self.hidden_size = encoder.hidden_size
        self.sequence_head = _between_tensors(encoder.sequence_head)
        self.token_head = _between_tensors(encoder.token_head)

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """See PackedModel."""
        output = self._encoder.forward(_as_arrays(batch), need_attention=need_attention)
        weights = output.attention_weights
        return ModelOutput(
            hidden_states=torch.from_numpy(output.hidden_states),
            attention_weights=None if weights is None else torch.from_numpy(weights),
        )


def _between_tensors(head: ArrayHead | None) -> Head | None:
    return None if head is None else lambda x_ND: torch.from_numpy(head(x_ND.numpy()))


def _as_arrays(batch: PackedBatch) -> PackedArrays:
    """Returns a batch on the CPU as arrays."""
    types: Tensor | None = batch.token_type_ids
    return PackedArrays(
        input_ids=batch.input_ids.numpy(),
        positions=batch.positions.numpy(),
        token_type_ids=None if types is None else types.numpy(),
        cu_seqlens=batch.cu_seqlens.numpy(),
        lengths=np.array(batch.seq_lens, np.int32),
        num_hidden=_num_hidden(batch),
    )


def _num_hidden(batch: PackedBatch) -> NDArray[np.int32] | None:
    """Returns the tokens at the end of each sequence that no token attends to, [N]; None for none."""
    if not batch.hidden:
        return None
    num_hidden_N = np.zeros(len(batch.seq_lens), np.int32)
    starts_N = batch.cu_seqlens.numpy()[:-1]
    for hidden in batch.hidden:
        members = np.searchsorted(starts_N, hidden.rows[:, 0].numpy())
        num_hidden_N[members] = (~hidden.is_visible).sum(1).numpy()
    return num_hidden_N
