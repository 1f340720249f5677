"""BERT and its variants: the encoder of the original Transformer, with norms after the residual sums.

Source: Devlin et al., BERT (arXiv 1810.04805); Liu et al., RoBERTa (1907.11692); Clark et al., ELECTRA (2003.10555);
Sanh et al., DistilBERT (1910.01108). Defaults are those of transformers 5.23.

Shape letters: D model width, E embedding width, I inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, Self

from ..protocol.errors import UnsupportedModelError
from ..protocol.model_info import ModelInfo, ModelKind
from .config_values import read_config
from .spec import (
    AttentionKind,
    AttentionSpec,
    Bias,
    EmbeddingSpec,
    Family,
    HeadSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RelativeBiasSpec,
    VocabularySpec,
    linear,
)

_KIND: Final = "full_attention"
# BERT's key -> DistilBERT's key in config.json. The other values are constants.
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
    """Weight names of a layer."""

    q: str
    k: str
    v: str
    attention_out: str
    attention_norm: str
    mlp_in: str
    mlp_out: str
    mlp_norm: str


class VocabularyNames(NamedTuple):
    """Weight names of a masked language model's head."""

    dense: str
    norm: str
    decoder: str
    biases: tuple[str, ...]


LM_HEAD: Final = VocabularyNames(
    "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", ("lm_head.bias", "lm_head.decoder.bias")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig:
    """BERT. The other families override a few values.

    Attributes:
        base_prefix: Prefix of the encoder's weights in checkpoints with a head.
        blocks_name: Prefix of the layers within the encoder.
        block_names: Weight names of a layer.
        head_names: Sequence head: names of its hidden layer and its output layer, and the activation between them.
        is_head_below_base: Whether the hidden layer of the sequence head is below the prefix of the encoder.
        vocabulary_names: Weight names of the masked language model's head; None if the family has none.
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
    head_names: ClassVar[tuple[str, str, str]] = ("pooler.dense", "classifier", "tanh")
    is_head_below_base: ClassVar[bool] = True
    vocabulary_names: ClassVar[VocabularyNames | None] = VocabularyNames(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    )

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

    @property
    def num_token_types(self) -> int:
        """Number of token types; 0 if the family has none."""
        return self.type_vocab_size

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings. They are projected if the model's width differs."""
        return self.hidden_size

    @property
    def padding_id(self) -> int | None:
        """Id of the padding token: positions begin at the id + 1. None: positions begin at 0."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RobertaConfig(BertConfig):
    """RoBERTa, XLM-RoBERTa and CamemBERT: positions begin at pad_token_id + 1; the head has its own hidden layer."""

    base_prefix: ClassVar[str] = "roberta"
    head_names: ClassVar[tuple[str, str, str]] = ("classifier.dense", "classifier.out_proj", "tanh")
    is_head_below_base: ClassVar[bool] = False
    vocabulary_names: ClassVar[VocabularyNames | None] = LM_HEAD

    pad_token_id: int = 1

    @property
    def padding_id(self) -> int:
        """Positions begin after `pad_token_id`."""
        return self.pad_token_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectraConfig(BertConfig):
    """ELECTRA: embeddings that may be narrower than the model; the head's layer has a GELU."""

    base_prefix: ClassVar[str] = "electra"
    head_names: ClassVar[tuple[str, str, str]] = ("classifier.dense", "classifier.out_proj", "gelu")
    is_head_below_base: ClassVar[bool] = False
    vocabulary_names: ClassVar[VocabularyNames | None] = None

    embedding_size: int = 128
    hidden_size: int = 256
    num_attention_heads: int = 4
    intermediate_size: int = 1024

    @property
    def embedding_width(self) -> int:
        """`embedding_size`, which may be below the width of the model."""
        return self.embedding_size


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilBertConfig(BertConfig):
    """DistilBERT: half the layers, no token types and no pooler; other keys in config.json."""

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
    head_names: ClassVar[tuple[str, str, str]] = ("pre_classifier", "classifier", "relu")
    is_head_below_base: ClassVar[bool] = False
    vocabulary_names: ClassVar[VocabularyNames | None] = VocabularyNames(
        "vocab_transform", "vocab_layer_norm", "vocab_projector", ("vocab_projector.bias",)
    )

    num_hidden_layers: int = 6

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Renames the keys of DistilBERT."""
        return read_config(cls, values, _DISTILBERT_KEYS)

    @property
    def num_token_types(self) -> int:
        """DistilBERT has no token types."""
        return 0


def bert_spec(config: BertConfig, info: ModelInfo, relative_bias: RelativeBiasSpec | None = None) -> ModelSpec:
    """Returns the spec of a model of one of the FAMILIES.

    Raises:
        UnsupportedModelError: The model has other positions than a learned table.
    """
    if config.position_embedding_type != "absolute":
        raise UnsupportedModelError(
            f"position_embedding_type is {config.position_embedding_type!r}; "
            "penstock and transformers 5 support only 'absolute'."
        )
    D, E, I = config.hidden_size, config.embedding_width, config.intermediate_size  # noqa: E741
    names = config.block_names
    head_size = D // config.num_attention_heads
    norm = partial(NormSpec, eps=config.layer_norm_eps, bias=Bias.REQUIRED)
    layers = tuple(
        LayerSpec(
            prefix=f"{config.blocks_name}.{index}",
            kind=_KIND,
            qkv=linear((names.q, names.k, names.v), D, D, D, D),
            attention_out=linear(names.attention_out, D, D),
            attention_norm=norm(name=names.attention_norm, size=D),
            mlp_in=linear(names.mlp_in, D, I, activation=config.hidden_act),
            mlp_out=linear(names.mlp_out, I, D),
            mlp_norm=norm(name=names.mlp_norm, size=D),
        )
        for index in range(config.num_hidden_layers)
    )
    return ModelSpec(
        hidden_size=D,
        prefixes=(config.base_prefix, ""),
        embedding=EmbeddingSpec(
            word_embeddings="embeddings.word_embeddings.weight",
            vocab_size=config.vocab_size,
            size=E,
            positions="embeddings.position_embeddings.weight",
            num_positions=config.max_position_embeddings,
            token_types="embeddings.token_type_embeddings.weight" if config.num_token_types else None,
            num_token_types=config.num_token_types,
            padding_id=config.padding_id,
            norm=norm(name="embeddings.LayerNorm", size=E),
            projection=linear("embeddings_project", E, D) if E != D else None,
        ),
        attention=AttentionSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_attention_heads,
            head_size=head_size,
            scale=head_size**-0.5,
        ),
        kinds={_KIND: AttentionKind()},
        layers=layers,
        is_pre_norm=False,
        relative_bias=relative_bias,
        head=_head(config, info),
        vocabulary=_vocabulary(config, info),
    )


def _head(config: BertConfig, info: ModelInfo) -> HeadSpec | None:
    D = config.hidden_size
    if info.kind is ModelKind.EMBEDDING:
        return None
    if info.kind is ModelKind.TOKEN_CLASSIFIER:
        return (linear("classifier", D, info.num_labels),)
    dense, out, activation = config.head_names
    return (
        linear(dense, D, D, activation=activation, is_below_base=config.is_head_below_base),
        linear(out, D, info.num_labels),
    )


def _vocabulary(config: BertConfig, info: ModelInfo) -> VocabularySpec | None:
    names = config.vocabulary_names
    E = config.embedding_width
    if names is None:
        return None
    return VocabularySpec(
        dense=linear(names.dense, config.hidden_size, E, activation=config.hidden_act),
        norm=NormSpec(name=names.norm, size=E, eps=config.layer_norm_eps, bias=Bias.REQUIRED),
        decoder=names.decoder,
        biases=names.biases,
    )


FAMILIES: Final = (
    Family("bert", "Bert", lambda info: bert_spec(BertConfig.read(info.config), info)),
    Family("roberta", "Roberta", lambda info: bert_spec(RobertaConfig.read(info.config), info)),
    Family("xlm-roberta", "XLMRoberta", lambda info: bert_spec(RobertaConfig.read(info.config), info)),
    Family("camembert", "Camembert", lambda info: bert_spec(RobertaConfig.read(info.config), info)),
    Family("electra", "Electra", lambda info: bert_spec(ElectraConfig.read(info.config), info)),
    Family("distilbert", "DistilBert", lambda info: bert_spec(DistilBertConfig.read(info.config), info)),
)
