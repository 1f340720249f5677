"""One class per pooling type, for library callers with the rows of whole sequences. The server uses ModelPooler.

T packed rows of N sequences, width D, H attention heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from numpy.typing import NDArray
from torch import Tensor

from ..protocol.tasks import PoolingType
from .heads import check_attention_head, token_rows
from .metadata import PoolingMetadata
from .row_ops import VectorTransform
from .tensor_ops import TensorOps, as_rows

Array = Tensor | NDArray[Any]


class Pooler(ABC):
    """Base class of all poolers. Immutable, without tensors."""

    pooling_type: ClassVar[PoolingType]

    @abstractmethod
    def pool(self, hidden_states: Array, metadata: PoolingMetadata, attention_weights: Array | None = None) -> Tensor:
        """Pools a batch of whole sequences; ChunkedPoolingManager pools chunks.

        Args:
            hidden_states: [T, D], a tensor or an array of any float type; float64 is pooled as float32. Not modified.
            metadata: Metadata of the batch.
            attention_weights: [T, H], or [T] for one weight per row. Used by AttentionWeightedPooler only.

        Returns:
            [N, D] float32, a row per sequence. Token-level types return the selected rows, [R, D].

        Raises:
            ValueError: The batch has chunks.
        """


class SequencePooler(Pooler):
    """Base class of poolers that return one row per sequence."""

    def pool(self, hidden_states: Array, metadata: PoolingMetadata, attention_weights: Array | None = None) -> Tensor:
        """Returns the pooled rows [N, D] float32."""
        _check_whole(metadata)
        return TensorOps().pool(as_rows(hidden_states), metadata, self.pooling_type, VectorTransform())


class ClsPooler(SequencePooler):
    """The first row."""

    pooling_type = PoolingType.CLS


class LastTokenPooler(SequencePooler):
    """The last row, for decoders."""

    pooling_type = PoolingType.LAST


class MeanPooler(SequencePooler):
    """The mean of the rows."""

    pooling_type = PoolingType.MEAN


class MaxPooler(SequencePooler):
    """The maximum of the rows, by column."""

    pooling_type = PoolingType.MAX


class MeanSqrtLenPooler(SequencePooler):
    """The sum of the rows over the square root of their number."""

    pooling_type = PoolingType.MEAN_SQRT_LEN


class WeightedMeanPooler(SequencePooler):
    """The mean of the rows weighted by their position, from 1 (SGPT)."""

    pooling_type = PoolingType.WEIGHTED_MEAN


class AttentionWeightedPooler(SequencePooler):
    """The mean of the rows weighted by the last layer's attention of the first token (of the last, in causal models).

    Args:
        attention_head_idx: Index of the attention head to use; None averages all heads.
        num_heads: Heads of the model, to check the index; None if unknown.

    Raises:
        ValueError: There is no such head.
    """

    pooling_type = PoolingType.ATTENTION

    def __init__(self, attention_head_idx: int | None = None, num_heads: int | None = None) -> None:
        check_attention_head(attention_head_idx, num_heads)
        self.attention_head_idx = attention_head_idx

    def pool(self, hidden_states: Array, metadata: PoolingMetadata, attention_weights: Array | None = None) -> Tensor:
        """Returns the weighted means [N, D] float32.

        Raises:
            ValueError: The weights are missing, have another shape, or have too few heads.
        """
        _check_whole(metadata)
        if attention_weights is None:
            raise ValueError("ATTENTION pooling needs the attention weights of the model")
        attention = as_rows(attention_weights)
        if attention.dim() == 2:
            check_attention_head(self.attention_head_idx, attention.shape[1])
        weights = TensorOps().row_weights(attention, self.attention_head_idx)
        return TensorOps().pool(as_rows(hidden_states), metadata, self.pooling_type, VectorTransform(), weights=weights)


class TokenPooler(Pooler):
    """Base class of poolers that return a row per token."""

    def pool(self, hidden_states: Array, metadata: PoolingMetadata, attention_weights: Array | None = None) -> Tensor:
        """Returns the selected rows [R, D] in order; see `Pooler.pool`.

        Raises:
            ValueError: A sequence has a `step_tag_id`, but the batch has no token ids.
        """
        _check_whole(metadata)
        rows, _ = token_rows(self.pooling_type, metadata)
        packed = as_rows(hidden_states)
        return packed if rows is None else TensorOps().pick(packed, rows)


class AllPooler(TokenPooler):
    """Every row."""

    pooling_type = PoolingType.ALL


class StepPooler(TokenPooler):
    """The rows of tokens with the sequence's `step_tag_id`; all rows if it has none."""

    pooling_type = PoolingType.STEP


def _check_whole(metadata: PoolingMetadata) -> None:
    if metadata.is_partial:
        raise ValueError("a pooler takes whole sequences; ChunkedPoolingManager pools chunks")


class PoolerFactory:
    """Creates the pooler of a PoolingType."""

    @staticmethod
    def create(strategy: str, *, attention_head: int | None = None, num_heads: int | None = None) -> Pooler:
        """Returns the pooler of a type.

        Args:
            strategy: Any pooling type, or its name in any case, such as "mean".
            attention_head: ATTENTION: the head to use; None averages all.
            num_heads: ATTENTION: heads of the model; None if unknown.

        Raises:
            ValueError: There is no such type (the message lists the types), or no such head.
        """
        pooling_type = PoolingType(strategy)
        if pooling_type is PoolingType.ATTENTION:
            return AttentionWeightedPooler(attention_head, num_heads)
        classes = [*SequencePooler.__subclasses__(), *TokenPooler.__subclasses__()]
        return next(pooler() for pooler in classes if pooler.pooling_type is pooling_type)
