"""MPNet: BERT with a learnt bias of the scores by the distance between two tokens.

Source: Song et al., MPNet (arXiv 2004.09297); the buckets are T5's (1910.10683).
Held to transformers 5.23 in float32 within 1e-5.

Shape letters: R rows, D model width, H heads, B buckets, L longest sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ...layers.weights import Weights
from ...protocol.model_info import ModelInfo
from .encoder import BlockNames, EncoderConfig, PostNormEncoder

# transformers takes these from no configuration.
_NUM_BUCKETS: Final = 32
_MAX_DISTANCE: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class MPNetConfig(EncoderConfig):
    """As BERT's, with the buckets of the bias."""

    vocab_size: int = 30527
    relative_attention_num_buckets: int = 32


class MPNetModel(PostNormEncoder):
    """The encoder with the head that the model's kind asks for."""

    config_class = MPNetConfig
    base_prefix = "mpnet"
    block_names = BlockNames(
        "attention.attn.q",
        "attention.attn.k",
        "attention.attn.v",
        "attention.attn.o",
        "attention.LayerNorm",
        "intermediate.dense",
        "output.dense",
        "output.LayerNorm",
    )
    has_token_types = False
    padding_id = 1  # transformers takes it from no configuration
    config: MPNetConfig

    def __init__(self, info: ModelInfo, weights: Weights) -> None:
        super().__init__(info, weights)
        bias_LLH = self.bias_BH[_buckets(info.max_model_len, self.bias_BH.device)]
        self.relative_bias = bias_LLH.permute(2, 0, 1).contiguous()

    def load_embedding(self, base: Weights, size: int) -> None:
        """Reads the embeddings and the bias of each bucket."""
        super().load_embedding(base, size)
        self.bias_BH = base.tensor(
            "encoder.relative_attention_bias.weight",
            self.config.relative_attention_num_buckets,
            self.config.num_attention_heads,
        )


def _buckets(length: int, device: torch.device) -> Tensor:
    """Returns [L, L] int64: the bucket of the distance from query i to key j.

    Half of the buckets are for keys after the query. In each half, near distances have one bucket each and far ones
    share buckets that grow with the logarithm, up to _MAX_DISTANCE.
    """
    positions_L = torch.arange(length, device=device)
    distance_LL = positions_L[:, None] - positions_L[None, :]
    half = _NUM_BUCKETS // 2
    num_exact = half // 2
    magnitude_LL = distance_LL.abs()
    growth_LL = torch.log(magnitude_LL.float() / num_exact) / math.log(_MAX_DISTANCE / num_exact)
    # NOTE: cast before the sum, as transformers does; distance 0 gives -inf, which the `where` leaves out.
    far_LL = num_exact + (growth_LL.clamp(min=0) * (half - num_exact)).long()
    bucket_LL = torch.where(magnitude_LL < num_exact, magnitude_LL, far_LL.clamp(max=half - 1))
    return bucket_LL + (distance_LL < 0) * half
