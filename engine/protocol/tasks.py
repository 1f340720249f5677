"""Tasks and pooling types. Values are the names in requests and files."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any


class PoolingTask(StrEnum):
    """Task of a request."""

    EMBED = "embed"
    CLASSIFY = "classify"
    SCORE = "score"
    TOKEN_EMBED = "token_embed"
    TOKEN_CLASSIFY = "token_classify"
    SPARSE_EMBED = "sparse_embed"


class PoolingType(StrEnum):
    """How token rows become the output of a sequence. Values are the names in requests and files.

    FIRST, LAST_TOKEN and ATTENTION_WEIGHTED are other names of CLS, LAST and ATTENTION. `PoolingType("mean")`
    accepts every name in any case, with "-" as "_": "attention-weighted".

    Raises:
        ValueError: No type has that name; the message lists the known types.
    """

    CLS = "CLS"
    LAST = "LAST"
    MEAN = "MEAN"
    MAX = "MAX"
    MEAN_SQRT_LEN = "MEAN_SQRT_LEN"
    WEIGHTED_MEAN = "WEIGHTED_MEAN"
    ATTENTION = "ATTENTION"
    ALL = "ALL"
    STEP = "STEP"
    FIRST = "CLS"
    LAST_TOKEN = "LAST"
    ATTENTION_WEIGHTED = "ATTENTION"

    @classmethod
    def _missing_(cls, value: object) -> PoolingType:
        found = cls.__members__.get(str(value).upper().replace("-", "_"))
        if found is None:
            raise ValueError(f"there is no pooling type {value!r}; known are {listed(cls)}.")
        return found

    @property
    def is_token_level(self) -> bool:
        """True if the output has one row per token (ALL, STEP)."""
        return self in (PoolingType.ALL, PoolingType.STEP)


PoolingStrategy = PoolingType
"""Another name of PoolingType."""


class ChunkedProcessingMode(StrEnum):
    """How over-long text becomes one embedding; see long_text.py. Values of `chunked_processing_mode`."""

    WINDOWS = "windows"
    VLLM = "vllm"


def listed(values: Any) -> str:
    """Returns values as a comma-separated list for an error message."""
    return ", ".join(str(getattr(value, "value", value)) for value in values) or "none"


class PriorityLevel(IntEnum):
    """Named priorities of requests. Any other integer is a level, too. Lower runs first."""

    CRITICAL = -2
    HIGH = -1
    NORMAL = 0
    LOW = 1


ChunkPriority = PriorityLevel
"""Name of PriorityLevel in the specification, for callers of ChunkedPrefillManager."""
