"""Llama, Mistral, Qwen, Gemma and Phi-3 for the native kernels, from their checkpoints.

Shape letters: T packed tokens, V vocabulary, D model width, I inner width of the MLP, K head size, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu import EncoderSpec, LayerSpec, MapSpec, NormSpec

from ....checkpoint.array_file import Array
from ....checkpoint.views import ArrayWeights, Floats, as_floats, cast_table
from ....protocol.model_info import ClassifierMethod, ModelInfo
from ....protocol.tasks import PoolingType
from ....scheduling import CacheSpec, KvLayerSpec
from ..heads import HeadSteps
from ..packed_arrays import PackedArrays
from ..spec_reader import SpecReader, has_activation, has_head_size
from .config import DecoderConfig

_EMBEDDING: Final = "embed_tokens.weight"
# Rows of a table that are scaled at a time.
_BLOCK_ROWS: Final = 4096


class DecoderReader:
    """Reads one model of these families.

    Args:
        config: Of its family.
    """

    scores_rows = True

    def __init__(self, config: DecoderConfig) -> None:
        self._config = config
        self.hidden_size = config.hidden_size

    def fits(self, info: ModelInfo) -> bool:
        """Whether the native kernels have all that the model needs.

        Not heads that turn in part, positions by the text's length, attention weights, hidden tokens of ColBERT, and
        capped scores of words.
        """
        config = self._config
        turns_whole = config.rotary_size == config.head_size and has_head_size(config.head_size, is_rotary=True)
        by_length = any(config.rope(layer_type).depends_on_length for layer_type in set(config.types))
        is_capped = bool(info.classifier_tokens) and bool(_text_config(info).get("final_logit_softcapping"))
        asks_more = PoolingType.ATTENTION in info.sequence_pooling or info.multi_vector is not None
        return has_activation(config.activation) and turns_whole and not (by_length or is_capped or asks_more)

    def cache_spec(self, info: ModelInfo) -> CacheSpec | None:
        """What is kept of a sequence from chunk to chunk; None where attention looks both ways."""
        config = self._config
        layer = KvLayerSpec(config.num_kv_heads, config.head_size)
        return CacheSpec(kv_layers=(layer,) * config.num_hidden_layers) if info.is_causal else None

    def spec(self, info: ModelInfo, weights: ArrayWeights) -> EncoderSpec:
        """See PostNormReader."""
        config = self._config
        base = weights.scope_of(_EMBEDDING, ("model", ""))
        rotary = {kind: config.rope(kind).table(info.max_model_len) for kind in set(config.types)}
        words = cast_table(base.table(_EMBEDDING, config.vocab_size, config.hidden_size), info.dtype)
        if config.has_scaled_embedding:
            _scale(words, info.dtype)
        return EncoderSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_kv_heads,
            pre_norm=True,
            is_decoder=True,
            words=words,
            places=None,
            embedding_norm=None,
            layers=(self._layer(info, base, index, rotary) for index in range(config.num_hidden_layers)),
            final_norm=self._norm(base, "norm", config.hidden_size),
        )

    def head(self, info: ModelInfo, weights: ArrayWeights) -> HeadSteps:
        """See PostNormReader: `score`, or the rows of the words that a reranker answers with."""
        D = self._config.hidden_size
        if not info.classifier_tokens:
            return (SpecReader(weights).map("score", D, info.num_labels, bias=weights.has("score.bias")),)
        is_tied = info.config.get("tie_word_embeddings")
        if is_tied is None:
            is_tied = not weights.has("lm_head.weight")
        view = weights.scope_of(_EMBEDDING, ("model", "")) if is_tied else weights
        name = _EMBEDDING if is_tied else "lm_head.weight"
        picked = list(info.classifier_tokens)
        stored_CD = view.table(name, info.vocab_size, D)[picked]
        view.check_finite(name, stored_CD)
        rows_CD = as_floats(stored_CD)
        bias_C = weights.floats("lm_head.bias", info.vocab_size)[picked] if weights.has("lm_head.bias") else None
        config = _text_config(info)
        scale = np.float32(float(config.get("logit_scale") or 1.0) / float(config.get("logits_scaling") or 1.0))
        if info.classifier_method is ClassifierMethod.FROM_2_WAY_SOFTMAX:
            rows_CD = rows_CD[1:] - rows_CD[:1]
            bias_C = None if bias_C is None else bias_C[1:] - bias_C[:1]
        return (MapSpec(weight=rows_CD * scale, bias=None if bias_C is None else bias_C * scale),)

    def places(self, batch: PackedArrays) -> NDArray[np.int64]:
        """See PostNormReader; there is no such table."""
        return batch.positions

    def _layer(self, info: ModelInfo, base: ArrayWeights, index: int, rotary: Mapping[str, Floats]) -> LayerSpec:
        config, kind = self._config, self._config.types[index]
        D, I, K = config.hidden_size, config.intermediate_size, config.head_size  # noqa: E741
        layer = base.scope(f"layers.{index}")
        own, mlp = layer.scope("self_attn"), layer.scope("mlp")
        after = iter([self._norm(layer, name, D) for name in config.post_norms])
        has_norm = config.has_qk_norm
        width = config.num_attention_heads * K
        return LayerSpec(
            attention_norm=self._norm(layer, "input_layernorm", D),
            qkv=self._qkv(own),
            attention_out=SpecReader(own).map("o_proj", width, D, bias=config.out_bias),
            mlp_norm=self._norm(layer, config.mlp_norm, D),
            mlp_in=SpecReader(mlp).joined(
                config.gate_names, D, [I, I], bias=config.gate_bias, activation=config.activation, gated=True
            ),
            mlp_out=SpecReader(mlp).map("down_proj", I, D, bias=config.gate_bias),
            window=config.window(kind, is_causal=info.is_causal) or ((-1, 0) if info.is_causal else None),
            rotary=rotary[kind],
            query_norm=self._norm(own, "q_norm", K, scale=config.scale) if has_norm else None,
            key_norm=self._norm(own, "k_norm", K) if has_norm else None,
            after_attention=next(after, None),
            after_mlp=next(after, None),
            softcap=config.softcap or 0.0,
        )

    def _qkv(self, own: ArrayWeights) -> MapSpec:
        """The maps of q, k and v as one; the scale of the scores is in q, or in its norm where it has one."""
        config = self._config
        width, kv_width = (heads * config.head_size for heads in (config.num_attention_heads, config.num_kv_heads))
        spec = SpecReader(own).joined(
            config.qkv_names, config.hidden_size, [width, kv_width, kv_width], bias=config.qkv_bias
        )
        if not config.has_qk_norm:
            spec.weight[:width] *= np.float32(config.scale)
            if spec.bias is not None:
                spec.bias[:width] *= np.float32(config.scale)
        return spec

    def _norm(self, weights: ArrayWeights, name: str, size: int, scale: float = 1.0) -> NormSpec:
        """An RMSNorm, times `scale`."""
        weight = weights.floats(f"{name}.weight", size) + np.float32(self._config.norm_offset)
        return NormSpec(weight=weight * np.float32(scale), eps=self._config.rms_norm_eps, rms=True)


def _scale(words_VD: Array, dtype: str) -> None:
    """Multiplies embeddings with the root of their width, which transformers rounds to the model's type before."""
    factor = as_floats(cast_table(np.full((1, 1), words_VD.shape[1] ** 0.5, np.float32), dtype))
    for first in range(0, len(words_VD), _BLOCK_ROWS):
        rows = words_VD[first : first + _BLOCK_ROWS]
        rows[:] = cast_table(as_floats(rows) * factor, dtype)


def _text_config(info: ModelInfo) -> Mapping[str, Any]:
    config: Mapping[str, Any] = info.config.get("text_config") or info.config
    return config
