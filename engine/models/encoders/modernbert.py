"""ModernBERT: rotary positions, pre-norm, GeGLU, no biases, and global attention only in every third layer.

Source: Warner et al., Smarter, Better, Faster, Longer (arXiv 2412.13663).
Held to transformers 5.23 in float32 within 1e-5.

Shape letters: T packed tokens in R rows, N sequences, D model width, I inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.attention import AttentionPlan
from penstock.kernels.native import EncoderSpec, LayerSpec

from ...layers.attention.encoder import SelfAttention
from ...layers.attention.rotary import RopeSpec, RotaryEmbedding, Rotation
from ...layers.linear import Linear
from ...layers.mlp import GatedMlp
from ...layers.native import NativeForward, SpecReader, as_floats, as_words, native_activation
from ...layers.norm import LayerNorm
from ...layers.rows import Rows
from ...layers.weights import Weights
from ...protocol.errors import UnsupportedModelError
from ...protocol.model_info import ModelInfo, ModelKind
from ..base import ModelOutput, NativeModel, read_config

if TYPE_CHECKING:
    from ...packed_batch import PackedBatch

_GLOBAL: Final = "full_attention"
_LOCAL: Final = "sliding_attention"
# Layer type -> key of the theta in older config.json files, and its default.
_THETAS: Final = {_GLOBAL: ("global_rope_theta", 160_000.0), _LOCAL: ("local_rope_theta", 10_000.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernBertConfig:
    """The values of config.json that the forward depends on, with transformers' defaults."""

    vocab_size: int = 50368
    hidden_size: int = 768
    intermediate_size: int = 1152
    num_hidden_layers: int = 22
    num_attention_heads: int = 12
    hidden_activation: str = "gelu"
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    local_attention: int = 128
    global_attn_every_n_layers: int = 3
    layer_types: list[str] | None = None
    classifier_bias: bool = False
    classifier_activation: str = "gelu"

    @property
    def types(self) -> list[str]:
        """The kind of attention of each layer."""
        if self.layer_types is not None:
            return self.layer_types
        every = self.global_attn_every_n_layers
        return [_LOCAL if i % every else _GLOBAL for i in range(self.num_hidden_layers)]


