"""A batch without padding: the tokens of all sequences, or of slices of them, end to end, and where each begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .protocol.request import TokenizedInput
from .sequence_cache import BatchCache


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
    def of(cls, lengths: np.ndarray, num_hidden: np.ndarray, device: torch.device) -> list[HiddenTokens]:
        """Returns the sequences with hidden tokens by length, given lengths [N] and numbers of hidden tokens [N]."""
        starts = np.cumsum(lengths) - lengths
        groups = []
        for length in np.unique(lengths[num_hidden > 0]):
            members = np.flatnonzero((num_hidden > 0) & (lengths == length))
            places = np.arange(length)
            rows = torch.from_numpy(starts[members, None] + places)
            is_visible = torch.from_numpy(places < (length - num_hidden[members, None]))
            groups.append(cls(rows=rows.to(device), is_visible=is_visible.to(device)))
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
        skip_tokens: [N] int32, tokens at the head of each whole sequence that pooling leaves out; None for none.
        cache: What sequences bring along from earlier slices and leave for later ones; None where all of them are whole
            and nothing is kept.
        hidden: Whole sequences with tokens that no token attends to, by their length.
    """

    input_ids: Tensor
    positions: Tensor
    token_type_ids: Tensor | None
    cu_seqlens: Tensor
    seq_lens: tuple[int, ...]
    max_seqlen: int
    skip_tokens: Tensor | None
    cache: BatchCache | None = None
    hidden: Sequence[HiddenTokens] = ()

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
            inputs: At least one, none of them empty: whole sequences, or slices of them (`TokenizedInput.slice`).
            device: Where the tensors go.
            starts: Place of each slice in its sequence; None means that all begin at 0.
            cache: For slices; see the attribute.
        """
        lengths = np.array([len(i) for i in inputs], np.int64)
        cu_seqlens = np.zeros(len(inputs) + 1, np.int64)
        np.cumsum(lengths, out=cu_seqlens[1:])
        first_rows = np.repeat(cu_seqlens[:-1], lengths)
        positions = np.arange(cu_seqlens[-1]) - first_rows
        if starts is not None:
            positions += np.repeat(np.asarray(starts, np.int64), lengths)
        input_ids = np.concatenate([i.token_ids for i in inputs]).astype(np.int64)
        seq_lens = tuple(lengths.tolist())
        boundaries = np.array([i.type_boundary for i in inputs], np.int64)
        skips = np.array([i.num_prompt_tokens for i in inputs], np.int32)
        types = None
        if boundaries.any():
            never = np.iinfo(np.int64).max
            boundary_of = np.repeat(np.where(boundaries > 0, boundaries, never), lengths)
            types = (positions >= boundary_of).astype(np.int64)

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        num_hidden = np.array([i.num_hidden for i in inputs], np.int64)
        device_cu_seqlens = put(cu_seqlens.astype(np.int32))
        return cls(
            input_ids=put(input_ids),
            positions=put(positions),
            token_type_ids=None if types is None else put(types),
            cu_seqlens=device_cu_seqlens,
            seq_lens=seq_lens,
            max_seqlen=max(seq_lens),
            skip_tokens=put(skips) if skips.any() else None,
            cache=cache,
            hidden=HiddenTokens.of(lengths, num_hidden, device) if num_hidden.any() else (),
        )
