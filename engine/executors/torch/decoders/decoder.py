"""The decoder that Llama, Mistral, Qwen, Gemma and Phi-3 share: pre-norm blocks of attention and a gated MLP.

What a family does differently is in its config: llama.py, gemma.py. A causal model can be run chunk
by chunk, as its keys and values can be kept; one that looks both ways cannot.

Source: Touvron et al., LLaMA (arXiv 2302.13971), section 2.2. Held to transformers 5.23 in float32 within 1e-5.
Shape letters: R rows, V vocabulary, D model width, I inner width of the MLP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ....protocol.model_info import ModelInfo
from ....scheduling import CacheSpec
from ...cpu.decoders.config import DecoderConfig
from ..base import ModelOutput, NativeModel
from ..heads import decoder_head
from ..layers.attention.decoder import AttentionSpec, DecoderAttention, DecoderPlan
from ..layers.attention.rotary import RotaryEmbedding, Rotation
from ..layers.fusion import Fusion
from ..layers.linear import Linear
from ..layers.mlp import GatedMlp
from ..layers.norm import RmsNorm
from ..layers.residual import Residual
from ..layers.rows import Rows
from ..layers.weights import Weights

if TYPE_CHECKING:
    from ..packed_batch import PackedBatch

_EMBEDDING: Final = "embed_tokens.weight"


class DecoderLayer:
    """x + Attention(Norm(x)), then x + GLU(Norm(x)); Gemma also normalises what is added."""

    def __init__(self, weights: Weights, config: DecoderConfig, index: int, *, is_causal: bool) -> None:
        self.type = config.types[index]
        D = config.hidden_size
        spec = AttentionSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            scale=config.scale,
            is_causal=is_causal,
            window=config.window(self.type, is_causal=is_causal),
            softcap=config.softcap,
        )
        own = weights.scope("self_attn")
        qk_norm = None
        if config.has_qk_norm:
            heads = {"q_norm": spec.num_heads, "k_norm": spec.num_kv_heads}
            qk_norm = RmsNorm.load_heads(own, heads, spec.head_size, config.rms_norm_eps, offset=config.norm_offset)
        self.attention_norm = _load_norm(weights, "input_layernorm", config)
        self.attention = DecoderAttention.load(
            own, D, spec, index, names=config.qkv_names, bias=config.qkv_bias, qk_norm=qk_norm
        )
        self.attention_out = Linear.load(own, "o_proj", spec.num_heads * spec.head_size, D, bias=config.out_bias)
        self.mlp_norm = _load_norm(weights, config.mlp_norm, config)
        self.mlp = GatedMlp.load(
            weights.scope("mlp"),
            D,
            config.intermediate_size,
            activation=config.activation,
            names=config.gate_names,
            bias=config.gate_bias,
        )
        self.post_norms = [_load_norm(weights, name, config) for name in config.post_norms]

    def __call__(self, stream: Residual, rows: Rows, plan: DecoderPlan, rotation: Rotation) -> Residual:
        """Returns the next hidden states."""
        x_RD, stream = stream.normed_and_sum(self.attention_norm)
        return self.after_attention(self.attention(x_RD, rows, plan, rotation), stream)

    def after_attention(self, attended_RA: Tensor, stream: Residual) -> Residual:
        """Returns the next hidden states, of what attention gives [R, A]; looks at no border."""
        if not self.post_norms:
            x_RD, stream = stream.plus(self.attention_out, attended_RA).normed_and_sum(self.mlp_norm)
            return stream.plus(self.mlp, x_RD)
        after_attention, after_mlp = self.post_norms
        stream = stream.plus_normed(after_attention, self.attention_out(attended_RA))
        x_RD, stream = stream.normed_and_sum(self.mlp_norm)
        return stream.plus_normed(after_mlp, self.mlp(x_RD))


class DecoderModel(NativeModel):
    """The decoder with the head that the model's kind asks for."""

    config_class: ClassVar[type[DecoderConfig]]

    def __init__(self, info: ModelInfo, weights: Weights) -> None:
        config = self.config_class.read(info.config)
        self.hidden_size = D = config.hidden_size
        base = weights.scope_of(_EMBEDDING, ("model", ""))
        self.embedding_VD = base.table(_EMBEDDING, config.vocab_size, D)
        if config.has_scaled_embedding:
            # transformers rounds the factor to the model's type before it multiplies.
            self.embedding_VD *= torch.tensor(D**0.5, dtype=weights.dtype, device=weights.device)
        self.layers = [
            DecoderLayer(base.scope(f"layers.{i}"), config, i, is_causal=info.is_causal)
            for i in range(config.num_hidden_layers)
        ]
        self.layer_of_type = {layer.type: layer for layer in self.layers}
        self.final_norm = _load_norm(base, "norm", config)
        self.is_fused = weights.fusion is Fusion.FUSED
        self.rotary = {t: RotaryEmbedding(config.rope(t), weights.device) for t in sorted(self.layer_of_type)}
        if info.is_causal:
            self.cache_spec = CacheSpec(
                kv_layers=tuple(layer.attention.spec.kv_layer for layer in self.layers),
                shares_prefixes=not any(rotary.depends_on_length for rotary in self.rotary.values()),
            )
        head = decoder_head(weights, info, D, base.prefix + _EMBEDDING)
        self.set_head(info.kind, head, scores_rows=not info.classifier_tokens)

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """See PackedModel."""
        rows = Rows.of(batch)
        plans = {layer_type: layer.attention.plan(rows) for layer_type, layer in self.layer_of_type.items()}
        rotations = {layer_type: rotary(batch) for layer_type, rotary in self.rotary.items()}
        stream = layer_input = Residual(F.embedding(rows.input_ids, self.embedding_VD), is_fused=self.is_fused)
        for layer in self.layers:
            layer_input, stream = stream, layer(stream, rows, plans[layer.type], rotations[layer.type])
        weights_TH = None
        if need_attention:
            last = self.layers[-1]
            weights_TH = last.attention.end_weights(layer_input.normed(last.attention_norm), rows, rotations[last.type])
        return ModelOutput(hidden_states=stream.trim(rows).normed(self.final_norm), attention_weights=weights_TH)


def _load_norm(weights: Weights, name: str, config: DecoderConfig) -> RmsNorm:
    """Reads a norm of the model's width."""
    return RmsNorm.load(weights, name, config.hidden_size, config.rms_norm_eps, offset=config.norm_offset)
