"""The encoder of the original Transformer, which BERT, DistilBERT and MPNet share to the letter.

Source: Vaswani et al., Attention Is All You Need (arXiv 1706.03762), figure 1, left.
Shape letters: T packed tokens in R rows, D model width, H heads, L longest sequence, I inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from torch import Tensor

from penstock.kernels.attention import AttentionPlan
from penstock.kernels.native import EncoderSpec, LayerSpec

from ...layers.attention.encoder import SelfAttention
from ...layers.embedding import BertEmbedding, padding_aware_positions
from ...layers.linear import Linear
from ...layers.native import NativeForward, SpecReader, as_floats, as_words, native_activation
from ...layers.norm import LayerNorm
from ...layers.rows import Rows
from ...layers.weights import Weights
from ...protocol.errors import UnsupportedModelError
from ...protocol.model_info import ModelInfo, ModelKind
from ..base import ModelOutput, NativeModel, read_config
from ..heads import DenseHead

if TYPE_CHECKING:
    from ...packed_batch import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """The values of config.json that the forward depends on, with transformers' defaults for BERT."""

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
class PostNormBlock:
    """Attention, then MLP, each followed by the sum with its input and a LayerNorm.

    Attributes:
        attention: Without its output projection.
        attention_out: The output projection, D to D.
        attention_norm: After the first sum.
        mlp_in: D to I, with its activation.
        mlp_out: I to D.
        mlp_norm: After the second sum.
    """

    attention: SelfAttention
    attention_out: Linear
    attention_norm: LayerNorm
    mlp_in: Linear
    mlp_out: Linear
    mlp_norm: LayerNorm

    @classmethod
    def load(cls, weights: Weights, names: BlockNames, config: EncoderConfig) -> PostNormBlock:
        """Reads one block."""
        D, I, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps  # noqa: E741
        return cls(
            attention=SelfAttention.load(weights, names[:3], D, config.num_attention_heads),
            attention_out=Linear.load(weights, names.attention_out, D, D),
            attention_norm=LayerNorm.load(weights, names.attention_norm, D, eps),
            mlp_in=Linear.load(weights, names.mlp_in, D, I, activation=config.hidden_act),
            mlp_out=Linear.load(weights, names.mlp_out, I, D),
            mlp_norm=LayerNorm.load(weights, names.mlp_norm, D, eps),
        )

    @staticmethod
    def spec(weights: Weights, names: BlockNames, config: EncoderConfig) -> LayerSpec:
        """Reads one block for the native kernels, without what the family adds to the scores."""
        D, I, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps  # noqa: E741
        read = SpecReader(weights)
        activation = native_activation(config.hidden_act)
        assert activation is not None
        return LayerSpec(
            attention_norm=read.norm(names.attention_norm, D, eps),
            qkv=read.qkv(names[:3], D, config.num_attention_heads),
            attention_out=read.map(names.attention_out, D, D),
            mlp_norm=read.norm(names.mlp_norm, D, eps),
            mlp_in=read.map(names.mlp_in, D, I, activation=activation),
            mlp_out=read.map(names.mlp_out, I, D),
        )

    def __call__(self, hidden_RD: Tensor, rows: Rows, plan: AttentionPlan, relative_bias: Tensor | None) -> Tensor:
        """Returns the next hidden states."""
        attended_RD = self.attention(hidden_RD, rows, plan, relative_bias=relative_bias)
        hidden_RD = self.attention_norm(self.attention_out(attended_RD, add=hidden_RD))
        inner_RI = self.mlp_in(hidden_RD)
        return self.mlp_norm(self.mlp_out(inner_RI, add=hidden_RD))


