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

from ...layers.embedding import padding_aware_positions
from ...layers.rows import Rows
from ...layers.weights import Weights
from ...protocol.model_info import ModelInfo
from ..base import Head
from ..heads import DenseHead
from .bert import BertConfig, BertModel, read_embedding
from .encoder import BlockNames

# transformers takes these from no configuration.
_PADDING_ID: Final = 1
_NUM_BUCKETS: Final = 32
_MAX_DISTANCE: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class MPNetConfig(BertConfig):
    """As BERT's, with the buckets of the bias."""

    vocab_size: int = 30527
    relative_attention_num_buckets: int = 32


class MPNetModel(BertModel):
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
    config: MPNetConfig

    def __init__(self, info: ModelInfo, weights: Weights) -> None:
        super().__init__(info, weights)
        bias_LLH = self.bias_BH[_buckets(info.max_model_len, self.bias_BH.device)]
        self.relative_bias = bias_LLH.permute(2, 0, 1).contiguous()

    def load_embedding(self, base: Weights) -> None:
        """Reads the embeddings, which know no token types, and the bias of each bucket."""
        config = self.config
        self.embedding = read_embedding(base, config, config.hidden_size, 0)
        self.bias_BH = base.tensor(
            "encoder.relative_attention_bias.weight", config.relative_attention_num_buckets, config.num_attention_heads
        )

    def load_sequence_head(self, weights: Weights, base: Weights, num_labels: int) -> Head:
        """The first row through a tanh layer."""
        return DenseHead(weights, "classifier.dense", "classifier.out_proj", self.hidden_size, num_labels, "tanh")

    def embed(self, rows: Rows) -> Tensor:
        """See PostNormEncoder."""
        positions_R = padding_aware_positions(rows.input_ids, rows.positions, _PADDING_ID)
        return self.embedding(rows.input_ids, positions_R, None)


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
