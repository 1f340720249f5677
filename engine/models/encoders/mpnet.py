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

from ...layers.attention.encoder import SelfAttention
from ...layers.embedding import BertEmbedding, padding_aware_positions
from ...layers.linear import Linear
from ...layers.norm import LayerNorm
from ...layers.rows import Rows
from ...layers.weights import Weights
from ...protocol.model_info import ModelInfo, ModelKind
from ..base import read_config
from ..heads import DenseHead, LinearHead
from .encoder import PostNormBlock, PostNormEncoder

# transformers takes these from no configuration.
_PADDING_ID: Final = 1
_NUM_BUCKETS: Final = 32
_MAX_DISTANCE: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class MPNetConfig:
    """The values of config.json that the forward depends on, with transformers' defaults."""

    vocab_size: int = 30527
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    layer_norm_eps: float = 1e-12
    relative_attention_num_buckets: int = 32


class MPNetModel(PostNormEncoder):
    """The encoder with the head that the model's kind asks for."""

    def __init__(self, info: ModelInfo, weights: Weights) -> None:
        config = read_config(MPNetConfig, info.config)
        self.hidden_size = config.hidden_size
        base = weights.scope_of("embeddings.word_embeddings.weight", ("mpnet", ""))
        self.embedding = BertEmbedding(
            base.scope("embeddings"),
            vocab_size=config.vocab_size,
            num_positions=config.max_position_embeddings,
            num_token_types=0,
            size=config.hidden_size,
            eps=config.layer_norm_eps,
        )
        self.blocks = [_load_block(base.scope(f"encoder.layer.{i}"), config) for i in range(config.num_hidden_layers)]
        bias_BH = base.tensor(
            "encoder.relative_attention_bias.weight", config.relative_attention_num_buckets, config.num_attention_heads
        )
        self.relative_bias = bias_BH[_buckets(info.max_model_len, bias_BH.device)].permute(2, 0, 1).contiguous()
        if info.kind in (ModelKind.SEQUENCE_CLASSIFIER, ModelKind.CROSS_ENCODER):
            self.sequence_head = DenseHead(
                weights,
                "classifier.dense",
                "classifier.out_proj",
                config.hidden_size,
                info.num_labels,
                activation="tanh",
            )
        elif info.kind is ModelKind.TOKEN_CLASSIFIER:
            self.token_head = LinearHead(weights, "classifier", config.hidden_size, info.num_labels)

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


def _load_block(weights: Weights, config: MPNetConfig) -> PostNormBlock:
    """Reads one layer."""
    D, I, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps  # noqa: E741
    names = ("attention.attn.q", "attention.attn.k", "attention.attn.v")
    return PostNormBlock(
        attention=SelfAttention.load(weights, names, D, config.num_attention_heads),
        attention_out=Linear.load(weights, "attention.attn.o", D, D),
        attention_norm=LayerNorm.load(weights, "attention.LayerNorm", D, eps),
        mlp_in=Linear.load(weights, "intermediate.dense", D, I, activation=config.hidden_act),
        mlp_out=Linear.load(weights, "output.dense", I, D),
        mlp_norm=LayerNorm.load(weights, "output.LayerNorm", D, eps),
    )
