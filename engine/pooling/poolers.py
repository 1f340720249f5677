"""The pooling types: each turns the token rows of every sequence of a packed batch into the rows that a head takes.

T packed rows of N sequences, width D, H attention heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.cpu import Machine
from penstock.kernels.pooling import PoolingKind, pool

from ..protocol.batch_outputs import distinct_params
from ..protocol.tasks import PoolingType
from .heads import Cut
from .metadata import PoolingMetadata
from .packing import as_rows, kept_rows

Array = Tensor | NDArray[Any]
_WHOLE_ROWS = Cut()


class Pooler(ABC):
    """Base of all pooling types. Immutable; holds no tensor."""

    @abstractmethod
    def pool(self, hidden_states: Array, metadata: PoolingMetadata, attention_weights: Array | None = None) -> Tensor:
        """Pools a batch of whole sequences; chunks go through `ModelPooler` or `PoolingMetadata.update_all`.

        Args:
            hidden_states: [T, D], a tensor or an array of any float type; float64 is pooled as float32. Not modified.
            metadata: Of the batch.
            attention_weights: [T, H], or [T] where one weight per row is known. Read by AttentionWeightedPooler only.

        Returns:
            [N, D] float32, a row per sequence; or, from token-level types, [R, D], the rows that are kept.

        Raises:
            ValueError: The batch holds chunks.
        """


class SequencePooler(Pooler):
    """A pooling type that gives one row per sequence, by one kernel call for the batch."""

    kind: ClassVar[PoolingKind]

    def pool(
        self,
        hidden_states: Array,
        metadata: PoolingMetadata,
        attention_weights: Array | None = None,
        *,
        cut: Cut = _WHOLE_ROWS,
        machine: Machine | None = None,
    ) -> Tensor:
        """Pools, cuts and normalises in one pass; see `Pooler.pool`. Returns [N, width] float32."""
        _check_whole(metadata)
        weights = self.row_weights(None if attention_weights is None else as_rows(attention_weights))
        return pool(
            metadata.packed(as_rows(hidden_states)),
            metadata.cu_seqlens,
            self.kind,
            dimensions=cut.dimensions,
            max_dimensions=cut.max_dimensions,
            normalize=cut.normalize,
            skip_tokens=metadata.skip_tokens,
            weights=None if weights is None else metadata.packed(weights),
            max_seqlen=max(metadata.seq_lens, default=None),  # short sequences need not be shared out on CUDA
            machine=machine,
        )

    def row_weights(self, attention_weights: Tensor | None) -> Tensor | None:
        """Returns the weight of every row [T], float32; None where rows count alike or by position."""
        return None


class ClsPooler(SequencePooler):
    """The first row."""

    kind = "cls"


class LastTokenPooler(SequencePooler):
    """The last row, as decoders want it."""

    kind = "last"


class MeanPooler(SequencePooler):
    """The mean of the rows."""

    kind = "mean"


class MaxPooler(SequencePooler):
    """The maximum of the rows, by column."""

    kind = "max"


class MeanSqrtLenPooler(SequencePooler):
    """The sum of the rows over the square root of their number."""

    kind = "mean_sqrt_len"


class WeightedMeanPooler(SequencePooler):
    """The mean of the rows weighted by their position, from 1 (SGPT)."""

    kind = "weighted_mean"


class AttentionWeightedPooler(SequencePooler):
    """The mean of the rows weighted by the last layer's attention of the first token (of the last, in causal models).

    Args:
        attention_head_idx: The head whose weights are used; None averages all heads.
        num_heads: Heads of the model, where they are known: a head out of range is then refused here.

    Raises:
        ValueError: There is no such head.
    """

    kind = "weighted"

    def __init__(self, attention_head_idx: int | None = None, num_heads: int | None = None) -> None:
        if attention_head_idx is not None:
            _check_head(attention_head_idx, num_heads)
        self.attention_head_idx = attention_head_idx

    def row_weights(self, attention_weights: Tensor | None) -> Tensor:
        """Returns the weight of every row [T], float32, of weights by head [T, H] or by row [T].

        Raises:
            ValueError: No weights, those of another shape, or fewer heads than the chosen one needs.
        """
        if attention_weights is None:
            raise ValueError("ATTENTION pooling needs the attention weights of the model")
        if attention_weights.dim() not in (1, 2):
            raise ValueError(f"attention weights must be [T, H] or [T], got {list(attention_weights.shape)}")
        if attention_weights.dim() == 1:
            return attention_weights.float().contiguous()
        if self.attention_head_idx is None:
            return attention_weights.float().mean(dim=1)
        _check_head(self.attention_head_idx, attention_weights.shape[1])
        return attention_weights[:, self.attention_head_idx].float().contiguous()


class TokenPooler(Pooler):
    """A pooling type that gives a row per token."""

    def pool(self, hidden_states: Array, metadata: PoolingMetadata, attention_weights: Array | None = None) -> Tensor:
        """Returns the rows that are kept [R, D], in order; see `Pooler.pool`."""
        _check_whole(metadata)
        rows, _ = self.select(metadata)
        packed = metadata.packed(as_rows(hidden_states))
        return packed if rows is None else packed.index_select(0, rows)

    @abstractmethod
    def select(self, metadata: PoolingMetadata) -> tuple[Tensor | None, tuple[int, ...]]:
        """Returns the rows that are kept [R] int64, None where it is all of them, and their number per sequence."""


class AllPooler(TokenPooler):
    """Every row."""

    def select(self, metadata: PoolingMetadata) -> tuple[Tensor | None, tuple[int, ...]]:
        """See `TokenPooler.select`."""
        return None, metadata.seq_lens


class StepPooler(TokenPooler):
    """The rows of tokens that end a step: those whose id is the sequence's `step_tag_id`; all where it has none."""

    def select(self, metadata: PoolingMetadata) -> tuple[Tensor | None, tuple[int, ...]]:
        """See `TokenPooler.select`.

        Raises:
            ValueError: A step tag is asked for and the batch has no token ids.
        """
        if all(p.step_tag_id is None for p in distinct_params(metadata.params)):
            return None, metadata.seq_lens
        if metadata.token_ids is None:
            raise ValueError("STEP pooling needs the token ids of the batch")
        tags = [-1 if p.step_tag_id is None else p.step_tag_id for p in metadata.params]
        tag_of_row = np.repeat(tags, metadata.seq_lens)
        is_kept = (metadata.token_ids == tag_of_row) | (tag_of_row < 0)
        return kept_rows(is_kept, metadata.seq_lens, metadata.cu_seqlens.device)