class PostNormEncoder(NativeModel):
    """Embedding, then blocks, and the head that the model's kind asks for.

    Attributes:
        config_class: What config.json is read into.
        base_prefix: Below which checkpoints with a head keep the encoder.
        blocks_name: Below which the encoder keeps its blocks.
        block_names: The maps of a block.
        has_token_types: Whether token types have rows.
        head_names: Of the sequence head: its hidden layer, its map to the classes, and the activation between them;
            "{base}" is the encoder's prefix.
        padding_id: The token after whose id positions begin; None where they begin at 0.
        blocks: At least one; none where the native kernels run.
        native: Runs the encoder where the native kernels can.
        relative_bias: [H, L, L], added to the scores of every block; None where the family has none.
    """

    config_class: ClassVar[type[EncoderConfig]] = EncoderConfig
    base_prefix: ClassVar[str]
    blocks_name: ClassVar[str] = "encoder.layer"
    block_names: ClassVar[BlockNames]
    has_token_types: ClassVar[bool] = True
    head_names: ClassVar[tuple[str, str, str]] = ("classifier.dense", "classifier.out_proj", "tanh")
    padding_id: int | None = None
    relative_bias: Tensor | None = None
    native: NativeForward | None = None
    blocks: Sequence[PostNormBlock] = ()

    def __init__(self, info: ModelInfo, weights: Weights) -> None:
        self.config = config = self.config_class.read(info.config)
        if config.position_embedding_type != "absolute":
            raise UnsupportedModelError(
                f"position_embedding_type is {config.position_embedding_type!r}; "
                "penstock and transformers 5 know 'absolute' alone."
            )
        self.hidden_size = D = config.hidden_size
        base = weights.scope_of("embeddings.word_embeddings.weight", (self.base_prefix, ""))
        self.load_embedding(base, D)
        scopes = [base.scope(f"{self.blocks_name}.{i}") for i in range(config.num_hidden_layers)]
        self.machine = base.machine
        if base.machine is not None:
            layers = (PostNormBlock.spec(scope, self.block_names, config) for scope in scopes)
            self.native = NativeForward(base.machine, self.spec(info, base, layers), base.dtype)
        else:
            self.blocks = [PostNormBlock.load(scope, self.block_names, config) for scope in scopes]
            self.load_bias(info)
        if info.kind in (ModelKind.SEQUENCE_CLASSIFIER, ModelKind.CROSS_ENCODER):
            dense, out, activation = self.head_names
            dense = dense.format(base=base.prefix)
            self.sequence_head = DenseHead(weights, dense, out, D, info.num_labels, activation)
        elif info.kind is ModelKind.TOKEN_CLASSIFIER:
            self.token_head = Linear.load(weights, "classifier", D, info.num_labels, is_head=True)

    @classmethod
    def fits_native_kernels(cls, config: Mapping[str, Any]) -> bool:
        """See NativeModel."""
        return native_activation(cls.config_class.read(config).hidden_act) is not None

    def load_embedding(self, base: Weights, size: int) -> None:
        """Reads what turns token ids into rows of width `size`."""
        self.embedding = BertEmbedding(
            base.scope("embeddings"),
            vocab_size=self.config.vocab_size,
            num_positions=self.config.max_position_embeddings,
            num_token_types=self.config.type_vocab_size if self.has_token_types else 0,
            size=size,
            eps=self.config.layer_norm_eps,
        )

    def load_bias(self, info: ModelInfo) -> None:
        """Prepares what the family adds to the scores."""

    def spec(self, info: ModelInfo, base: Weights, layers: Iterable[LayerSpec]) -> EncoderSpec:
        """Returns the encoder as the native kernels take it.

        Args:
            info: The resolved model.
            base: View of the encoder's weights.
            layers: Its blocks.
        """
        table = self.embedding.word_VE
        return EncoderSpec(
            num_heads=self.config.num_attention_heads,
            pre_norm=False,
            words=as_words(table),
            places=as_floats(self.embedding.position_type_QE),
            embedding_norm=SpecReader(base.scope("embeddings")).norm(
                "LayerNorm", table.shape[1], self.config.layer_norm_eps
            ),
            layers=layers,
        )

    def embed(self, rows: Rows) -> Tensor:
        """Returns the first hidden states [R, D]."""
        return self.embedding(rows.input_ids, self._positions(rows.input_ids, rows.positions), rows.token_type_ids)

    def _positions(self, input_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Returns the family's positions of tokens, [T]."""
        if self.padding_id is None:
            return positions_T
        return padding_aware_positions(input_ids_T, positions_T, self.padding_id)

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """See PackedModel."""
        if self.native is not None:
            places_T = self.embedding.places(self._positions(batch.input_ids, batch.positions), batch.token_type_ids)
            hidden_TD, attention_TH = self.native(batch, places_T, need_attention=need_attention)
            return ModelOutput(hidden_states=hidden_TD, attention_weights=attention_TH)
        rows = Rows.of(batch)
        last = self.blocks[-1].attention
        plan = last.plan(rows)
        hidden_RD = block_input_RD = self.embed(rows)
        for block in self.blocks:
            block_input_RD, hidden_RD = hidden_RD, block(hidden_RD, rows, plan, self.relative_bias)
        attention_TH = None
        if need_attention:
            attention_TH = last.first_token_weights(block_input_RD, rows, relative_bias=self.relative_bias)
        return ModelOutput(hidden_states=rows.trim(hidden_RD), attention_weights=attention_TH)
