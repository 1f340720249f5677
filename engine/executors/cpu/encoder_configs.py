"""The families of BERT: what their config.json says, and what their checkpoints call their parts.

Source: Devlin et al., BERT (arXiv 1810.04805); Liu et al., RoBERTa (1907.11692); Clark et al., ELECTRA (2003.10555);
Sanh et al., DistilBERT (1910.01108); Song et al., MPNet (2004.09297). Defaults are those of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, Self

from ...model_files.json_files import read_config
from ...protocol.errors import UnsupportedModelError

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


class BlockNames(NamedTuple):
    """Names of the maps of one block, as a family's checkpoints have them."""

    q: str
    k: str
    v: str
    attention_out: str
    attention_norm: str
    mlp_in: str
    mlp_out: str
    mlp_norm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """BERT, which the others differ from by a line.

    Attributes:
        base_prefix: Below which checkpoints with a head keep the encoder.
        blocks_name: Below which the encoder keeps its blocks.
        block_names: The maps of a block.
        has_token_types: Whether token types have rows.
        head_names: Of the sequence head: its hidden layer, its map to the classes, and the activation between them;
            "{base}" is the encoder's prefix: BERT's hidden layer, the pooler, belongs to the encoder's weights.
    """

    base_prefix: ClassVar[str] = "bert"
    blocks_name: ClassVar[str] = "encoder.layer"
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
    has_token_types: ClassVar[bool] = True
    head_names: ClassVar[tuple[str, str, str]] = ("{base}pooler.dense", "classifier", "tanh")

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

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Returns the config of config.json."""
        return read_config(cls, values)

    def check(self) -> None:
        """Refuses what neither penstock nor transformers runs, with an UnsupportedModelError."""
        if self.position_embedding_type != "absolute":
            raise UnsupportedModelError(
                f"position_embedding_type is {self.position_embedding_type!r}; "
                "penstock and transformers 5 know 'absolute' alone."
            )

    @property
    def num_token_types(self) -> int:
        """Rows for token types; 0 where the family has none."""
        return self.type_vocab_size if self.has_token_types else 0

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings, which are projected to the model's where that is another."""
        return self.hidden_size

    @property
    def padding_id(self) -> int | None:
        """The token after whose id positions begin; None where they begin at 0."""
        return None

    @property
    def num_distances(self) -> int:
        """Buckets of the bias that is added to the scores by distance; 0 where there is none."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RobertaConfig(EncoderConfig):
    """RoBERTa, XLM-RoBERTa and CamemBERT: positions begin at pad_token_id + 1; the head has a layer of its own."""

    base_prefix: ClassVar[str] = "roberta"
    head_names: ClassVar[tuple[str, str, str]] = ("classifier.dense", "classifier.out_proj", "tanh")

    pad_token_id: int = 1

    @property
    def padding_id(self) -> int:
        """See EncoderConfig."""
        return self.pad_token_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectraConfig(EncoderConfig):
    """ELECTRA: embeddings that may be narrower than the model; the head's layer has a GELU."""

    base_prefix: ClassVar[str] = "electra"
    head_names: ClassVar[tuple[str, str, str]] = ("classifier.dense", "classifier.out_proj", "gelu")

    embedding_size: int = 128
    hidden_size: int = 256
    num_attention_heads: int = 4
    intermediate_size: int = 1024

    @property
    def embedding_width(self) -> int:
        """See EncoderConfig."""
        return self.embedding_size


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilBertConfig(EncoderConfig):
    """DistilBERT: half the layers, no token types and no pooler; BERT's values under keys of its own."""

    base_prefix: ClassVar[str] = "distilbert"
    blocks_name: ClassVar[str] = "transformer.layer"
    block_names: ClassVar[BlockNames] = BlockNames(
        "attention.q_lin",
        "attention.k_lin",
        "attention.v_lin",
        "attention.out_lin",
        "sa_layer_norm",
        "ffn.lin1",
        "ffn.lin2",
        "output_layer_norm",
    )
    has_token_types: ClassVar[bool] = False
    head_names: ClassVar[tuple[str, str, str]] = ("pre_classifier", "classifier", "relu")

    num_hidden_layers: int = 6

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """See EncoderConfig."""
        return read_config(cls, values, _DISTILBERT_KEYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MPNetConfig(EncoderConfig):
    """MPNet: a learnt bias of the scores by the distance between two tokens, in buckets."""

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
    has_token_types: ClassVar[bool] = False
    head_names: ClassVar[tuple[str, str, str]] = ("classifier.dense", "classifier.out_proj", "tanh")

    vocab_size: int = 30527
    relative_attention_num_buckets: int = 32

    @property
    def padding_id(self) -> int:
        """See EncoderConfig. transformers takes it from no configuration."""
        return 1

    @property
    def num_distances(self) -> int:
        """See EncoderConfig."""
        return self.relative_attention_num_buckets
