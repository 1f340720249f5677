"""DeBERTa-v2 and DeBERTa-v3: BERT with attention scores of content and distance.

Source: He et al., DeBERTa (arXiv 2006.03654) and DeBERTaV3 (2111.09543). Defaults are those of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import UnsupportedModelError
from ..protocol.model_info import ModelInfo, ModelKind
from .bert import BertConfig, BlockNames, VocabularyNames, bert_spec
from .spec import Bias, DisentangledSpec, Family, LinearSpec, ModelSpec, NormSpec, linear

_ATTENTION: Final = "attention.self"


@dataclass(frozen=True, slots=True, kw_only=True)
class DebertaV2Config(BertConfig):
    """Values of config.json."""

    base_prefix: ClassVar[str] = "deberta"
    block_names: ClassVar[BlockNames] = BertConfig.block_names._replace(
        q=f"{_ATTENTION}.query_proj", k=f"{_ATTENTION}.key_proj", v=f"{_ATTENTION}.value_proj"
    )
    is_head_below_base: ClassVar[bool] = False
    vocabulary_names: ClassVar[VocabularyNames | None] = None

    vocab_size: int = 128_100
    hidden_size: int = 1536
    num_hidden_layers: int = 24
    num_attention_heads: int = 24
    intermediate_size: int = 6144
    type_vocab_size: int = 0
    layer_norm_eps: float = 1e-7
    max_relative_positions: int = -1
    position_buckets: int = -1
    position_biased_input: bool = True
    pos_att_type: str | list[str] | None = None
    share_att_key: bool = False
    norm_rel_ebd: str = "none"
    pooler_hidden_act: str = "gelu"

    @property
    def terms(self) -> list[str]:
        """Terms of the scores: "c2p", query and distance; "p2c", key and distance."""
        given = self.pos_att_type or []
        return [name.strip() for name in given.lower().split("|")] if isinstance(given, str) else given

    @property
    def reach(self) -> int:
        """Largest distance that the embeddings distinguish."""
        return self.max_relative_positions if self.max_relative_positions > 0 else self.max_position_embeddings

    @property
    def num_distances(self) -> int:
        """Rows of the table of distances."""
        return 2 * (self.position_buckets if self.position_buckets > 0 else self.reach)

    def rows_of(self, distances: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the row of each distance, the position of the query minus that of the key, in the table."""
        rows = distances
        if self.position_buckets > 0:
            rows = distance_buckets(distances, self.position_buckets, self.reach)
        clipped: NDArray[np.int64] = (rows + self.num_distances // 2).clip(0, self.num_distances - 1)
        return clipped


def distance_buckets(distances: NDArray[np.int64], num_buckets: int, reach: int) -> NDArray[np.int64]:
    """Returns the signed bucket, int64, of each distance: short ones have their own, long ones share them."""
    half = num_buckets // 2
    magnitude = np.abs(distances)
    # In float32, as in transformers: the rounding decides the bounds of the buckets.
    growth = np.log(np.maximum(magnitude, half).astype(np.float32) / np.float32(half))
    growth /= np.log(np.float32((reach - 1) / half))
    far = np.ceil(growth * np.float32(half - 1)).astype(np.int64) + half
    buckets: NDArray[np.int64] = np.where(magnitude <= half, distances, far * np.sign(distances))
    return buckets


def _spec(info: ModelInfo) -> ModelSpec:
    config = DebertaV2Config.read(info.config)
    D = config.hidden_size
    head_size = D // config.num_attention_heads
    if not set(config.terms) <= {"c2p", "p2c"} or not 2 <= config.num_distances <= 2**20:
        raise UnsupportedModelError(
            f"config.json: pos_att_type is {config.pos_att_type!r} with {config.num_distances} distances; penstock "
            "supports 'c2p', 'p2c' and both, with 2 to 1048576 distances."
        )
    spec = bert_spec(config, info)
    assert spec.attention is not None

    def projection(shared: str, separate: str, term: str) -> LinearSpec | None:
        name = f"{_ATTENTION}.{shared if config.share_att_key else separate}"
        return linear(name, D, D) if term in config.terms else None

    head = spec.head
    if info.kind not in (ModelKind.EMBEDDING, ModelKind.TOKEN_CLASSIFIER):
        dense = linear("pooler.dense", D, D, activation=config.pooler_hidden_act)
        head = (dense, linear("classifier", D, info.num_labels))
    norm = NormSpec(name="encoder.LayerNorm", size=D, eps=config.layer_norm_eps, bias=Bias.REQUIRED)
    without_positions = replace(spec.embedding, positions=None, num_positions=0)
    return replace(
        spec,
        embedding=spec.embedding if config.position_biased_input else without_positions,
        attention=replace(spec.attention, scale=(head_size * (1 + len(set(config.terms)))) ** -0.5),
        disentangled=DisentangledSpec(
            distances="encoder.rel_embeddings.weight",
            num_distances=config.num_distances,
            norm=norm if "layer_norm" in config.norm_rel_ebd.lower() else None,
            key=projection("key_proj", "pos_key_proj", "c2p"),
            query=projection("query_proj", "pos_query_proj", "p2c"),
            row_of=config.rows_of,
        ),
        head=head,
    )


def _needs_transformers(architecture: str, config: Mapping[str, Any]) -> bool:
    """Whether a model has a convolution, other widths, or no attention by distance."""
    width = config.get("hidden_size")
    return (
        not config.get("relative_attention")
        or bool(config.get("conv_kernel_size"))
        or config.get("attention_head_size") is not None
        or any((config.get(name) or width) != width for name in ("embedding_size", "pooler_hidden_size"))
    )


FAMILIES: Final = (Family("deberta-v2", "DebertaV2", _spec, leaves_out=_needs_transformers),)
