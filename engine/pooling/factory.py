"""From the name of a pooling type to its pooler."""

from __future__ import annotations

from typing import Final

from ..protocol.tasks import PoolingType
from .poolers import (
    AllPooler,
    AttentionWeightedPooler,
    ClsPooler,
    LastTokenPooler,
    MaxPooler,
    MeanPooler,
    MeanSqrtLenPooler,
    Pooler,
    SequencePooler,
    StepPooler,
    TokenPooler,
    WeightedMeanPooler,
)

_SEQUENCE_POOLERS: Final[dict[PoolingType, type[SequencePooler]]] = {
    PoolingType.CLS: ClsPooler,
    PoolingType.LAST: LastTokenPooler,
    PoolingType.MEAN: MeanPooler,
    PoolingType.MAX: MaxPooler,
    PoolingType.MEAN_SQRT_LEN: MeanSqrtLenPooler,
    PoolingType.WEIGHTED_MEAN: WeightedMeanPooler,
}
_TOKEN_POOLERS: Final[dict[PoolingType, type[TokenPooler]]] = {
    PoolingType.ALL: AllPooler,
    PoolingType.STEP: StepPooler,
}


class PoolerFactory:
    """Makes poolers. Every member of PoolingType has one."""

    @classmethod
    def create(
        cls, pooling_type: PoolingType, *, attention_head: int | None = None, num_heads: int | None = None
    ) -> Pooler:
        """Returns the pooler of a type.

        Args:
            pooling_type: Any type.
            attention_head: ATTENTION: the head to use; None averages all.
            num_heads: ATTENTION: heads of the model, where they are known.

        Raises:
            ValueError: There is no such head.
        """
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