def _check_whole(metadata: PoolingMetadata) -> None:
    if metadata.is_partial:
        raise ValueError("a pooler takes whole sequences; add chunks with PoolingMetadata.update_all")


def _check_head(head: int, num_heads: int | None) -> None:
    if head < 0 or (num_heads is not None and head >= num_heads):
        raise ValueError(f"attention_head is {head}; the model has {num_heads} heads, numbered from 0")


_SEQUENCE_POOLERS: Final = {
    PoolingType(pooler.kind): pooler
    for pooler in (ClsPooler, LastTokenPooler, MeanPooler, MaxPooler, MeanSqrtLenPooler, WeightedMeanPooler)
}
_TOKEN_POOLERS: Final[dict[PoolingType, type[TokenPooler]]] = {
    PoolingType.ALL: AllPooler,
    PoolingType.STEP: StepPooler,
}


class PoolerFactory:
    """Makes poolers. Every member of PoolingType has one."""

    @classmethod
    def create(cls, strategy: str, *, attention_head: int | None = None, num_heads: int | None = None) -> Pooler:
        """Returns the pooler of a type.

        Args:
            strategy: Any pooling type, or its name in any case, such as "mean".
            attention_head: ATTENTION: the head to use; None averages all.
            num_heads: ATTENTION: heads of the model, where they are known.

        Raises:
            ValueError: There is no such type, and the message lists those that there are; or no such head.
        """
        pooling_type = PoolingType(strategy)
        if pooling_type.is_token_level:
            return cls.create_token(pooling_type)
        return cls.create_sequence(pooling_type, attention_head=attention_head, num_heads=num_heads)

    @staticmethod
    def create_sequence(
        pooling_type: PoolingType, *, attention_head: int | None = None, num_heads: int | None = None
    ) -> SequencePooler:
        """Returns the pooler of a sequence-level type; see `create`."""
        if pooling_type is PoolingType.ATTENTION:
            return AttentionWeightedPooler(attention_head, num_heads)
        return _SEQUENCE_POOLERS[pooling_type]()

    @staticmethod
    def create_token(pooling_type: PoolingType) -> TokenPooler:
        """Returns the pooler of a token-level type; see `create`."""
        return _TOKEN_POOLERS[pooling_type]()
