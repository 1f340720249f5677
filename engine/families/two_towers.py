"""CLIP, SigLIP and SigLIP 2: an encoder of texts and an encoder of images with vectors in one space.

Each encoder ("tower") is a family of its own; model_files/image_models.py splits the config.json of a whole model.

Sources: Radford et al., CLIP (arXiv 2103.00020); Zhai et al., SigLIP (2303.15343); Tschannen et al., SigLIP 2
(2502.14786). Defaults are those of transformers 5.23.

Shape letters: D model width, I inner width of the MLP, S patch size in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

from ..protocol.errors import UnsupportedModelError
from ..protocol.model_info import DenseSpec, ModelInfo
from ..protocol.tasks import PoolingType
from .config_values import read_config
from .spec import (
    AttentionKind,
    AttentionPoolSpec,
    AttentionSpec,
    Bias,
    EmbeddingSpec,
    Family,
    LayerSpec,
    ModelSpec,
    NormSpec,
    PatchSpec,
    linear,
)

_KIND: Final = "full_attention"
_CHANNELS: Final = 3
PADDED_MODEL_TYPES: Final = ("siglip_text_model", "siglip2_text_model")
"""Texts of these models are padded to the length of the table of positions, and padding is read like other tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """The values that all towers share.

    Attributes:
        vocab_size: Rows of the word embeddings; 1 for images.
    """

    vocab_size: int = 1

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Returns the values of keys that config.json leaves out."""
        return {field.name: field.default for field in fields(cls)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SiglipTextConfig(TowerConfig):
    """SigLIP's texts: attention in both directions; texts are padded to the longest length."""

    is_causal: ClassVar[bool] = False

    vocab_size: int = 32000
    max_position_embeddings: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipTextConfig(SiglipTextConfig):
    """CLIP's texts: causal attention; the row of the end token is the text's."""

    is_causal: ClassVar[bool] = True

    vocab_size: int = 49408
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_attention_heads: int = 8
    max_position_embeddings: int = 77
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SiglipVisionConfig(TowerConfig):
    """SigLIP's images: a learned query pools the patches.

    Attributes:
        has_class_row: A learned row before the patches is the image's row.
        has_linear_patches: The first product is stored as [D, S * S * 3], not as a convolution.
        resizes_positions: Images have different grids of patches; the table of positions is resized to each.
    """

    has_class_row: ClassVar[bool] = False
    has_linear_patches: ClassVar[bool] = False
    resizes_positions: ClassVar[bool] = False

    num_channels: int = _CHANNELS
    image_size: int = 224
    patch_size: int = 16
    vision_use_head: bool = True

    @property
    def num_positions(self) -> int:
        """Rows of the table of positions."""
        return (self.image_size // self.patch_size) ** 2 + self.has_class_row


@dataclass(frozen=True, slots=True, kw_only=True)
class Siglip2VisionConfig(SiglipVisionConfig):
    """SigLIP 2's images in their own proportions (naflex)."""

    has_linear_patches: ClassVar[bool] = True
    resizes_positions: ClassVar[bool] = True

    num_patches: int = 256

    @property
    def num_positions(self) -> int:
        """`num_patches` of config.json."""
        return self.num_patches


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipVisionConfig(SiglipVisionConfig):
    """CLIP's images."""

    has_class_row: ClassVar[bool] = True

    patch_size: int = 32
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5


def _read_text(config_class: type[SiglipTextConfig], info: ModelInfo) -> ModelSpec:
    config = read_config(config_class, info.config)
    D = config.hidden_size
    norm = _norm(config)
    return ModelSpec(
        hidden_size=D,
        prefixes=("text_model", ""),
        embedding=EmbeddingSpec(
            word_embeddings="embeddings.token_embedding.weight",
            vocab_size=config.vocab_size,
            size=D,
            positions="embeddings.position_embedding.weight",
            num_positions=config.max_position_embeddings,
        ),
        attention=_attention(config),
        # Texts run whole: the window makes attention causal without chunks.
        kinds={_KIND: AttentionKind(window=(-1, 0) if config.is_causal else None)},
        layers=_layers(config),
        is_pre_norm=True,
        final_norm=norm(name="final_layer_norm", size=D),
    )


def _read_images(config_class: type[SiglipVisionConfig], info: ModelInfo) -> ModelSpec:
    config = read_config(config_class, info.config)
    if config.num_channels != _CHANNELS:
        raise UnsupportedModelError(
            f"vision_config: num_channels of {info.name} is {config.num_channels}; penstock supports 3."
        )
    if not config.has_class_row and not config.vision_use_head:
        raise UnsupportedModelError(f"vision_config: vision_use_head of {info.name} is false; penstock needs the head.")
    D, I, norm = config.hidden_size, config.intermediate_size, _norm(config)  # noqa: E741
    table = "embeddings.patch_embedding"
    return ModelSpec(
        hidden_size=D,
        prefixes=("vision_model", ""),
        embedding=EmbeddingSpec(
            word_embeddings=f"{table}.weight",
            vocab_size=1,
            size=D,
            norm=norm(name="pre_layrnorm", size=D) if config.has_class_row else None,
            patches=PatchSpec(
                name=table,
                is_linear=config.has_linear_patches,
                bias=Bias.of(not config.has_class_row),
                class_row="embeddings.class_embedding" if config.has_class_row else None,
                positions="embeddings.position_embedding.weight",
                num_positions=config.num_positions,
                resizes_positions=config.resizes_positions,
            ),
        ),
        attention=_attention(config),
        kinds={_KIND: AttentionKind()},
        layers=_layers(config),
        is_pre_norm=True,
        final_norm=norm(name="post_layernorm", size=D),
        attention_pool=None
        if config.has_class_row
        else AttentionPoolSpec(
            query="head.probe",
            prefix="head.attention",
            norm=norm(name="head.layernorm", size=D),
            mlp_in=linear("head.mlp.fc1", D, I, activation=config.hidden_act),
            mlp_out=linear("head.mlp.fc2", I, D),
        ),
    )


def _layers(config: TowerConfig) -> tuple[LayerSpec, ...]:
    D, I, norm = config.hidden_size, config.intermediate_size, _norm(config)  # noqa: E741
    return tuple(
        LayerSpec(
            prefix=f"encoder.layers.{index}",
            kind=_KIND,
            attention_norm=norm(name="layer_norm1", size=D),
            qkv=linear(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), D, D, D, D),
            attention_out=linear("self_attn.out_proj", D, D),
            mlp_norm=norm(name="layer_norm2", size=D),
            mlp_in=linear("mlp.fc1", D, I, activation=config.hidden_act),
            mlp_out=linear("mlp.fc2", I, D),
        )
        for index in range(config.num_hidden_layers)
    )


