"""The input of one forward as arrays: the packed tokens of all sequences or chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu import BatchBlocks

from ...protocol.images import ImagePatches
from ...protocol.request import TokenizedInput


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedArrays:
    """T packed tokens of N sequences.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, position of each token in its whole sequence, from 0.
        token_type_ids: [T] int64; None if all are 0.
        cu_seqlens: [N+1] int32, prefix sums of the lengths.
        seq_lens: Rows of each sequence.
        skip_tokens: [N] int32, tokens at the start of each sequence that pooling leaves out; None: no tokens.
        num_masked: [N] int32, tokens at the end of each sequence that no token attends to; None: no tokens.
        adapters: [N] int32, number of each sequence's adapter, -1: no adapter; None: no sequence has one.
        kv_blocks: Blocks of keys and values; None if all sequences are whole and nothing is stored.
        images: The images of the sequences, in order; None: there are none.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    token_type_ids: NDArray[np.int64] | None
    cu_seqlens: NDArray[np.int32]
    seq_lens: tuple[int, ...]
    skip_tokens: NDArray[np.int32] | None = None
    num_masked: NDArray[np.int32] | None = None
    adapters: NDArray[np.int32] | None = None
    kv_blocks: BatchBlocks | None = None
    images: Sequence[ImagePatches] | None = None

    @classmethod
    def build(
        cls,
        inputs: Sequence[TokenizedInput],
        starts: Sequence[int] | None = None,
        kv_blocks: BatchBlocks | None = None,
        adapters: NDArray[np.int32] | None = None,
    ) -> PackedArrays:
        """Packs `inputs` in their order.

        Args:
            inputs: At least one. Whole sequences or chunks, not empty.
            starts: Position of each chunk in its sequence; None: all begin at 0.
            kv_blocks: Blocks of keys and values; None if all sequences are whole and nothing is stored.
            adapters: [N] int32, number of each sequence's adapter, -1: no adapter; None: no sequence has one.
        """
        seq_lens = tuple(map(len, inputs))
        lengths = np.array(seq_lens, np.int32)
        cu_seqlens = np.zeros(len(inputs) + 1, np.int32)
        lengths.cumsum(out=cu_seqlens[1:])
        positions = np.arange(cu_seqlens[-1], dtype=np.int64)
        if len(inputs) > 1:
            positions -= cu_seqlens[:-1].repeat(lengths)
        if starts is not None:
            positions += np.repeat(np.asarray(starts, np.int64), lengths)
        types = skips = num_masked = None
        if any(i.type_boundary for i in inputs):
            boundaries = np.array([i.type_boundary for i in inputs], np.int64)
            never = np.iinfo(np.int64).max
            types = (positions >= np.repeat(np.where(boundaries > 0, boundaries, never), lengths)).astype(np.int64)
        if any(i.num_skipped_tokens for i in inputs):
            skips = np.array([i.num_skipped_tokens for i in inputs], np.int32)
        if any(i.num_masked for i in inputs):
            num_masked = np.array([i.num_masked for i in inputs], np.int32)
        return cls(
            token_ids=np.concatenate([i.token_ids for i in inputs], dtype=np.int64),
            positions=positions,
            token_type_ids=types,
            cu_seqlens=cu_seqlens,
            seq_lens=seq_lens,
            skip_tokens=skips,
            num_masked=num_masked,
            adapters=adapters,
            kv_blocks=kv_blocks,
            images=[image for i in inputs for image in i.images] or None,
        )

    @property
    def num_tokens(self) -> int:
        """T, the number of packed tokens."""
        return len(self.token_ids)

    def pooled(self) -> PackedArrays:
        """Returns the batch after a step that pools each sequence to one row."""
        num_seqs, firsts = len(self.seq_lens), self.cu_seqlens[:-1]
        return replace(
            self,
            token_ids=self.token_ids[firsts],
            positions=self.positions[firsts],
            cu_seqlens=np.arange(num_seqs + 1, dtype=np.int32),
            seq_lens=(1,) * num_seqs,
        )