class ModernBertLayer:
    """x + Attention(Norm(x)), then x + GeGLU(Norm(x)). The first layer's input comes normalised."""

    def __init__(self, weights: Weights, config: ModernBertConfig, index: int) -> None:
        D = config.hidden_size
        self.type = config.types[index]
        reach = config.local_attention // 2
        self.attention_norm = _load_norm(weights, "attn_norm", config) if index else _unchanged
        self.attention = SelfAttention.load(
            weights,
            ("attn.Wqkv",),
            D,
            config.num_attention_heads,
            bias=config.attention_bias,
            window=(reach, reach) if self.type == _LOCAL else None,
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

    def __call__(self, hidden_RD: Tensor, rows: Rows, plan: AttentionPlan, rotation: Rotation) -> Tensor:
        """Returns the next hidden states."""
        attended_RD = self.attention(self.attention_norm(hidden_RD), rows, plan, rotation=rotation)
        hidden_RD = self.attention_out(attended_RD, add=hidden_RD)
        return self.mlp(self.mlp_norm(hidden_RD), add=hidden_RD)


class ModernBertModel(NativeModel):
    """The encoder with the head that the model's kind asks for."""

    def __init__(self, info: ModelInfo, weights: Weights) -> None:
        config = read_config(ModernBertConfig, info.config)
        self.hidden_size = D = config.hidden_size
        base = weights.scope_of("embeddings.tok_embeddings.weight", ("model", ""))
        self.embedding_VD = base.table("embeddings.tok_embeddings.weight", config.vocab_size, D)
        head_size = D // config.num_attention_heads
        ropes = {
            layer_type: RopeSpec(theta=_theta(info.config, layer_type), size=head_size)
            for layer_type in set(config.types)
        }
        self.native: NativeForward | None = None
        self.machine = base.machine
        if base.machine is not None:
            tables = {layer_type: _table(rope, info.max_model_len) for layer_type, rope in ropes.items()}
            spec = _spec(base, config, self.embedding_VD, tables)
            self.native = NativeForward(base.machine, spec, base.dtype)
        else:
            self._load_layers(base, config, ropes)
        if info.kind is not ModelKind.EMBEDDING:
            self.set_head(info.kind, ModernBertHead(weights, config, info.num_labels))

    @classmethod
    def fits_native_kernels(cls, config: Mapping[str, Any]) -> bool:
        """See NativeModel."""
        return native_activation(read_config(ModernBertConfig, config).hidden_activation) is not None

    def _load_layers(self, base: Weights, config: ModernBertConfig, ropes: Mapping[str, RopeSpec]) -> None:
        """Reads what torch runs."""
        self.embedding_norm = _load_norm(base, "embeddings.norm", config)
        self.layers = [ModernBertLayer(base.scope(f"layers.{i}"), config, i) for i in range(config.num_hidden_layers)]
        self.layer_of_type = {layer.type: layer for layer in self.layers}
        self.final_norm = _load_norm(base, "final_norm", config)
        self.rotary = {layer_type: RotaryEmbedding(rope, base.device) for layer_type, rope in ropes.items()}

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """See PackedModel."""
        if self.native is not None:
            hidden_TD, attention_TH = self.native(batch, batch.positions, need_attention=need_attention)
            return ModelOutput(hidden_states=hidden_TD, attention_weights=attention_TH)
        rows = Rows.of(batch)
        plans = {layer_type: layer.attention.plan(rows) for layer_type, layer in self.layer_of_type.items()}
        rotations = {layer_type: rotary(batch) for layer_type, rotary in self.rotary.items()}
        hidden_RD = layer_input_RD = self.embedding_norm(F.embedding(rows.input_ids, self.embedding_VD))
        for layer in self.layers:
            layer_input_RD, hidden_RD = hidden_RD, layer(hidden_RD, rows, plans[layer.type], rotations[layer.type])
        attention_TH = None
        if need_attention:
            last = self.layers[-1]
            attention_TH = last.attention.first_token_weights(
                last.attention_norm(layer_input_RD), rows, rotation=rotations[last.type]
            )
        return ModelOutput(hidden_states=rows.trim(self.final_norm(hidden_RD)), attention_weights=attention_TH)


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


def _spec(
    base: Weights, config: ModernBertConfig, table_VD: Tensor, rotary: Mapping[str, NDArray[np.float32]]
) -> EncoderSpec:
    """Returns the encoder as the native kernels take it; `rotary` has the table of each layer type."""
    read = SpecReader(base)
    D, I = config.hidden_size, config.intermediate_size  # noqa: E741
    reach = config.local_attention // 2
    activation = native_activation(config.hidden_activation)
    assert activation is not None
    norm = partial(read.norm, size=D, eps=config.norm_eps, bias=config.norm_bias)

    def layer(index: int) -> LayerSpec:
        name, layer_type = f"layers.{index}", config.types[index]
        return LayerSpec(
            attention_norm=norm(f"{name}.attn_norm") if index else None,
            qkv=SpecReader(base.scope(name)).qkv(
                ("attn.Wqkv",), D, config.num_attention_heads, bias=config.attention_bias
            ),
            attention_out=read.map(f"{name}.attn.Wo", D, D, bias=config.attention_bias),
            mlp_norm=norm(f"{name}.mlp_norm"),
            mlp_in=read.map(f"{name}.mlp.Wi", D, 2 * I, bias=config.mlp_bias, activation=activation, gated=True),
            mlp_out=read.map(f"{name}.mlp.Wo", I, D, bias=config.mlp_bias),
            window=(reach, reach) if layer_type == _LOCAL else None,
            rotary=rotary[layer_type],
        )

    return EncoderSpec(
        num_heads=config.num_attention_heads,
        pre_norm=True,
        words=as_words(table_VD),
        places=None,
        embedding_norm=norm("embeddings.norm"),
        layers=map(layer, range(config.num_hidden_layers)),
        final_norm=norm("final_norm"),
    )


def _table(rope: RopeSpec, length: int) -> NDArray[np.float32]:
    """Returns [L, K] float32: the cosines of the angles of each position, then their sines."""
    frequencies_J, factor = rope.frequencies()
    angles_LJ = torch.arange(length)[:, None].float() * frequencies_J
    return as_floats(torch.cat([angles_LJ.cos(), angles_LJ.sin()], dim=1) * factor)


def _unchanged(hidden_RD: Tensor) -> Tensor:
    return hidden_RD


def _load_norm(weights: Weights, name: str, config: ModernBertConfig, *, dtype: torch.dtype | None = None) -> LayerNorm:
    """Reads a LayerNorm of the model's width."""
    return LayerNorm.load(weights, name, config.hidden_size, config.norm_eps, bias=config.norm_bias, dtype=dtype)


def _theta(config: Mapping[str, Any], layer_type: str) -> float:
    """Returns the base of the rotary wavelengths of a layer type, from today's config.json or an older one."""
    old_key, default = _THETAS[layer_type]
    parameters = (config.get("rope_parameters") or {}).get(layer_type) or {}
    rope_type = (config.get("rope_scaling") or parameters).get("rope_type", "default")
    if rope_type != "default":
        raise UnsupportedModelError(f"rope_type is {rope_type!r}; penstock's ModernBERT knows 'default'.")
    return float(parameters.get("rope_theta") or config.get(old_key) or default)
