"""The input of one forward: the tokens of all sequences or chunks, one after another, and their caches.

engine/scheduling assigns blocks and slots to sequences; this module has the memory of the blocks and slots. All small
tensors of a batch are copied to the device together, in one asynchronous copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...protocol.errors import UnsupportedTaskError
from ...protocol.images import ImagePatches
from ...protocol.messages import TokenizedInput
from ...scheduling import CacheSpec
from ..cpu.array_encoder import PackedArrays

_GROUP: Final = ("rows", "is_visible")
_ADAPTER: Final = "adapter"
_CACHE_ARRAYS: Final = (
    "block_tables",
    "continued_context_lens_on_device",
    "store_rows",
    "store_slots",
    "load_indices",
    "load_slots",
    "save_indices",
    "save_slots",
)
"""Tensors of a BatchCache that are copied to the device."""


@dataclass(frozen=True, slots=True, eq=False)
class KvCache:
    """Keys and values in blocks.

    Attributes:
        k: Keys [num_blocks, block_size, Hkv, K] of every attention layer, in the type of the model.
        v: Values, in the same shape.
        block_size: Tokens in a block.
    """

    k: list[Tensor]
    v: list[Tensor]
    block_size: int

    @classmethod
    def allocate(
        cls, spec: CacheSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KvCache:
        """Allocates the blocks; on a CPU, a block uses no memory before it is first written."""
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
        conv: Last inputs of the convolution of every SSM layer, [num_slots, channels, width - 1], in the type of the
            model.
        ssm: State of the recurrence of every SSM layer, [num_slots, *ssm_shape] float32.
    """

    conv: list[Tensor]
    ssm: list[Tensor]

    @classmethod
    def allocate(cls, spec: CacheSpec, num_slots: int, dtype: torch.dtype, device: torch.device) -> SsmStates:
        """Returns states of zeros for `num_slots` sequences in every layer."""
        return cls(
            [torch.zeros((num_slots, *layer.conv_shape), dtype=dtype, device=device) for layer in spec.ssm_layers],
            [torch.zeros((num_slots, *layer.ssm_shape), device=device) for layer in spec.ssm_layers],
        )

    def at(self, slot: int) -> list[Tensor]:
        """Returns views of the states of all layers in one slot."""
        return [layer[slot] for layer in (*self.conv, *self.ssm)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchCache:
    """Positions of the cached rows and states of N sequences, and of the rows and states to store.

    Sequences without cached tokens come first in the batch, so that attention can treat them as whole sequences.

    Attributes:
        num_new_seqs: Number of sequences without cached tokens.
        num_new_tokens: Number of rows of the sequences without cached tokens.
        context_lens: N numbers of cached tokens before the chunk, on the host.
        total_lens: N lengths of the whole sequences, on the host, for rotary positions that depend on the length; None
            if every chunk ends its sequence.
        kv: Keys and values; None in a model without attention.
        block_tables: [N - num_new_seqs, B] int32, the blocks of each sequence with cached tokens, including the blocks
            of its chunk, padded with 0.
        continued_context_lens_on_device: [N - num_new_seqs] int32, `continued_context_lens` on the device; None if
            every layer copies them.
        store_rows: [S] int64, batch rows to store the keys and values of; None for all rows.
        store_slots: [S] int64, block * block_size + offset of each stored row.
        ssm: States; None in a model without SSM layers.
        load_indices: [M] int64, sequences of the batch with a saved state.
        load_slots: [M] int64, slots of the saved states.
        save_indices: [Q] int64, sequences to save after the chunk.
        save_slots: [Q] int64, slots for their states.
    """

    num_new_seqs: int
    num_new_tokens: int
    context_lens: tuple[int, ...]
    total_lens: tuple[int, ...] | None = None
    kv: KvCache | None = None
    block_tables: Tensor | None = None
    continued_context_lens_on_device: Tensor | None = None
    store_rows: Tensor | None = None
    store_slots: Tensor | None = None
    ssm: SsmStates | None = None
    load_indices: Tensor | None = None
    load_slots: Tensor | None = None
    save_indices: Tensor | None = None
    save_slots: Tensor | None = None

    @property
    def continued_context_lens(self) -> Sequence[int]:
        """`context_lens` of the sequences with cached tokens."""
        return self.context_lens[self.num_new_seqs :]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskedTokens:
    """B sequences of the same length L that end with masked tokens. No token attends to masked tokens.

    Attributes:
        rows: [B, L] int64, the rows of the sequences in the batch.
        is_visible: [B, L] bool, False for the masked tokens.
    """

    rows: Tensor
    is_visible: Tensor

    @classmethod
    def of(cls, lengths: NDArray[np.int32], num_masked: NDArray[np.int32]) -> list[MaskedTokens]:
        """Groups the sequences with masked tokens by length, on the host; the arguments have shape [N]."""
        starts = np.cumsum(lengths) - lengths
        groups = []
        for length in np.unique(lengths[num_masked > 0]):
            members = np.flatnonzero((num_masked > 0) & (lengths == length))
            positions = np.arange(length)
            rows = torch.from_numpy(starts[members, None] + positions)
            is_visible = torch.from_numpy(positions < (length - num_masked[members, None]))
            groups.append(cls(rows=rows, is_visible=is_visible))
        return groups


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRows:
    """The rows of a batch with the same adapter.

    Attributes:
        number: Number of the adapter.
        rows: [R] int64; None: all rows of the batch.
    """

    number: int
    rows: Tensor | None

    @classmethod
    def of(cls, lengths: NDArray[np.int32], adapters: NDArray[np.int32] | None) -> list[AdapterRows]:
        """Groups the rows of sequences by adapter, on the host. Arguments: [N]; -1: no adapter."""
        if adapters is None:
            return []
        numbers_T = adapters.repeat(lengths)
        numbers = [int(number) for number in np.unique(adapters) if number >= 0]
        if len(numbers) == 1 and adapters.min() >= 0:
            return [cls(numbers[0], None)]
        return [cls(number, torch.from_numpy(np.flatnonzero(numbers_T == number))) for number in numbers]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """Inputs of one forward: T packed tokens of N sequences.

    Attributes:
        input_ids: [T] int64, `token_ids` on the device.
        positions: [T] int64, position of each token in its whole sequence, from 0.
        token_type_ids: [T] int64; None if all are 0.
        cu_seqlens: [N+1] int32, prefix sums of `seq_lens`.
        seq_lens: Rows of each sequence in this batch, on the host.
        max_seqlen: Largest of `seq_lens`.
        skip_tokens: [N] int32 on the host, tokens at the start of each whole sequence that pooling ignores; None if
            there are none.
        cache: States between chunks; None if all sequences are whole and nothing is stored.
        masked: Whole sequences with masked tokens, by length.
        adapters: Rows by adapter.
        images: The images of each sequence; empty if no sequence has images.
        token_ids: [T] int64 on the host; None if only the device has them.
    """

    input_ids: Tensor
    positions: Tensor
    token_type_ids: Tensor | None
    cu_seqlens: Tensor
    seq_lens: tuple[int, ...]
    max_seqlen: int
    skip_tokens: NDArray[np.int32] | None
    cache: BatchCache | None = None
    masked: Sequence[MaskedTokens] = ()
    adapters: Sequence[AdapterRows] = ()
    images: Sequence[tuple[ImagePatches, ...]] = ()
    token_ids: NDArray[np.int64] | None = None

    @property
    def num_tokens(self) -> int:
        """T, the rows of all sequences."""
        return self.input_ids.shape[0]

    @classmethod
    def build(
        cls,
        inputs: Sequence[TokenizedInput],
        device: torch.device,
        *,
        starts: Sequence[int] | None = None,
        cache: BatchCache | None = None,
        adapters: NDArray[np.int32] | None = None,
    ) -> PackedBatch:
        """Packs `inputs` in their order; attention is fastest if their lengths ascend.

        Args:
            inputs: Whole sequences or chunks; at least one, none empty.
            device: Device of the tensors, which are copied together.
            starts: Position of each chunk in its sequence; None if all begin at 0.
            cache: Cache of the chunks. Its tensors may be on the host.
            adapters: [N] number of each sequence's adapter, -1: no adapter; None: no sequence has one.
        """
        arrays = PackedArrays.build(inputs, starts)
        lengths = np.array(arrays.seq_lens, np.int32)
        masked = [] if arrays.num_masked is None else MaskedTokens.of(lengths, arrays.num_masked)
        types = arrays.token_type_ids
        arrays_on_host = {
            "input_ids": torch.from_numpy(arrays.token_ids),
            "positions": torch.from_numpy(arrays.positions),
            "token_type_ids": None if types is None else torch.from_numpy(types),
            "cu_seqlens": torch.from_numpy(arrays.cu_seqlens),
        }
        cached: dict[str, Tensor | None] = {name: getattr(cache, name) for name in _CACHE_ARRAYS} if cache else {}
        groups = {(number, name): getattr(group, name) for number, group in enumerate(masked) for name in _GROUP}
        adapted = AdapterRows.of(lengths, adapters)
        rows = {(number, _ADAPTER): group.rows for number, group in enumerate(adapted)}
        on_device: dict[Any, Any] = copy_to_device({**arrays_on_host, **cached, **groups, **rows}, device)
        return cls(
            **{name: on_device[name] for name in arrays_on_host},
            seq_lens=arrays.seq_lens,
            max_seqlen=max(arrays.seq_lens),
            cache=None if cache is None else replace(cache, **{name: on_device[name] for name in cached}),
            masked=[
                MaskedTokens(**{name: on_device[number, name] for name in _GROUP}) for number in range(len(masked))
            ],
            adapters=[AdapterRows(group.number, on_device[number, _ADAPTER]) for number, group in enumerate(adapted)],
            images=() if arrays.images is None else [item.images for item in inputs],
            skip_tokens=arrays.skip_tokens,
            token_ids=arrays.token_ids,
        )


K = TypeVar("K")

_ALIGNMENT: Final = 256
"""Alignment in bytes, as torch aligns its own tensors; kernels are compiled for the alignment of their inputs."""


def copy_to_device(tensors: Mapping[K, Tensor | None], device: torch.device) -> dict[K, Tensor | None]:
    """Returns the tensors on a device, under the same names. Copies only tensors of another device.

    Copies to CUDA use pinned memory, because a copy from other memory may wait for all earlier work of the stream.
    torch does not reuse pinned memory before the copies from it are complete.
    """
    host = {name: t for name, t in tensors.items() if t is not None and t.device.type != device.type}
    if not host:
        return dict(tensors)
    staged = packed(list(host.values()), pin_memory=device.type == "cuda")
    on_device = staged.to(device, non_blocking=True)
    return {**tensors, **dict(zip(host, views(on_device, list(host.values())), strict=True))}


def packed(tensors: Sequence[Tensor], *, pin_memory: bool = False) -> Tensor:
    """Returns a buffer [B] uint8 on the host with copies of the tensors, in the layout of `views`."""
    buffer = empty_for(tensors, pin_memory=pin_memory)
    for view, tensor in zip(views(buffer, tensors), tensors, strict=True):
        view.copy_(tensor)
    return buffer


def empty_for(tensors: Sequence[Tensor], *, pin_memory: bool = False) -> Tensor:
    """Returns an uninitialized buffer [B] uint8 on the host that is large enough for the tensors."""
    return torch.empty(_ends(tensors)[-1] if tensors else 0, dtype=torch.uint8, pin_memory=pin_memory)


def views(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns contiguous views of a buffer with the shapes and types of the tensors `like`, in their order."""
    starts = [end - _padded_size(tensor) for end, tensor in zip(_ends(like), like, strict=True)]
    return [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, like, strict=True)
    ]


def _ends(tensors: Sequence[Tensor]) -> list[int]:
    return list(accumulate(map(_padded_size, tensors)))


def _padded_size(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelOutput:
    """The results of one forward. T packed tokens of N sequences, width D, H attention heads.

    Attributes:
        hidden_states: [T, D], model dtype: the last layer's rows.
        attention_weights: [T, H] float32: attention of the first token of each sequence (the last one in a causal
            model) to each of its tokens in the last layer; None if it was not requested. In a batch of chunks
            [C + T, H]: the weights of each chunk's last token over the C_i tokens before the chunk and its own tokens.
        logits: [N, num_labels] float32. Set only by transformers models with a head that pools: then it is the result
            for CLASSIFY and SCORE, and `classify` must not be called.
    """

    hidden_states: Tensor
    attention_weights: Tensor | None = None
    logits: Tensor | None = None


class PackedModel(ABC):
    """A model over packed tokens. Weights never change after construction. Not thread-safe.

    Attributes:
        hidden_size: D.
        cache_spec: Layers with keys and values or states; None if sequences cannot run in chunks.
        sequence_head: Maps pooled rows [N, D] to logits [N, num_labels]; None if the checkpoint has no such head.
        token_head: Maps hidden states [T, D] to logits [T, num_labels]; None if the checkpoint has no such head.
        vocabulary_head: Maps hidden states [R, D] to vocabulary logits [R, V]; None unless ModelInfo.sparse needs it.
        is_recordable: Whether a forward on CUDA can be captured as a CUDA graph: its kernels do not depend on the
            lengths of the sequences, which it reads on the device only (engine/core/cuda_graphs.py).
    """

    hidden_size: int
    cache_spec: CacheSpec | None = None
    sequence_head: Head | None = None
    token_head: Head | None = None
    vocabulary_head: Head | None = None
    is_recordable: bool = False

    @abstractmethod
    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """Runs the model.

        Args:
            batch: At least one token.
            need_attention: Also return the attention weights.

        Raises:
            UnsupportedTaskError: Attention weights were requested, but this model cannot return them.
        """

    def classify(self, pooled_ND: Tensor) -> Tensor:
        """Returns class logits [N, num_labels], float32, of pooled rows [N, D] of any float type."""
        if self.sequence_head is None:
            raise UnsupportedTaskError("This model has no sequence classification head.", param="task")
        return self.sequence_head(pooled_ND.float())

    def classify_tokens(self, hidden_TD: Tensor) -> Tensor:
        """Returns class logits [T, num_labels], float32, of hidden states [T, D] of any float type."""
        if self.token_head is None:
            raise UnsupportedTaskError("This model has no token classification head.", param="task")
        return self.token_head(hidden_TD.float())
