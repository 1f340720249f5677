"""BERT and the families that differ from it by a line: RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT.

Source: Devlin et al., BERT (arXiv 1810.04805); Liu et al., RoBERTa (1907.11692); Clark et al., ELECTRA (2003.10555);
Sanh et al., DistilBERT (1910.01108). Held to transformers 5.23 in float32 within 1e-5.

Shape letters: R rows, D model width, E embedding width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from torch import Tensor

from penstock.kernels.native import EncoderSpec, LayerSpec

from ...layers.linear import Linear
from ...layers.native import SpecReader
from ...layers.rows import Rows
from ...layers.weights import Weights
from ...protocol.model_info import ModelInfo
from ..base import read_config
from .encoder import BlockNames, EncoderConfig, PostNormEncoder

# BERT's value -> DistilBERT's key of config.json; the others it fixes.
_DISTILBERT_KEYS: Final = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "max_position_embeddings": "max_position_embeddings",
}


class BertModel(PostNormEncoder):
    """BERT; the hidden layer of its head, the pooler, belongs to the encoder's weights."""

    base_prefix = "bert"
    block_names = BlockNames(
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
        "attention.output.dense",
        "attention.output.LayerNorm",
        "intermediate.dense",
        "output.dense",
        "output.LayerNorm",
    )
    head_names = ("{base}pooler.dense", "classifier", "tanh")


@dataclass(frozen=True, slots=True, kw_only=True)
class RobertaConfig(EncoderConfig):
    """As BERT's; the padding token counts, because positions begin after it."""

    pad_token_id: int = 1


class RobertaModel(BertModel):
    """RoBERTa, XLM-RoBERTa and CamemBERT: positions begin at pad_token_id + 1; the head has a layer of its own."""

    config_class = RobertaConfig
    base_prefix = "roberta"
    head_names = PostNormEncoder.head_names
    config: RobertaConfig

    def __init__(self, info: ModelInfo, weights: Weights) -> None:
        super().__init__(info, weights)
        self.padding_id = self.config.pad_token_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectraConfig(EncoderConfig):
    """As BERT's, with embeddings that may be narrower than the model."""

    embedding_size: int = 128
    hidden_size: int = 256
    num_attention_heads: int = 4
    intermediate_size: int = 1024


class ElectraModel(BertModel):
    """ELECTRA: embeddings of another width are projected to the model's; the head's layer has a GELU."""

    config_class = ElectraConfig
    base_prefix = "electra"
    head_names = ("classifier.dense", "classifier.out_proj", "gelu")
    config: ElectraConfig

    def load_embedding(self, base: Weights, size: int) -> None:
        """Reads the embeddings and, where the widths differ, their projection."""
        own_size = self.config.embedding_size
        super().load_embedding(base, own_size)
        self.projection = Linear.load(base, "embeddings_project", own_size, size) if own_size != size else None

    def spec(self, info: ModelInfo, base: Weights, layers: Iterable[LayerSpec]) -> EncoderSpec:
        """See PostNormEncoder."""
        spec = super().spec(info, base, layers)
        own_size, size = self.config.embedding_size, self.config.hidden_size
        if own_size == size:
            return spec
        return replace(spec, projection=SpecReader(base).map("embeddings_project", own_size, size))

    def embed(self, rows: Rows) -> Tensor:
        """See PostNormEncoder."""
        embedded_RE = super().embed(rows)
        return embedded_RE if self.projection is None else self.projection(embedded_RE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilBertConfig(EncoderConfig):
    """BERT's values under keys of its own."""

    num_hidden_layers: int = 6

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """See EncoderConfig."""
        return read_config(cls, values, _DISTILBERT_KEYS)


class DistilBertModel(PostNormEncoder):
    """DistilBERT: half the layers, no token types and no pooler."""

    config_class = DistilBertConfig
    base_prefix = "distilbert"
    blocks_name = "transformer.layer"
    block_names = BlockNames(
        "attention.q_lin",
        "attention.k_lin",
        "attention.v_lin",
        "attention.out_lin",
        "sa_layer_norm",
        "ffn.lin1",
        "ffn.lin2",
        "output_layer_norm",
    )
    has_token_types = False
    head_names = ("pre_classifier", "classifier", "relu")
