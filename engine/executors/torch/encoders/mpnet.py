"""MPNet: BERT with a learnt bias of the scores by the distance between two tokens.

Source: Song et al., MPNet (arXiv 2004.09297). Held to transformers 5.23 in float32 within 1e-5.

Shape letters: H heads, B buckets, L longest sequence.
"""

from __future__ import annotations

import numpy as np
import torch

from ....protocol.model_info import ModelInfo
from ...cpu.distance_buckets import distance_buckets
from ...cpu.encoder_configs import MPNetConfig
from ..layers.weights import Weights
from .encoder import PostNormEncoder


class MPNetModel(PostNormEncoder):
    """The encoder with the head that the model's kind asks for."""

    config_class = MPNetConfig

    def load_bias(self, info: ModelInfo, base: Weights) -> None:
        """See PostNormEncoder."""
        bias_BH = base.tensor(
            "encoder.relative_attention_bias.weight", self.config.num_distances, self.config.num_attention_heads
        )
        positions_L = np.arange(info.max_model_len)
        buckets_LL = torch.from_numpy(distance_buckets(positions_L[None, :] - positions_L[:, None]))
        self.relative_bias = bias_BH[buckets_LL.to(bias_BH.device)].permute(2, 0, 1).contiguous()
