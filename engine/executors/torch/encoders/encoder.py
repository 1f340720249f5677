"""The encoder of the original Transformer, which BERT, DistilBERT and MPNet share to the letter.

Source: Vaswani et al., Attention Is All You Need (arXiv 1706.03762), figure 1, left.
Shape letters: T packed tokens in R rows, D model width, H heads, L longest sequence, I inner width of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from ....protocol.model_info import ModelInfo, ModelKind
from ...cpu.encoder_configs import BlockNames, EncoderConfig
from ..base import ModelOutput, NativeModel
from ..heads import DenseHead
from ..layers.attention.encoder import SelfAttention
from ..layers.embedding import BertEmbedding, padding_aware_positions
from ..layers.fusion import Fusion
from ..layers.linear import Linear
from ..layers.norm import LayerNorm
from ..layers.residual import Residual
from ..layers.rows import Rows
from ..layers.weights import Weights

if TYPE_CHECKING:
    from ..packed_batch import PackedBatch


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
        is_fused: Whether the norms make the sums.
    """

    attention: SelfAttention
    attention_out: Linear
    attention_norm: LayerNorm
    mlp_in: Linear
    mlp_out: Linear
    mlp_norm: LayerNorm
    is_fused: bool

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
            is_fused=weights.fusion is Fusion.FUSED,
        )

    def __call__(self, hidden_RD: Tensor, rows: Rows, relative_bias: Tensor | None) -> Tensor:
        """Returns the next hidden states."""
        attended_RD = self.attention(hidden_RD, rows, relative_bias=relative_bias)
        return self.after_attention(attended_RD, hidden_RD)

    def after_attention(self, attended_RD: Tensor, hidden_RD: Tensor) -> Tensor:
        """Returns the next hidden states: all of the block between two attentions, which looks at no border.

        Without fusion it is torch's operations alone, and torch.compile takes it whole.
        """
        stream = Residual(hidden_RD, is_fused=self.is_fused).plus(self.attention_out, attended_RD)
        hidden_RD = stream.normed(self.attention_norm)
        stream = Residual(hidden_RD, is_fused=self.is_fused).plus(self.mlp_out, self.mlp_in(hidden_RD))
        return stream.normed(self.mlp_norm)


class PostNormEncoder(NativeModel):
    """Embedding, then blocks, and the head that the model's kind asks for.

    Attributes:
        config_class: What config.json is read into, and what the family's checkpoints call their parts.
        blocks: At least one.
        relative_bias: [H, L, L], added to the scores of every block; None where the family has none.
    """

    config_class: ClassVar[type[EncoderConfig]] = EncoderConfig
    relative_bias: Tensor | None = None
    is_recordable = True

    def __init__(self, info: ModelInfo, weights: Weights) -> None:
        self.config = config = self.config_class.read(info.config)
        config.check()
        self.hidden_size = D = config.hidden_size
        base = weights.scope_of("embeddings.word_embeddings.weight", (config.base_prefix, ""))
        self.load_embedding(base)
        scopes = [base.scope(f"{config.blocks_name}.{i}") for i in range(config.num_hidden_layers)]
        self.blocks = [PostNormBlock.load(scope, config.block_names, config) for scope in scopes]
        self.load_bias(info, base)
        if info.kind in (ModelKind.SEQUENCE_CLASSIFIER, ModelKind.CROSS_ENCODER):
            dense, out, activation = config.head_names
            dense = dense.format(base=base.prefix)
            self.sequence_head = DenseHead(weights, dense, out, D, info.num_labels, activation)
        elif info.kind is ModelKind.TOKEN_CLASSIFIER:
            self.token_head = Linear.load(weights, "classifier", D, info.num_labels, is_head=True)

    def load_embedding(self, base: Weights) -> None:
        """Reads what turns token ids into rows."""
        config = self.config
        self.embedding = BertEmbedding(
            base.scope("embeddings"),
            vocab_size=config.vocab_size,
            num_positions=config.max_position_embeddings,
            num_token_types=config.num_token_types,
            size=config.embedding_width,
            eps=config.layer_norm_eps,
        )

    def load_bias(self, info: ModelInfo, base: Weights) -> None:
        """Prepares what the family adds to the scores."""

    def embed(self, rows: Rows) -> Tensor:
        """Returns the first hidden states [R, D]."""
        positions_R = rows.positions
        if self.config.padding_id is not None:
            positions_R = padding_aware_positions(rows.input_ids, positions_R, self.config.padding_id)
        return self.embedding(rows.input_ids, positions_R, rows.token_type_ids)

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """See PackedModel."""
        rows = Rows.of(batch)
        last = self.blocks[-1].attention
        hidden_RD = block_input_RD = self.embed(rows)
        for block in self.blocks:
            block_input_RD, hidden_RD = hidden_RD, block(hidden_RD, rows, self.relative_bias)
        attention_TH = None
        if need_attention:
            attention_TH = last.first_token_weights(block_input_RD, rows, relative_bias=self.relative_bias)
        return ModelOutput(hidden_states=rows.trim(hidden_RD), attention_weights=attention_TH)
