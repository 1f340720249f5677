"""Attention on a CPU: groups of like sequences in batched products, long sequences block by block."""

from ._blockwise import attention_blockwise, takes_blockwise
from ._grouped import attention_grouped, takes_grouped
from ._plan import AttentionPlan, reach_of

__all__ = [
    "AttentionPlan",
    "attention_blockwise",
    "attention_grouped",
    "reach_of",
    "takes_blockwise",
    "takes_grouped",
]
