"""ModernBERT: rotary positions, pre-norm, GeGLU, no biases, and global attention only in every third layer.

Source: Warner et al., Smarter, Better, Faster, Longer (arXiv 2412.13663).
Held to transformers 5.23 in float32 within 1e-5.

Shape letters: T packed tokens in R rows, N sequences, D model width, I inner width of the MLP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.norm import Embeddings, embed_norm

from ....protocol.model_info import ModelInfo, ModelKind
from ...cpu.modernbert import LOCAL, ModernBertConfig, rope_theta
from ...cpu.rope_spec import RopeSpec
from ..base import ModelOutput, NativeModel
from ..layers.attention.encoder import SelfAttention
from ..layers.attention.rotary import RotaryEmbedding, Rotation
from ..layers.fusion import Fusion
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp
from ..layers.norm import LayerNorm
from ..layers.residual import Residual
from ..layers.rows import Rows
from ..layers.weights import Weights

if TYPE_CHECKING:
    from ..packed_batch import PackedBatch


class ModernBertLayer:
    """x + Attention(Norm(x)), then x + GeGLU(Norm(x)). The first layer's input comes normalised."""

    def __init__(self, weights: Weights, config: ModernBertConfig, index: int) -> None:
        D = config.hidden_size
        self.type = config.types[index]
        reach = config.local_attention // 2
        self.attention_norm = _load_norm(weights, "attn_norm", config) if index else None
        self.attention = SelfAttention.load(
            weights,
            ("attn.Wqkv",),
            D,
            config.num_attention_heads,
            bias=config.attention_bias,
            window=(reach, reach) if self.type == LOCAL else None,
        )
        self.attention_out = Linear.load(weights, "attn.Wo", D, D, bias=config.attention_bias)
        self.mlp_norm = _load_norm(weights, "mlp_norm", config)
        self.mlp = GatedMlp.load(
            weights.scope("mlp"),
            D,
            config.intermediate_size,
            activation=config.hidden_activation,
            names=("Wi",),
            down="Wo",
            bias=config.mlp_bias,
        )

    def __call__(self, stream: Residual, rows: Rows, rotation: Rotation) -> Residual:
        """Returns the next hidden states."""
        x_RD, stream = self.attention_input(stream)
        attended_RD = self.attention(x_RD, rows, rotation=rotation)
        return self.after_attention(attended_RD, stream)

    def attention_input(self, stream: Residual) -> tuple[Tensor, Residual]:
        """Returns what attention reads [R, D], and the hidden states beside it."""
        if self.attention_norm is None:
            return stream.hidden, stream
        return stream.normed_and_sum(self.attention_norm)

    def after_attention(self, attended_RD: Tensor, stream: Residual) -> Residual:
        """Returns the next hidden states, of what attention gives [R, D]; looks at no border."""
        stream = stream.plus(self.attention_out, attended_RD)
        x_RD, stream = stream.normed_and_sum(self.mlp_norm)
        return stream.plus(self.mlp, x_RD)


class ModernBertModel(NativeModel):
    """The encoder with the head that the model's kind asks for."""

    is_recordable = True

    def __init__(self, info: ModelInfo, weights: Weights) -> None:
        config = ModernBertConfig.read(info.config)
        self.hidden_size = D = config.hidden_size
        base = weights.scope_of("embeddings.tok_embeddings.weight", ("model", ""))
        self.embedding_VD = base.table("embeddings.tok_embeddings.weight", config.vocab_size, D)
        head_size = D // config.num_attention_heads
        ropes = {
            layer_type: RopeSpec(theta=rope_theta(info.config, layer_type), size=head_size)
            for layer_type in set(config.types)
        }
        self.embedding_norm = _load_norm(base, "embeddings.norm", config)
        self.layers = [ModernBertLayer(base.scope(f"layers.{i}"), config, i) for i in range(config.num_hidden_layers)]
        self.final_norm = _load_norm(base, "final_norm", config)
        self.is_fused = weights.fusion is Fusion.FUSED
        self.rotary = {layer_type: RotaryEmbedding(rope, base.device) for layer_type, rope in ropes.items()}
        if info.kind is not ModelKind.EMBEDDING:
            self.set_head(info.kind, ModernBertHead(weights, config, info.num_labels))

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """See PackedModel."""
        rows = Rows.of(batch)
        rotations = {layer_type: rotary(batch) for layer_type, rotary in self.rotary.items()}
        stream = layer_input = Residual(self.embed(rows), is_fused=self.is_fused)
        for layer in self.layers:
            layer_input, stream = stream, layer(stream, rows, rotations[layer.type])
        attention_TH = None
        if need_attention:
            last = self.layers[-1]
            x_RD, _ = last.attention_input(layer_input)
            attention_TH = last.attention.first_token_weights(x_RD, rows, rotation=rotations[last.type])
        return ModelOutput(hidden_states=rows.trim(stream.normed(self.final_norm)), attention_weights=attention_TH)

    def embed(self, rows: Rows) -> Tensor:
        """Returns the first hidden states [R, D]."""
        norm = self.embedding_norm
        if norm.backend == "triton":
            tables = Embeddings(self.embedding_VD)
            return embed_norm(
                rows.input_ids, tables, norm.norm, out_dtype=self.embedding_VD.dtype, backend=norm.backend
            )
        return norm(F.embedding(rows.input_ids, self.embedding_VD))


class ModernBertHead:
    """logits = classifier(Norm(gelu(dense(x)))), for a pooled row or for every token. float32."""

    def __init__(self, weights: Weights, config: ModernBertConfig, num_labels: int) -> None:
        D, activation = config.hidden_size, config.classifier_activation
        self.dense = Linear.load(
            weights, "head.dense", D, D, bias=config.classifier_bias, activation=activation, is_head=True
        )
        self.norm = _load_norm(weights, "head.norm", config, dtype=torch.float32)
        self.classifier = Linear.load(weights, "classifier", D, num_labels, is_head=True)

    def __call__(self, x_ND: Tensor) -> Tensor:
        """Returns [N, num_labels]."""
        return self.classifier(self.norm(self.dense(x_ND)))


def _load_norm(weights: Weights, name: str, config: ModernBertConfig, *, dtype: torch.dtype | None = None) -> LayerNorm:
    """Reads a LayerNorm of the model's width."""
    return LayerNorm.load(weights, name, config.hidden_size, config.norm_eps, bias=config.norm_bias, dtype=dtype)
