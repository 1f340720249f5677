"""MPNet: BERT with a learned bias of the attention scores by the distance between two tokens.

Source: Song et al., MPNet (arXiv 2004.09297). The buckets of distances are those of T5 (Raffel et al., 1910.10683).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from ..protocol.model_info import ModelInfo
from .bert import LM_HEAD, BertConfig, BlockNames, VocabularyNames, bert_spec
from .spec import Family, ModelSpec, RelativeBiasSpec

# Constants in transformers.
_NUM_BUCKETS: Final = 32
_MAX_DISTANCE: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class MPNetConfig(BertConfig):
    """MPNet: a learned bias of the attention scores by the distance between two tokens, in buckets."""

    base_prefix: ClassVar[str] = "mpnet"
    block_names: ClassVar[BlockNames] = BlockNames(
        "attention.attn.q",
        "attention.attn.k",
        "attention.attn.v",
        "attention.attn.o",
        "attention.LayerNorm",
        "intermediate.dense",
        "output.dense",
        "output.LayerNorm",
    )
    head_names: ClassVar[tuple[str, str, str]] = ("classifier.dense", "classifier.out_proj", "tanh")
    is_head_below_base: ClassVar[bool] = False
    vocabulary_names: ClassVar[VocabularyNames | None] = LM_HEAD

    vocab_size: int = 30527
    relative_attention_num_buckets: int = 32

    @property
    def padding_id(self) -> int:
        """A constant in transformers."""
        return 1

    @property
    def num_token_types(self) -> int:
        """MPNet has no token types."""
        return 0


def distance_buckets(ahead: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the bucket, int64, of each distance. `ahead`: position of the key minus position of the query.

    Half of the buckets are for keys after the query. In each half, short distances have one bucket each. Long distances
    share buckets of logarithmic size, up to _MAX_DISTANCE.
    """
    half = _NUM_BUCKETS // 2
    num_exact = half // 2
    magnitude = np.abs(ahead)
    # In float32 as in transformers, which decides the bounds of buckets. `np.where` excludes distance 0.
    logarithm = np.log(np.maximum(magnitude, 1) / num_exact).astype(np.float32)
    growth = logarithm / np.float32(math.log(_MAX_DISTANCE / num_exact))
    far = num_exact + (np.maximum(growth, 0) * (half - num_exact)).astype(np.int64)
    buckets: NDArray[np.int64] = np.where(magnitude < num_exact, magnitude, np.minimum(far, half - 1))
    return buckets + (ahead > 0) * half


def _spec(info: ModelInfo) -> ModelSpec:
    config = MPNetConfig.read(info.config)
    bias = RelativeBiasSpec(
        name="encoder.relative_attention_bias.weight",
        num_buckets=config.relative_attention_num_buckets,
        bucket_of=distance_buckets,
    )
    return bert_spec(config, info, bias)


FAMILIES: Final = (Family("mpnet", "MPNet", _spec),)
