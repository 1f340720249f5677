"""MPNet: BERT with a learnt bias of the scores by the distance between two tokens.

Source: Song et al., MPNet (arXiv 2004.09297); the buckets are T5's (1910.10683).
Held to transformers 5.23 in float32 within 1e-5.

Shape letters: R rows, D model width, H heads, B buckets, L longest sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from penstock.kernels.native import EncoderSpec, LayerSpec

from ...layers.native import as_floats
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

    def load_bias(self, info: ModelInfo) -> None:
        """See PostNormEncoder."""
        positions_L = torch.arange(info.max_model_len, device=self.bias_BH.device)
        bias_LLH = self.bias_BH[_buckets(positions_L[None, :] - positions_L[:, None])]
        self.relative_bias = bias_LLH.permute(2, 0, 1).contiguous()

    def spec(self, info: ModelInfo, base: Weights, layers: Iterable[LayerSpec]) -> EncoderSpec:
        """See PostNormEncoder."""
        distances = torch.arange(-info.max_model_len, info.max_model_len + 1)
        bias = as_floats(self.bias_BH[_buckets(distances)].t())
        return super().spec(info, base, (replace(layer, bias=bias) for layer in layers))

    def load_embedding(self, base: Weights, size: int) -> None:
        """Reads the embeddings and the bias of each bucket."""
        super().load_embedding(base, size)
        self.bias_BH = base.tensor(
            "encoder.relative_attention_bias.weight",
            self.config.relative_attention_num_buckets,
            self.config.num_attention_heads,
        )


def _buckets(ahead: Tensor) -> Tensor:
    """Returns the bucket, int64, of each distance from a query to a key that lies so many tokens ahead.

    Half of the buckets are for keys after the query. In each half, near distances have one bucket each and far ones
    share buckets that grow with the logarithm, up to _MAX_DISTANCE.
    """
    half = _NUM_BUCKETS // 2
    num_exact = half // 2
    magnitude = ahead.abs()
    growth = torch.log(magnitude.float() / num_exact) / math.log(_MAX_DISTANCE / num_exact)
    # NOTE: cast before the sum, as transformers does; distance 0 gives -inf, which the `where` leaves out.
    far = num_exact + (growth.clamp(min=0) * (half - num_exact)).long()
    return torch.where(magnitude < num_exact, magnitude, far.clamp(max=half - 1)) + (ahead > 0) * half