def _attention(config: TowerConfig) -> AttentionSpec:
    num_heads = config.num_attention_heads
    head_size = config.hidden_size // num_heads
    return AttentionSpec(num_heads=num_heads, num_kv_heads=num_heads, head_size=head_size, scale=head_size**-0.5)


def _norm(config: TowerConfig) -> partial[NormSpec]:
    return partial(NormSpec, eps=config.layer_norm_eps, bias=Bias.REQUIRED)


def _projection(name: str, width_key: str, config: Mapping[str, Any], *, bias: bool) -> tuple[DenseSpec, ...]:
    """Returns the projection of a pooled row to the common space as a Dense module of the checkpoint itself."""
    width = config["hidden_size"]
    features = config.get(width_key) or width
    return (
        DenseSpec(folder="", name=name, in_features=width, out_features=features, bias=bias, activation="Identity"),
    )


class _Tower(NamedTuple):
    """The family of one encoder.

    Attributes:
        model_type: model_type of config.json.
        prefix: Prefix of the class names in transformers.
        config: Its values; the class also says whether it reads texts or images.
        dense: Returns its projection as Dense modules, by its config.json.
    """

    model_type: str
    prefix: str
    config: type[SiglipTextConfig] | type[SiglipVisionConfig]
    dense: Callable[[Mapping[str, Any]], tuple[DenseSpec, ...]] = lambda config: ()


def _family(tower: _Tower) -> Family:
    if issubclass(tower.config, SiglipTextConfig):
        read, pooling = partial(_read_text, tower.config), PoolingType.LAST
    else:
        read, pooling = partial(_read_images, tower.config), PoolingType.CLS
    return Family(tower.model_type, tower.prefix, read, pooling=pooling, dense=tower.dense)


_CLIP_TEXT: Final = partial(_projection, "text_projection", "projection_dim", bias=False)
_CLIP_VISION: Final = partial(_projection, "visual_projection", "projection_dim", bias=False)
_SIGLIP_TEXT: Final = partial(_projection, "text_model.head", "projection_size", bias=True)
_TOWERS: Final = (
    _Tower("clip_text_model", "CLIPText", ClipTextConfig, _CLIP_TEXT),
    _Tower("clip_vision_model", "CLIPVision", ClipVisionConfig, _CLIP_VISION),
    _Tower("siglip_text_model", "SiglipText", SiglipTextConfig, _SIGLIP_TEXT),
    _Tower("siglip_vision_model", "SiglipVision", SiglipVisionConfig),
    _Tower("siglip2_text_model", "Siglip2Text", SiglipTextConfig, _SIGLIP_TEXT),
    _Tower("siglip2_vision_model", "Siglip2Vision", Siglip2VisionConfig),
)
CONFIGS: Final[Mapping[str, type[TowerConfig]]] = {tower.model_type: tower.config for tower in _TOWERS}
"""By model_type."""
FAMILIES: Final = tuple(map(_family, _TOWERS))
