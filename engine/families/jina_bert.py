"""JinaBERT v2: BERT with ALiBi instead of position embeddings, and a gated MLP.

Source: Günther et al., Jina Embeddings 2 (arXiv 2310.19923). model_type is "bert" and `auto_map` names the code. Two
layouts exist: jinaai/jina-bert-implementation, and jinaai/jina-bert-v2-qk-post-norm, which also normalises q and k and
adds the input of attention twice.

Shape letters: D model width, I inner width of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from ..protocol.errors import UnsupportedModelError
from ..protocol.model_info import ModelInfo
from .bert import BertConfig, bert_spec
from .spec import AlibiSpec, Bias, Family, LayerSpec, ModelSpec, NormSpec, linear

_ACTIVATIONS: Final = {"geglu": "gelu", "reglu": "relu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JinaBertConfig(BertConfig):
    """Values of config.json."""

    feed_forward_type: str = "original"

    @property
    def activation(self) -> str:
        """Activation of the gate."""
        return _ACTIVATIONS[self.feed_forward_type]


def _spec(info: ModelInfo) -> ModelSpec:
    config = JinaBertConfig.read(info.config)
    for name, wanted in (("position_embedding_type", ("alibi",)), ("feed_forward_type", tuple(_ACTIVATIONS))):
        if (value := getattr(config, name)) not in wanted:
            raise UnsupportedModelError(
                f"config.json: {name} is {value!r}; penstock supports {' and '.join(wanted)} in JinaBERT."
            )
    spec = bert_spec(replace(config, position_embedding_type="absolute"), info)
    spec = replace(
        spec,
        embedding=replace(spec.embedding, positions=None, num_positions=0),
        relative_bias=AlibiSpec(num_heads=config.num_attention_heads),
    )
    with_norms = replace(spec, layers=tuple(_layer_with_norms(config, layer) for layer in spec.layers))
    layers = tuple(_layer(config, layer) for layer in spec.layers)
    return replace(spec, layers=layers, other_names=with_norms)


def _layer(config: JinaBertConfig, layer: LayerSpec) -> LayerSpec:
    """Returns a layer of jina-bert-implementation."""
    D, I = config.hidden_size, config.intermediate_size  # noqa: E741
    return replace(
        layer,
        mlp_in=linear("mlp.gated_layers", D, I, I, bias=Bias.NONE, activation=config.activation, is_gated=True),
        mlp_out=linear("mlp.wo", I, D),
        mlp_norm=NormSpec(name="mlp.layernorm", size=D, eps=config.layer_norm_eps, bias=Bias.REQUIRED),
    )


def _layer_with_norms(config: JinaBertConfig, layer: LayerSpec) -> LayerSpec:
    """Returns a layer of jina-bert-v2-qk-post-norm."""
    D, I = config.hidden_size, config.intermediate_size  # noqa: E741
    norm = partial(NormSpec, size=D, eps=config.layer_norm_eps, bias=Bias.REQUIRED)
    up = linear("mlp.up_gated_layer", D, I, I, bias=Bias.NONE, activation=config.activation, is_gated=True)
    return replace(
        layer,
        query_norm=norm(name="attention.self.layer_norm_q"),
        key_norm=norm(name="attention.self.layer_norm_k"),
        after_attention=layer.attention_norm,
        attention_norm=norm(name="layer_norm_1"),
        mlp_in=replace(up, is_gate_below=True),
        mlp_out=linear("mlp.down_layer", I, D),
        mlp_norm=norm(name="layer_norm_2"),
    )


FAMILIES: Final = (Family("bert", "JinaBert", _spec, is_chosen_by_class=True, checks_positions=True),)
