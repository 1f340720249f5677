"""A model of the CPU executor with the interface of a torch model, so that tests share batches and references."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.core.loading import weights_loader
from penstock.engine.core.loading.cpu_kernels import load_array_encoder
from penstock.engine.executors.cpu.array_encoder import ArrayEncoder, PackedArrays, read_spec
from penstock.engine.executors.torch.packed_batch import ModelOutput, PackedBatch, PackedModel
from penstock.engine.protocol.model_info import ModelInfo
from penstock.kernels.cpu import CpuLibrary


def load_model(info: ModelInfo, *, library: CpuLibrary | None = None, **options: Any) -> PackedModel:
    """Loads a model on the CPU executor, or on torch if the executor does not support it."""
    if library is None or read_spec(info) is None:
        return weights_loader.load_model(info, **options)
    return ArrayModel(load_array_encoder(info, library))


class ArrayModel(PackedModel):
    """An ArrayEncoder with tensors as inputs and outputs. They share memory with its arrays."""

    def __init__(self, encoder: ArrayEncoder) -> None:
        self._encoder = encoder
        self.hidden_size = encoder.hidden_size
        self.cache_spec = encoder.cache_spec
        self.cache_dtype = torch.bfloat16 if encoder.kv_itemsize == 2 else torch.float32

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        output = self._encoder.forward(self._as_arrays(batch), need_attention=need_attention)
        weights = output.attention_weights
        return ModelOutput(
            hidden_states=torch.from_numpy(output.hidden_states),
            attention_weights=None if weights is None else torch.from_numpy(weights),
        )

    def classify(self, pooled_ND: Tensor) -> Tensor:
        return torch.from_numpy(self._encoder.classify(pooled_ND.numpy()))

    def classify_tokens(self, hidden_TD: Tensor) -> Tensor:
        return torch.from_numpy(self._encoder.classify_tokens(hidden_TD.numpy()))

    def _as_arrays(self, batch: PackedBatch) -> PackedArrays:
        types: Tensor | None = batch.token_type_ids
        return PackedArrays(
            token_ids=batch.input_ids.numpy(),
            positions=batch.positions.numpy(),
            token_type_ids=None if types is None else types.numpy(),
            cu_seqlens=batch.cu_seqlens.numpy(),
            seq_lens=batch.seq_lens,
            num_masked=_num_masked(batch),
            adapters=_adapters(batch),
            kv_blocks=None,
        )


def _adapters(batch: PackedBatch) -> NDArray[np.int32] | None:
    """Returns the number of the adapter of each sequence, [N], or None."""
    if not batch.adapters:
        return None
    numbers_T = np.full(batch.num_tokens, -1, np.int32)
    for group in batch.adapters:
        numbers_T[slice(None) if group.rows is None else group.rows.numpy()] = group.number
    return numbers_T[batch.cu_seqlens.numpy()[:-1]]


def _num_masked(batch: PackedBatch) -> NDArray[np.int32] | None:
    """Returns the number of masked tokens at the end of each sequence, [N], or None."""
    if not batch.masked:
        return None
    num_masked_N = np.zeros(len(batch.seq_lens), np.int32)
    starts_N = batch.cu_seqlens.numpy()[:-1]
    for masked in batch.masked:
        members = np.searchsorted(starts_N, masked.rows[:, 0].numpy())
        num_masked_N[members] = (~masked.is_visible).sum(1).numpy()
    return num_masked_N
