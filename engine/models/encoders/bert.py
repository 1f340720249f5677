"""BERT and the families that differ from it by a line: RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA.

Source: Devlin et al., BERT (arXiv 1810.04805); Liu et al., RoBERTa (1907.11692); Clark et al., ELECTRA (2003.10555).
Held to transformers 5.23 in float32 within 1e-5.

Shape letters: R rows, N sequences, D model width, E embedding width, I inner width of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...layers.embedding import BertEmbedding, padding_aware_positions
from ...layers.linear import Linear
from ...layers.rows import Rows
from ...layers.weights import Weights
from ...protocol.errors import UnsupportedModelError
from ...protocol.model_info import ModelInfo, ModelKind
from ..base import Head, read_config
from ..heads import DenseHead, LinearHead
from .encoder import BlockNames, PostNormBlock, PostNormEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig:
    """The values of config.json that the forward depends on, with transformers' defaults."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    position_embedding_type: str = "absolute"


@dataclass(frozen=True, slots=True, kw_only=True)
class RobertaConfig(BertConfig):
    """As BERT's; the padding token counts, because positions begin after it."""

    pad_token_id: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectraConfig(BertConfig):
    """As BERT's, with embeddings that may be narrower than the model."""

    embedding_size: int = 128
    hidden_size: int = 256
    num_attention_heads: int = 4
    intermediate_size: int = 1024


class BertModel(PostNormEncoder):
    """The encoder with the head that the model's kind asks for."""

    config_class: ClassVar[type[BertConfig]] = BertConfig
    base_prefix: ClassVar[str] = "bert"
    block_names: ClassVar[BlockNames] = BlockNames(
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
        "attention.output.dense",
        "attention.output.LayerNorm",
        "intermediate.dense",
        "output.dense",
        "output.LayerNorm",
    )

    def __init__(self, info: ModelInfo, weights: Weights) -> None:
        self.config = config = read_config(self.config_class, info.config)
        if config.position_embedding_type != "absolute":
            raise UnsupportedModelError(
                f"position_embedding_type is {config.position_embedding_type!r}; "
                "penstock and transformers 5 know 'absolute' alone."
            )
        self.hidden_size = config.hidden_size
        base = weights.scope_of("embeddings.word_embeddings.weight", (self.base_prefix, ""))
        self.load_embedding(base)
        sizes = (config.hidden_size, config.intermediate_size, config.num_attention_heads)
        self.blocks = [
            PostNormBlock.load(
                base.scope(f"encoder.layer.{i}"), self.block_names, *sizes, config.hidden_act, config.layer_norm_eps
            )
            for i in range(config.num_hidden_layers)
        ]
        if info.kind in (ModelKind.SEQUENCE_CLASSIFIER, ModelKind.CROSS_ENCODER):
            self.sequence_head = self.load_sequence_head(weights, base, info.num_labels)
        elif info.kind is ModelKind.TOKEN_CLASSIFIER:
            self.token_head = LinearHead(weights, "classifier", config.hidden_size, info.num_labels)

    def load_embedding(self, base: Weights) -> None:
        """Reads what turns token ids into the first hidden states."""
        self.embedding = read_embedding(base, self.config, self.config.hidden_size, self.config.type_vocab_size)

    def load_sequence_head(self, weights: Weights, base: Weights, num_labels: int) -> Head:
        """The pooler belongs to the encoder's weights, the map to the classes does not."""
        return BertSequenceHead(weights, base, self.hidden_size, num_labels)

    def embed(self, rows: Rows) -> Tensor:
        """See PostNormEncoder."""
        return self.embedding(rows.input_ids, rows.positions, rows.token_type_ids)


class BertSequenceHead:
    """logits = classifier(tanh(pooler(first row)))."""

    def __init__(self, weights: Weights, base: Weights, size: int, num_labels: int) -> None:
        self.pooler = Linear.load_head(base, "pooler.dense", size, size, activation="tanh")
        self.classifier = LinearHead(weights, "classifier", size, num_labels)

    def __call__(self, pooled_ND: Tensor) -> Tensor:
        """Returns [N, num_labels]."""
        return self.classifier(self.pooler(pooled_ND))


class RobertaModel(BertModel):
    """RoBERTa, XLM-RoBERTa and CamemBERT: positions begin at pad_token_id + 1; the head has a layer of its own."""

    config_class = RobertaConfig
    base_prefix = "roberta"
    config: RobertaConfig

    def load_sequence_head(self, weights: Weights, base: Weights, num_labels: int) -> Head:
        """The first row through a tanh layer."""
        return DenseHead(weights, "classifier.dense", "classifier.out_proj", self.hidden_size, num_labels, "tanh")

    def embed(self, rows: Rows) -> Tensor:
        """See PostNormEncoder."""
        positions_R = padding_aware_positions(rows.input_ids, rows.positions, self.config.pad_token_id)
        return self.embedding(rows.input_ids, positions_R, rows.token_type_ids)


class ElectraModel(BertModel):
    """ELECTRA: embeddings of another width are projected to the model's; the head's layer has a GELU."""

    config_class = ElectraConfig
    base_prefix = "electra"
    config: ElectraConfig

    def load_embedding(self, base: Weights) -> None:
        """Reads the embeddings and, where the widths differ, their projection."""
        size = self.config.embedding_size
        self.embedding = read_embedding(base, self.config, size, self.config.type_vocab_size)
        self.projection: Linear | None = None
        if size != self.hidden_size:
            self.projection = Linear.load(base, "embeddings_project", size, self.hidden_size)

    def load_sequence_head(self, weights: Weights, base: Weights, num_labels: int) -> Head:
        """The first row through a GELU layer."""
        return DenseHead(weights, "classifier.dense", "classifier.out_proj", self.hidden_size, num_labels, "gelu")

    def embed(self, rows: Rows) -> Tensor:
        """See PostNormEncoder."""
        embedded_RE = super().embed(rows)
        return embedded_RE if self.projection is None else self.projection(embedded_RE)


def read_embedding(base: Weights, config: BertConfig, size: int, num_token_types: int) -> BertEmbedding:
    """Reads word, position and token type rows of width `size`."""
    return BertEmbedding(
        base.scope("embeddings"),
        vocab_size=config.vocab_size,
        num_positions=config.max_position_embeddings,
        num_token_types=num_token_types,
        size=size,
        eps=config.layer_norm_eps,
    )
