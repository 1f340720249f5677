"""XLM-RoBERTa with the weight names of jinaai/xlm-roberta-flash-implementation: jina-embeddings-v3, jina-reranker-v2.

jina-embeddings-v3 has rotary positions, jina-reranker-v2 has learned ones. transformers 5.23 implements
jina-embeddings-v3 as `jina_embeddings_v3`. executors/read_adapters.py reads its adapters.

Source: Sturua et al., jina-embeddings-v3 (arXiv 2409.10173). Defaults are those of the two implementations.

Shape letters: D model width, I inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from ..protocol.errors import UnsupportedModelError
from ..protocol.model_info import ModelInfo
from .bert import BlockNames, RobertaConfig, bert_spec
from .rope import RopeSpec
from .spec import AttentionKind, Family, ModelSpec, linear


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashConfig(RobertaConfig):
    """Values of config.json of jinaai/xlm-roberta-flash-implementation."""

    blocks_name: ClassVar[str] = "layers"
    block_names: ClassVar[BlockNames] = BlockNames(
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "post_attention_layernorm",
        "mlp.fc1",
        "mlp.fc2",
        "post_mlp_layernorm",
    )

    vocab_size: int = 250_002
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    max_position_embeddings: int = 8194
    type_vocab_size: int = 1
    layer_norm_eps: float = 1e-5
    position_embedding_type: str = "rotary"
    rotary_emb_base: float = 10_000.0
    rope_parameters: dict[str, Any] | None = None

    @property
    def rope(self) -> RopeSpec:
        """The rotary positions."""
        return RopeSpec.read(
            self.rope_parameters or {},
            theta=self.rotary_emb_base,
            size=self.hidden_size // self.num_attention_heads,
            max_positions=self.max_position_embeddings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JinaV3Config(FlashConfig):
    """Values of config.json of `jina_embeddings_v3` in transformers."""

    rotary_emb_base: float = 20_000.0


def _reader(config_class: type[FlashConfig]) -> Callable[[ModelInfo], ModelSpec]:
    def read(info: ModelInfo) -> ModelSpec:
        config = config_class.read(info.config)
        if config.position_embedding_type not in ("rotary", "absolute"):
            raise UnsupportedModelError(
                f"config.json: position_embedding_type is {config.position_embedding_type!r}; "
                "penstock supports 'rotary' and 'absolute' in this family."
            )
        spec = bert_spec(replace(config, position_embedding_type="absolute"), info)
        if config.position_embedding_type == "rotary":
            spec = replace(
                spec,
                embedding=replace(spec.embedding, positions=None, num_positions=0, padding_id=None),
                kinds={kind: AttentionKind(rope=config.rope) for kind in spec.kinds},
            )
        return replace(spec, other_names=_with_hub_names(spec, config))

    return read


def _with_hub_names(spec: ModelSpec, config: FlashConfig) -> ModelSpec:
    """Returns the spec with the weight names of jinaai/xlm-roberta-flash-implementation."""
    D = config.hidden_size
    norm = spec.embedding.norm
    assert norm is not None
    layers = []
    for index, layer in enumerate(spec.layers):
        assert layer.attention_norm is not None
        assert layer.mlp_norm is not None
        layers.append(
            replace(
                layer,
                prefix=f"encoder.layers.{index}",
                qkv=linear("mixer.Wqkv", D, D, D, D),
                attention_out=linear("mixer.out_proj", D, D),
                attention_norm=replace(layer.attention_norm, name="norm1"),
                mlp_norm=replace(layer.mlp_norm, name="norm2"),
            )
        )
    return replace(spec, embedding=replace(spec.embedding, norm=replace(norm, name="emb_ln")), layers=tuple(layers))


FAMILIES: Final = (
    Family("jina_embeddings_v3", "JinaEmbeddingsV3", _reader(JinaV3Config), checks_positions=True),
    Family(
        "xlm-roberta",
        "XLMRobertaFlash",
        _reader(FlashConfig),
        architectures=("XLMRobertaLoRA", "XLMRobertaFlashConfig"),
        is_chosen_by_class=True,
        checks_positions=True,
    ),
)
