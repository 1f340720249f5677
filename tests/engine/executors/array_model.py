"""A model of the CPU executor with the interface of a torch model, so that tests share batches and references."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.core.loading import weights_loader
from penstock.engine.core.loading.cpu_kernels import load_array_encoder
from penstock.engine.executors.cpu.array_encoder import ArrayEncoder, read_spec
from penstock.engine.executors.cpu.heads import ArrayHead
from penstock.engine.executors.cpu.packed_arrays import PackedArrays
from penstock.engine.executors.torch.base import Head, ModelOutput, PackedModel
from penstock.engine.executors.torch.packed_batch import BatchCache, KvCache, PackedBatch
from penstock.engine.protocol.model_info import ModelInfo
from penstock.kernels.cpu import BatchPages, Machine, PagedKvCache


def load_model(info: ModelInfo, *, machine: Machine | None = None, **options: Any) -> PackedModel:
    """Loads a model on the CPU executor, or on torch if the executor does not support it."""
    if machine is None or read_spec(info) is None:
        return weights_loader.load_model(info, **options)
    return ArrayModel(load_array_encoder(info, machine))


class ArrayModel(PackedModel):
    """An ArrayEncoder with tensors as inputs and outputs. They share memory with its arrays."""

    def __init__(self, encoder: ArrayEncoder) -> None:
        self._encoder = encoder
        self.hidden_size = encoder.hidden_size
        self.cache_spec = encoder.cache_spec
        self.cache_dtype = torch.bfloat16 if encoder.page_itemsize == 2 else torch.float32
        self._pages: tuple[KvCache, PagedKvCache] | None = None
        self.sequence_head = _between_tensors(encoder.sequence_head)
        self.token_head = _between_tensors(encoder.token_head)

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        output = self._encoder.forward(self._as_arrays(batch), need_attention=need_attention)
        weights = output.attention_weights
        return ModelOutput(
            hidden_states=torch.from_numpy(output.hidden_states),
            attention_weights=None if weights is None else torch.from_numpy(weights),
        )

    def _as_arrays(self, batch: PackedBatch) -> PackedArrays:
        types: Tensor | None = batch.token_type_ids
        return PackedArrays(
            input_ids=batch.input_ids.numpy(),
            positions=batch.positions.numpy(),
            token_type_ids=None if types is None else types.numpy(),
            cu_seqlens=batch.cu_seqlens.numpy(),
            lengths=np.array(batch.seq_lens, np.int32),
            num_hidden=_num_hidden(batch),
            past=None if batch.cache is None else self._past(batch.cache, batch.num_tokens),
        )

    def _past(self, cache: BatchCache, num_tokens: int) -> BatchPages:
        assert cache.kv is not None
        if self._pages is None or self._pages[0] is not cache.kv:
            self._pages = (cache.kv, PagedKvCache(*([_as_array(t) for t in part] for part in (cache.kv.k, cache.kv.v))))
        num_seqs, num_new = len(cache.context_lens), cache.num_new_seqs
        known = np.zeros((0, 0), np.int32) if cache.block_tables is None else cache.block_tables.numpy()
        tables_NB = np.zeros((num_seqs, known.shape[1]), np.int32)
        tables_NB[num_new:] = known
        slots_T = np.full(num_tokens, -1, np.int64)
        if cache.store_slots is not None:
            rows = slice(None) if cache.store_rows is None else cache.store_rows.numpy()
            slots_T[rows] = cache.store_slots.numpy()
        lengths_N = np.array(cache.context_lens, np.int32)
        return BatchPages(self._pages[1], lengths_N, tables_NB, slots_T)


def _as_array(tensor: Tensor) -> NDArray[Any]:
    """Returns an array over the memory of a tensor; bfloat16 as int16, because numpy has no such type."""
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _between_tensors(head: ArrayHead | None) -> Head | None:
    return None if head is None else lambda x_ND: torch.from_numpy(head(x_ND.numpy()))


def _num_hidden(batch: PackedBatch) -> NDArray[np.int32] | None:
    """Returns the number of hidden tokens at the end of each sequence, [N], or None."""
    if not batch.hidden:
        return None
    num_hidden_N = np.zeros(len(batch.seq_lens), np.int32)
    starts_N = batch.cu_seqlens.numpy()[:-1]
    for hidden in batch.hidden:
        members = np.searchsorted(starts_N, hidden.rows[:, 0].numpy())
        num_hidden_N[members] = (~hidden.is_visible).sum(1).numpy()
    return num_hidden_N
