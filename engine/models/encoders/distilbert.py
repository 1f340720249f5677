"""DistilBERT: BERT with half the layers, no token types and no pooler.

Source: Sanh et al., DistilBERT (arXiv 1910.01108). Held to transformers 5.23 in float32 within 1e-5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from ...layers.embedding import BertEmbedding
from ...layers.rows import Rows
from ...layers.weights import Weights
from ...protocol.model_info import ModelInfo, ModelKind
from ..base import read_config
from ..heads import DenseHead, LinearHead
from .encoder import BlockNames, PostNormBlock, PostNormEncoder

# Not in config.json.
_EPS: Final = 1e-12
_BLOCK_NAMES: Final = BlockNames(
    "attention.q_lin",
    "attention.k_lin",
    "attention.v_lin",
    "attention.out_lin",
    "sa_layer_norm",
    "ffn.lin1",
    "ffn.lin2",
    "output_layer_norm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilBertConfig:
    """The values of config.json that the forward depends on, with transformers' defaults."""

    vocab_size: int = 30522
    dim: int = 768
    n_layers: int = 6
    n_heads: int = 12
    hidden_dim: int = 3072
    activation: str = "gelu"
    max_position_embeddings: int = 512


class DistilBertModel(PostNormEncoder):
    """The encoder with the head that the model's kind asks for."""

    def __init__(self, info: ModelInfo, weights: Weights) -> None:
        config = read_config(DistilBertConfig, info.config)
        self.hidden_size = config.dim
        base = weights.scope_of("embeddings.word_embeddings.weight", ("distilbert", ""))
        self.embedding = BertEmbedding(
            base.scope("embeddings"),
            vocab_size=config.vocab_size,
            num_positions=config.max_position_embeddings,
            num_token_types=0,
            size=config.dim,
            eps=_EPS,
        )
        sizes = (config.dim, config.hidden_dim, config.n_heads)
        self.blocks = [
            PostNormBlock.load(base.scope(f"transformer.layer.{i}"), _BLOCK_NAMES, *sizes, config.activation, _EPS)
            for i in range(config.n_layers)
        ]
        if info.kind in (ModelKind.SEQUENCE_CLASSIFIER, ModelKind.CROSS_ENCODER):
            self.sequence_head = DenseHead(
                weights, "pre_classifier", "classifier", config.dim, info.num_labels, activation="relu"
            )
        elif info.kind is ModelKind.TOKEN_CLASSIFIER:
            self.token_head = LinearHead(weights, "classifier", config.dim, info.num_labels)

    def embed(self, rows: Rows) -> Tensor:
        """See PostNormEncoder."""
        return self.embedding(rows.input_ids, rows.positions, None)
