"""The tensors behind the sequence pools, and the part of them that one batch reads and writes.

Which block or slot belongs to whom is decided in sequence_pool/, without torch; here is only the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .sequence_pool.cache_spec import CacheSpec


@dataclass(frozen=True, slots=True, eq=False)
class KvCache:
    """Keys and values in blocks.

    Attributes:
        k: Per attention layer, [num_blocks, block_size, Hkv, K], model dtype.
        v: As `k`.
        block_size: Tokens of a block.
    """

    k: list[Tensor]
    v: list[Tensor]
    block_size: int

    @classmethod
    def allocate(
        cls, spec: CacheSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KvCache:
        """Reserves the blocks. On a CPU memory is only taken as blocks are first written."""
        shapes = [(num_blocks, block_size, layer.num_kv_heads, layer.head_size) for layer in spec.kv_layers]
        return cls(
            [torch.empty(shape, dtype=dtype, device=device) for shape in shapes],
            [torch.empty(shape, dtype=dtype, device=device) for shape in shapes],
            block_size,
        )


@dataclass(frozen=True, slots=True, eq=False)
class SsmStates:
    """States of the SSM layers in slots.

    Attributes:
        conv: Per SSM layer, [num_slots, channels, width - 1], model dtype: the last inputs of the convolution.
        ssm: Per SSM layer, [num_slots, *ssm_shape], float32.
    """

    conv: list[Tensor]
    ssm: list[Tensor]

    @classmethod
    def allocate(cls, spec: CacheSpec, num_slots: int, dtype: torch.dtype, device: torch.device) -> SsmStates:
        """Reserves the slots."""
        return cls(
            [torch.zeros((num_slots, *layer.conv_shape), dtype=dtype, device=device) for layer in spec.ssm_layers],
            [torch.zeros((num_slots, *layer.ssm_shape), device=device) for layer in spec.ssm_layers],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchCache:
    """Where the past of a batch's N sequences lies, and where what is new of it must be kept.

    Sequences without a past come first in the batch, so that attention can treat them as whole sequences.

    Attributes:
        num_fresh: Leading sequences without a past.
        num_fresh_tokens: Their rows.
        context_lens: N numbers of tokens before the slice, on the host; 0 for the fresh.
        whole_lens: N numbers of tokens of the whole sequences, what follows the slice included, on the host: rotary
            positions may depend on it. None where every slice ends its sequence.
        kv: Keys and values; None in a model without attention.
        block_tables: [N - num_fresh, B] int32: block of every `block_size` tokens of the sequences with a past, past
            and slice together, filled up with 0.
        past_lens_on_device: [N - num_fresh] int32, `past_lens` beside the tensors; None lets every layer copy them.
        store_rows: [S] int64, rows of the batch whose keys and values must be kept; None where it is all of them.
        store_slots: [S] int64, block * block_size + offset of each.
        ssm: States; None in a model without SSM layers.
        load_indices: [M] int64, sequences of the batch that begin with a state.
        load_slots: [M] int64, where their states are.
        save_indices: [Q] int64, sequences whose state must be kept after the slice.
        save_slots: [Q] int64, where it goes.
    """

    num_fresh: int
    num_fresh_tokens: int
    context_lens: tuple[int, ...]
    whole_lens: tuple[int, ...] | None = None
    kv: KvCache | None = None
    block_tables: Tensor | None = None
    past_lens_on_device: Tensor | None = None
    store_rows: Tensor | None = None
    store_slots: Tensor | None = None
    ssm: SsmStates | None = None
    load_indices: Tensor | None = None
    load_slots: Tensor | None = None
    save_indices: Tensor | None = None
    save_slots: Tensor | None = None

    @property
    def past_lens(self) -> Sequence[int]:
        """Tokens before the slice of each sequence that has a past."""
        return self.context_lens[self.num_fresh :]
