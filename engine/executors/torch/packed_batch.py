"""The input of one forward: the tokens of all sequences or chunks, end to end, and their caches.

engine/scheduling assigns blocks and slots to sequences, without torch. This module holds the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...protocol.request import TokenizedInput
from ...scheduling import CacheSpec
from ..cpu.packed_arrays import PackedArrays
from .staging import put_all

_ARRAYS: Final = ("input_ids", "positions", "token_type_ids", "cu_seqlens")
_GROUP: Final = ("rows", "is_visible")
_PLACES: Final = (
    "block_tables",
    "past_lens_on_device",
    "store_rows",
    "store_slots",
    "load_indices",
    "load_slots",
    "save_indices",
    "save_slots",
)
"""The fields of a BatchCache beside its memory."""


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

    def at(self, slot: int) -> list[Tensor]:
        """Returns the states in one slot, of all layers: views."""
        return [layer[slot] for layer in (*self.conv, *self.ssm)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchCache:
    """Where the past of a batch's N sequences lies, and where their new rows and states must be stored.

    Sequences without a past come first in the batch, so that attention can treat them as whole sequences.

    Attributes:
        num_new_seqs: Leading sequences without a past.
        num_new_tokens: Their rows.
        context_lens: N numbers of tokens before the chunk, on the host; 0 for those without a past.
        prompt_lens: N numbers of tokens of the whole sequences, what follows the chunk included, on the host: rotary
            positions may depend on it. None where every chunk ends its sequence.
        kv: Keys and values; None in a model without attention.
        block_tables: [N - num_new_seqs, B] int32: block of every `block_size` tokens of the sequences with a past, past
            and chunk together, filled up with 0.
        past_lens_on_device: [N - num_new_seqs] int32, `past_lens` beside the tensors; None lets every layer copy them.
        store_rows: [S] int64, rows of the batch whose keys and values must be kept; None where it is all of them.
        store_slots: [S] int64, block * block_size + offset of each.
        ssm: States; None in a model without SSM layers.
        load_indices: [M] int64, sequences of the batch that begin with a state.
        load_slots: [M] int64, where their states are.
        save_indices: [Q] int64, sequences whose state must be kept after the chunk.
        save_slots: [Q] int64, where it goes.
    """

    num_new_seqs: int
    num_new_tokens: int
    context_lens: tuple[int, ...]
    prompt_lens: tuple[int, ...] | None = None
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
        """Tokens before the chunk of each sequence that has a past."""
        return self.context_lens[self.num_new_seqs :]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HiddenTokens:
    """Sequences that end with tokens which no token attends to. B sequences of one length L.

    Attributes:
        rows: [B, L] int64, their rows in the batch.
        is_visible: [B, L] bool, False for the tokens at their ends.
    """

    rows: Tensor
    is_visible: Tensor

    @classmethod
    def of(cls, lengths: NDArray[np.int32], num_hidden: NDArray[np.int32]) -> list[HiddenTokens]:
        """Returns the sequences with hidden tokens by length, given lengths [N] and numbers of hidden tokens [N].

        On the host.
        """
        starts = np.cumsum(lengths) - lengths
        groups = []
        for length in np.unique(lengths[num_hidden > 0]):
            members = np.flatnonzero((num_hidden > 0) & (lengths == length))
            places = np.arange(length)
            rows = torch.from_numpy(starts[members, None] + places)
            is_visible = torch.from_numpy(places < (length - num_hidden[members, None]))
            groups.append(cls(rows=rows, is_visible=is_visible))
        return groups


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """Inputs of one forward. T packed tokens of N sequences.

    Attributes:
        input_ids: [T] int64.
        positions: [T] int64, the place of each token in its whole sequence, from 0.
        token_type_ids: [T] int64; None where all are 0.
        cu_seqlens: [N+1] int32, prefix sums of the lengths.
        seq_lens: Rows of each sequence in this batch, on the host.
        max_seqlen: The longest of them.
        skip_tokens: [N] int32 on the host, tokens at the head of each whole sequence that pooling leaves out; None for
            none.
        cache: States that sequences keep between chunks; None where all of them are whole
            and nothing is kept.
        hidden: Whole sequences with tokens that no token attends to, by their length.
        token_ids: `input_ids` on the host, where they came from; None where they are not known there.
    """

    input_ids: Tensor
    positions: Tensor
    token_type_ids: Tensor | None
    cu_seqlens: Tensor
    seq_lens: tuple[int, ...]
    max_seqlen: int
    skip_tokens: NDArray[np.int32] | None
    cache: BatchCache | None = None
    hidden: Sequence[HiddenTokens] = ()
    token_ids: NDArray[np.int64] | None = None

    @property
    def num_tokens(self) -> int:
        """T, the number of packed tokens."""
        return self.input_ids.shape[0]

    @classmethod
    def build(
        cls,
        inputs: Sequence[TokenizedInput],
        device: torch.device,
        *,
        starts: Sequence[int] | None = None,
        cache: BatchCache | None = None,
    ) -> PackedBatch:
        """Packs `inputs` in their order; ascending length gives attention the least work.

        Args:
            inputs: At least one, none of them empty: whole sequences, or chunks of them.
            device: Where the tensors go, all in one copy.
            starts: Place of each chunk in its sequence; None means that all begin at 0.
            cache: For chunks; see the attribute. Its places may be on the host.
        """
        arrays = PackedArrays.build(inputs, starts)
        hidden = [] if arrays.num_hidden is None else HiddenTokens.of(arrays.lengths, arrays.num_hidden)
        own: dict[str, Tensor | None] = {
            name: None if (array := getattr(arrays, name)) is None else torch.from_numpy(array) for name in _ARRAYS
        }
        places: dict[str, Tensor | None] = {} if cache is None else {name: getattr(cache, name) for name in _PLACES}
        groups = {(number, name): getattr(group, name) for number, group in enumerate(hidden) for name in _GROUP}
        put: dict[Any, Any] = put_all({**own, **places, **groups}, device)
        seq_lens = tuple(arrays.lengths.tolist())
        return cls(
            **{name: put[name] for name in own},
            seq_lens=seq_lens,
            max_seqlen=max(seq_lens),
            cache=None if cache is None else replace(cache, **{name: put[name] for name in places}),
            hidden=[HiddenTokens(**{name: put[number, name] for name in _GROUP}) for number in range(len(hidden))],
            skip_tokens=arrays.skip_tokens,
            token_ids=arrays.input_ids,
        )
