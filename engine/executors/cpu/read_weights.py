"""Reads the weights of a ModelSpec into the structures of the C library, in float32. The packing rounds them once.

Shape letters: V vocabulary, D model width, E embedding width, H heads, P positions, Y token types, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.kernels import cpu as library
from penstock.kernels.cpu import ActivationCode, CpuLibrary, Format

from ...checkpoint.views import Array, ArrayWeights, Floats, as_floats, cast_table
from ...families.spec import (
    AlibiSpec,
    AnswerHeadSpec,
    Bias,
    DisentangledSpec,
    EmbeddingSpec,
    LayerSpec,
    LinearSpec,
    ModelSpec,
    NormSpec,
    linear,
    no_vocabulary_head,
)
from ...protocol.errors import WeightError
from ...protocol.model_info import ModelInfo
from ...protocol.tasks import PoolingType
from .array_head import HeadLayers
from .image_layers import AttentionPool, PatchEmbedding

# Names as in executors/torch/layers/linear.py. Models with other activations run on torch.
_ACTIVATIONS: Final[dict[str, ActivationCode]] = {
    **dict.fromkeys(("gelu", "gelu_python"), ActivationCode.GELU),
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), ActivationCode.GELU_TANH
    ),
    "quick_gelu": ActivationCode.QUICK_GELU,
    "relu": ActivationCode.RELU,
    "silu": ActivationCode.SILU,
    "swish": ActivationCode.SILU,
    "tanh": ActivationCode.TANH,
}
_MAX_HEAD_SIZE: Final = 1024
"""Columns. The C library has rows of a head on the stack."""
# Rows of a table to scale at once.
_BLOCK_ROWS: Final = 4096


def has_kernels(spec: ModelSpec, info: ModelInfo) -> bool:
    """Whether the C library supports a model.

    It does not support recurrent layers, experts, partly rotated heads, odd head sizes, and rotary positions that
    depend on the length of the text, queries that grow with their position; in decoders also attention weights, hidden
    tokens of ColBERT and capped answer logits.
    """
    if spec.embedding.static is not None:
        return True
    if spec.attention is None or any(layer.mixer is not None or layer.experts is not None for layer in spec.layers):
        return False
    size = spec.attention.head_size
    ropes = [kind.rope for kind in spec.kinds.values() if kind.rope is not None]
    if not 1 <= size <= _MAX_HEAD_SIZE or spec.attention.query_growth is not None:
        return False
    if any(rope.size != size or size % 2 or rope.depends_on_length for rope in ropes):
        return False
    head = () if spec.head is None or isinstance(spec.head, AnswerHeadSpec) else spec.head
    maps = [layer.mlp_in for layer in spec.layers] + [step for step in head if isinstance(step, LinearSpec)]
    if spec.vocabulary is not None and info.sparse is not None:
        maps.append(spec.vocabulary.dense)
    if any(part is not None and part.activation is not None and part.activation not in _ACTIVATIONS for part in maps):
        return False
    is_capped = isinstance(spec.head, AnswerHeadSpec) and spec.head.softcap is not None
    needs_encoder = PoolingType.ATTENTION in info.sequence_pooling or info.multi_vector is not None or is_capped
    return not (spec.is_decoder and needs_encoder)


def read_encoder(
    spec: ModelSpec, info: ModelInfo, weights: ArrayWeights, adapters: Sequence[library.AdapterWeights] = ()
) -> library.EncoderWeights:
    """Reads the weights of the base model. Layers are read lazily, one by one.

    Args:
        spec: Spec of the model. `has_kernels` must be True for it.
        info: Maximum length and dtype.
        weights: View of the whole checkpoint.
        adapters: Adapters of the model.

    Raises:
        WeightError: A tensor is missing, has another shape, or contains NaN or inf.
    """
    base = _base(spec, weights)
    embedding = spec.embedding
    attention = spec.attention
    table_VE = cast_table(_word_table(base, embedding), info.dtype)
    if embedding.is_scaled:
        _scale(table_VE, info.dtype)
    tables = {name: kind.rope.table(info.max_model_len) for name, kind in spec.kinds.items() if kind.rope is not None}
    bias = _relative_bias(spec, base, info.max_model_len)
    distances = _Distances.read(spec, base, info.max_model_len)
    return library.EncoderWeights(
        num_heads=0 if attention is None else attention.num_heads,
        num_kv_heads=None if attention is None else attention.num_kv_heads,
        pre_norm=spec.is_pre_norm,
        is_decoder=spec.is_decoder,
        word_embeddings=table_VE,
        position_embeddings=_position_table(spec, base),
        embedding_norm=_norm(base, embedding.norm),
        projection=None if embedding.projection is None else _linear(base, embedding.projection),
        layers=(_layer(spec, layer, base, tables.get(layer.kind), bias, distances) for layer in spec.layers),
        final_norm=_norm(base, spec.final_norm),
        adapters=[_with_scaled_queries(spec, adapter) for adapter in adapters],
    )


def read_patches(
    spec: ModelSpec, info: ModelInfo, weights: ArrayWeights, machine: CpuLibrary, form: Format
) -> PatchEmbedding | None:
    """Reads the first step of an encoder of images; None in an encoder of texts. See `read_encoder`."""
    patches = spec.embedding.patches
    width = spec.hidden_size
    if patches is None:
        return None
    assert info.image_spec is not None, "with_image sets it"
    base = _base(spec, weights)
    side = info.image_spec.patch_size
    if patches.is_linear:
        weight_DB = base.floats(f"{patches.name}.weight", width, 3 * side * side)
    else:
        weight = base.floats(f"{patches.name}.weight", width, 3, side, side)
        weight_DB = weight.transpose(0, 2, 3, 1).reshape(width, -1)
    positions_PD = base.floats(patches.positions, patches.num_positions, width)
    class_row = None
    if patches.class_row is not None:
        class_row = base.floats(patches.class_row, width) + positions_PD[0]
        positions_PD = positions_PD[1:].copy()
    return PatchEmbedding(
        machine,
        info.image_spec,
        form=form,
        weight=weight_DB,
        bias=base.floats(f"{patches.name}.bias", width) if patches.bias is Bias.REQUIRED else None,
        class_row=class_row,
        positions=positions_PD,
        resizes_positions=patches.resizes_positions,
    )


def read_attention_pool(spec: ModelSpec, weights: ArrayWeights, machine: CpuLibrary) -> AttentionPool | None:
    """Reads the attention pooling; None in a model without it. See `read_encoder`."""
    pool = spec.attention_pool
    width = spec.hidden_size
    if pool is None:
        return None
    assert spec.attention is not None
    base = _base(spec, weights)
    scope = base.scope(pool.prefix)
    norm = _norm(base, pool.norm)
    assert norm is not None
    return AttentionPool(
        machine,
        query=base.floats(pool.query, 1, 1, width).ravel(),
        in_projection=(scope.floats("in_proj_weight", 3 * width, width), scope.floats("in_proj_bias", 3 * width)),
        out_projection=_linear(scope, linear("out_proj", width, width)),
        norm=norm,
        mlp=(_linear(base, pool.mlp_in), _linear(base, pool.mlp_out)),
        num_heads=spec.attention.num_heads,
    )


def _word_table(base: ArrayWeights, embedding: EmbeddingSpec) -> Array:
    """Returns the word embeddings [V, E] as they are stored, or [V + 1, E] float32 of a static embedding.

    An encoder of images has one row of zeros: its batches bring their own rows.
    """
    if embedding.patches is not None:
        return np.zeros((1, embedding.size), np.float32)
    static = embedding.static
    if static is None:
        return base.table(embedding.word_embeddings, embedding.vocab_size, embedding.size)
    rows = as_floats(base.table(embedding.word_embeddings, *static.shape)).reshape(-1, embedding.size)
    if static.has_mapping:
        mapping_V = base.stored("mapping", (embedding.vocab_size,))
        if mapping_V.min() < 0 or mapping_V.max() >= len(rows):
            raise WeightError(f"The weight 'mapping' has rows outside the table, which has {len(rows)} rows.")
        rows = rows[mapping_V]
    if static.has_weights:
        rows = rows * base.floats("weights", embedding.vocab_size)[:, None]
    return np.concatenate([rows, np.zeros((1, embedding.size), np.float32)])


def read_head(spec: ModelSpec, weights: ArrayWeights) -> HeadLayers | None:
    """Reads the classification head; None in an embedding model. See `read_encoder`."""
    base = _base(spec, weights)
    if spec.head is None:
        return None
    if isinstance(spec.head, AnswerHeadSpec):
        return (_answers(spec.head, spec.embedding.word_embeddings, base, weights),)
    return [_step(step, base, weights) for step in spec.head]


def read_vocabulary_head(spec: ModelSpec, info: ModelInfo, weights: ArrayWeights) -> HeadLayers:
    """Reads the head of a masked language model. For arguments see `read_encoder`.

    Raises:
        UnsupportedModelError: The checkpoint has no such head.
        WeightError: A tensor has the wrong shape.
    """
    head = spec.vocabulary
    if head is None or not weights.has(f"{head.dense.names[0]}.weight"):
        raise no_vocabulary_head(info)
    norm = _norm(weights, head.norm)
    assert norm is not None
    view, name = weights, f"{head.decoder}.weight"
    if not weights.has(name):
        view, name = _base(spec, weights), spec.embedding.word_embeddings
    bias = next((bias for bias in head.biases if weights.has(bias)), None)
    decoder = library.LinearWeights(
        weight=view.floats(name, info.vocab_size, head.norm.size),
        bias=None if bias is None else weights.floats(bias, info.vocab_size),
    )
    return (_linear(weights, head.dense), norm, decoder)


@dataclass(frozen=True, slots=True, eq=False)
class _Distances:
    """The embeddings of distances, which all layers project.

    Attributes:
        spec: Names of the projections.
        num_heads: H.
        scale: Factor of the scores.
        embeddings: [R, D] float32, after their norm.
        rows: Row of each distance, -L .. L.
    """

    spec: DisentangledSpec
    num_heads: int
    scale: np.float32
    embeddings: Floats
    rows: NDArray[np.int32]

    @classmethod
    def read(cls, spec: ModelSpec, base: ArrayWeights, max_len: int) -> _Distances | None:
        distances = spec.disentangled
        attention = spec.attention
        if distances is None:
            return None
        assert attention is not None
        rows_RD = base.floats(distances.distances, distances.num_distances, spec.hidden_size)
        if (norm := _norm(base, distances.norm)) is not None:
            centred_RD = rows_RD - rows_RD.mean(1, keepdims=True)
            rows_RD = centred_RD / np.sqrt((centred_RD**2).mean(1, keepdims=True) + np.float32(norm.eps)) * norm.weight
            rows_RD = rows_RD if norm.bias is None else rows_RD + norm.bias
        rows = distances.row_of(np.arange(-max_len, max_len + 1)).astype(np.int32)
        return cls(distances, attention.num_heads, np.float32(attention.scale), rows_RD, rows)

    def of_layer(self, scope: ArrayWeights) -> library.DistanceWeights:
        keys, queries = self._project(self.spec.key, scope), self._project(self.spec.query, scope)
        return library.DistanceWeights(
            keys=keys,
            queries=None if queries is None else queries * self.scale,
            rows=self.rows,
            num_distances=self.spec.num_distances,
        )

    def _project(self, spec: LinearSpec | None, scope: ArrayWeights) -> Floats | None:
        if spec is None:
            return None
        linear = _linear(scope, spec)
        projected_RC = self.embeddings @ linear.weight.T
        if linear.bias is not None:
            projected_RC = projected_RC + linear.bias
        num_distances = len(projected_RC)
        return np.ascontiguousarray(projected_RC.reshape(num_distances, self.num_heads, -1).swapaxes(0, 1))


def _base(spec: ModelSpec, weights: ArrayWeights) -> ArrayWeights:
    return weights.scope_of(spec.embedding.word_embeddings, spec.prefixes)


def _layer(
    spec: ModelSpec,
    layer: LayerSpec,
    base: ArrayWeights,
    rotary: Floats | None,
    bias: Floats | None,
    distances: _Distances | None,
) -> library.LayerWeights:
    attention = spec.attention
    scope = base.scope(layer.prefix)
    assert attention is not None
    assert layer.qkv is not None
    assert layer.attention_out is not None
    assert layer.mlp_in is not None
    assert layer.mlp_out is not None
    scale = np.float32(attention.scale)
    qkv = _linear(scope, layer.qkv)
    query_norm = _norm(scope, layer.query_norm)
    # The library expects q multiplied with the scale of the scores: the norm of q, if it has one, else its projection.
    if query_norm is not None:
        query_norm.weight[:] *= scale
        if query_norm.bias is not None:
            query_norm.bias[:] *= scale
    else:
        qkv = _with_scale(qkv, attention.num_heads * attention.head_size, scale)
    mlp_norm = _norm(scope, layer.mlp_norm)
    assert mlp_norm is not None
    window = spec.kinds[layer.kind].window
    return library.LayerWeights(
        attention_norm=_norm(scope, layer.attention_norm),
        qkv=qkv,
        attention_out=_linear(scope, layer.attention_out),
        mlp_norm=mlp_norm,
        mlp_in=_linear(scope, layer.mlp_in),
        mlp_out=_linear(scope, layer.mlp_out),
        window=window or ((-1, 0) if attention.is_causal else None),
        rotary=rotary,
        bias=bias,
        distances=None if distances is None else distances.of_layer(scope),
        query_norm=query_norm,
        key_norm=_norm(scope, layer.key_norm),
        after_attention=_norm(scope, layer.after_attention),
        after_mlp=_norm(scope, layer.after_mlp),
        softcap=attention.softcap or 0.0,
    )


def _position_table(spec: ModelSpec, base: ArrayWeights) -> Floats | None:
    """Returns the sums of all pairs of position and token type rows, [Y * P, E]; without positions, P is 1."""
    embedding = spec.embedding
    types_YE = None
    positions_PE = None
    if embedding.token_types is not None:
        types_YE = as_floats(base.table(embedding.token_types, embedding.num_token_types, embedding.size))
    if embedding.positions is not None:
        positions_PE = as_floats(base.table(embedding.positions, embedding.num_positions, embedding.size))
    if positions_PE is None:
        return None if types_YE is None else types_YE.copy()
    if types_YE is None:
        return positions_PE.copy()
    return (types_YE[:, None] + positions_PE).reshape(-1, embedding.size)


def _relative_bias(spec: ModelSpec, base: ArrayWeights, max_len: int) -> Floats | None:
    """Returns the bias of the scores by distance, [H, 2 * max_len + 1]."""
    bias = spec.relative_bias
    if bias is None:
        return None
    assert spec.attention is not None
    distances = np.arange(-max_len, max_len + 1)
    if isinstance(bias, AlibiSpec):
        return bias.table(distances)
    bias_BH = base.floats(bias.name, bias.num_buckets, spec.attention.num_heads)
    return np.ascontiguousarray(bias_BH[bias.bucket_of(distances)].T)


def _linear(scope: ArrayWeights, spec: LinearSpec) -> library.LinearWeights:
    """Returns a LinearWeights. Its arrays may be views of the file."""
    parts = list(zip(spec.names, spec.rows, strict=True))
    weights = [scope.floats(f"{name}.weight", rows, spec.in_features) for name, rows in parts]
    has_bias = spec.bias.is_read(scope.has(f"{spec.names[0]}.bias"))
    biases = [scope.floats(f"{name}.bias", rows) for name, rows in parts] if has_bias else []
    weight = weights[0] if len(weights) == 1 else np.concatenate(weights)
    bias = np.concatenate(biases) if biases else None
    if spec.is_gate_below:
        half = spec.out_features // 2
        weight, bias = np.roll(weight, half, axis=0), None if bias is None else np.roll(bias, half)
    return library.LinearWeights(
        weight=weight,
        bias=bias,
        activation=ActivationCode.NONE if spec.activation is None else _ACTIVATIONS[spec.activation],
        gated=spec.is_gated,
    )


def _with_scale(qkv: library.LinearWeights, width: int, scale: np.float32) -> library.LinearWeights:
    """Returns a projection with its first `width` outputs multiplied with `scale`."""
    weight, bias = (None if part is None else part.copy() for part in (qkv.weight, qkv.bias))
    assert weight is not None
    weight[:width] *= scale
    if bias is not None:
        bias[:width] *= scale
    return replace(qkv, weight=weight, bias=bias)


def _with_scaled_queries(spec: ModelSpec, adapter: library.AdapterWeights) -> library.AdapterWeights:
    """Returns an adapter whose terms of q are multiplied with the scale of the scores where `_layer` does so with q."""
    attention = spec.attention
    assert attention is not None
    layers = []
    for layer, terms in zip(spec.layers, adapter.layers, strict=True):
        if "qkv" in terms and layer.query_norm is None:
            term = terms["qkv"]
            up_NR = term.up.copy()
            up_NR[: attention.num_heads * attention.head_size] *= np.float32(attention.scale)
            terms = {**terms, "qkv": replace(term, up=up_NR)}
        layers.append(terms)
    return replace(adapter, layers=layers)


def _norm(scope: ArrayWeights, spec: NormSpec | None) -> library.NormWeights | None:
    if spec is None:
        return None
    weight = scope.floats(f"{spec.name}.weight", spec.size) + np.float32(spec.offset)
    has_bias = spec.bias.is_read(scope.has(f"{spec.name}.bias"))
    bias = scope.floats(f"{spec.name}.bias", spec.size).copy() if has_bias else None
    return library.NormWeights(weight=weight, bias=bias, eps=spec.eps, rms=spec.is_rms)


def _step(
    step: LinearSpec | NormSpec, base: ArrayWeights, weights: ArrayWeights
) -> library.LinearWeights | library.NormWeights:
    if isinstance(step, LinearSpec):
        return _linear(base if step.is_below_base else weights, step)
    norm = _norm(weights, step)
    assert norm is not None
    return norm


def _answers(
    spec: AnswerHeadSpec, word_embeddings: str, base: ArrayWeights, weights: ArrayWeights
) -> library.LinearWeights:
    """Returns the rows of the output embedding for the answer tokens, [C, D]."""
    is_tied = not weights.has("lm_head.weight") if spec.is_tied is None else spec.is_tied
    view, name = (base, word_embeddings) if is_tied else (weights, "lm_head.weight")
    picked = list(spec.tokens)
    stored_CD = view.table(name, spec.vocab_size, spec.size)[picked]
    view.check_finite(name, stored_CD)
    rows_CD = as_floats(stored_CD)
    bias_C = weights.floats("lm_head.bias", spec.vocab_size)[picked] if weights.has("lm_head.bias") else None
    scale = np.float32(spec.scale)
    if spec.is_difference:
        rows_CD = rows_CD[1:] - rows_CD[:1]
        bias_C = None if bias_C is None else bias_C[1:] - bias_C[:1]
    return library.LinearWeights(weight=rows_CD * scale, bias=None if bias_C is None else bias_C * scale)


def _scale(table_VD: Array, dtype: str) -> None:
    """Multiplies embeddings with the square root of their width, rounded to the model's dtype as in transformers."""
    factor = as_floats(cast_table(np.full((1, 1), table_VD.shape[1] ** 0.5, np.float32), dtype))
    for first in range(0, len(table_VD), _BLOCK_ROWS):
        rows = table_VD[first : first + _BLOCK_ROWS]
        rows[:] = cast_table(as_floats(rows) * factor, dtype)
