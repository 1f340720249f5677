"""Runs encoders, decoders and recurrent models with penstock.kernels, as a ModelSpec describes them.

Shape letters: T packed tokens, V vocabulary, D model width, E embedding width, P positions, Y token types, Q = Y * P,
H heads, A width of all heads, L longest sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.cpu import ADAPTED_LINEARS, AdapterWeights, LowRankWeights
from penstock.kernels.norm import Embeddings, embed_norm

from ...families.spec import AlibiSpec, EmbeddingSpec, LayerSpec, ModelSpec, NormSpec, RelativeBiasSpec
from ...protocol.errors import UnsupportedTaskError
from ...protocol.model_info import ModelInfo, ModelKind
from ...protocol.multi_vector import SparseKind
from .layers.attention import Attention, AttentionMetadata, Distances
from .layers.experts import SparseExperts
from .layers.linear import AdaptedRows, Linear, LowRankTerms, Mlp
from .layers.mixers import load_mixer
from .layers.norm import AddingLayer, LayerNorm, Residual, RmsNorm, load_norm
from .layers.rotary import RotaryEmbedding, Rotation
from .layers.weights import Fusion, Weights
from .model_heads import VocabularyHead, load_head
from .packed_batch import ModelOutput, PackedModel

if TYPE_CHECKING:
    from .packed_batch import PackedBatch


class Embedding:
    """projection(norm(word + position + token type)).

    The position and type rows are summed when the model is loaded, into one table [Q, E], so that a token needs two
    lookups. Without positions, the table has the type rows. The table and the sums are float32. With Fusion.FUSED, one
    kernel computes all of it.
    """

    def __init__(self, weights: Weights, spec: EmbeddingSpec) -> None:
        self._spec = spec
        self.word_embeddings_VE = weights.table(spec.word_embeddings, spec.vocab_size, spec.size)
        if spec.is_scaled:
            # transformers rounds the factor to the type of the model before it multiplies.
            self.word_embeddings_VE *= torch.tensor(spec.size**0.5, dtype=weights.dtype, device=weights.device)
        if spec.scale != 1.0:
            self.word_embeddings_VE *= spec.scale
        self._positions_QE: Tensor | None = None
        if spec.token_types is not None:
            self._positions_QE = weights.table(spec.token_types, spec.num_token_types, spec.size, dtype=torch.float32)
        if spec.positions is not None:
            position_PE = weights.table(spec.positions, spec.num_positions, spec.size, dtype=torch.float32)
            type_YE = self._positions_QE
            self._positions_QE = position_PE
            if type_YE is not None:
                self._positions_QE = (type_YE[:, None] + position_PE[None]).flatten(0, 1)
        sum_dtype = None if self._positions_QE is None else torch.float32
        self._norm = None if spec.norm is None else load_norm(weights, spec.norm, dtype=sum_dtype)
        self._projection = None if spec.projection is None else Linear.load(weights, spec.projection)
        self._tables = (
            Embeddings(self.word_embeddings_VE)
            if self._positions_QE is None
            else Embeddings(self.word_embeddings_VE, self._positions_QE, spec.num_positions)
        )
        self._adapters: LowRankTerms | None = None

    def adapt(self, terms: LowRankTerms) -> None:
        """Sets the terms that adapters add to the word embeddings."""
        self._adapters = terms

    def __call__(self, batch: PackedBatch) -> Tensor:
        """Returns the first hidden states [T, D] in the type of the model."""
        embedded_TE = self._embed(batch)
        return embedded_TE if self._projection is None else self._projection(embedded_TE)

    def _embed(self, batch: PackedBatch) -> Tensor:
        spec = self._spec
        norm = self._norm
        ids_T = batch.input_ids
        tables = self._tables
        if self._adapters is not None and self._adapters.are_used:
            words_TE = self._adapters.add_embeddings(F.embedding(ids_T, self.word_embeddings_VE), ids_T)
            ids_T = torch.arange(len(ids_T), device=ids_T.device)
            tables = tables._replace(word=words_TE)
        if norm is None:
            return F.embedding(ids_T, tables.word)
        positions_T = None
        types_T = batch.token_type_ids if spec.num_token_types > 1 else None
        if self._positions_QE is not None and spec.positions is None:
            positions_T, types_T = torch.zeros_like(batch.positions) if types_T is None else types_T, None
        elif self._positions_QE is not None:
            positions_T = batch.positions
            if spec.padding_id is not None:
                positions_T = padding_aware_positions(batch.input_ids, positions_T, spec.padding_id)
        return embed_norm(
            ids_T,
            tables,
            norm.norm,
            positions=positions_T,
            token_type_ids=types_T,
            out_dtype=self.word_embeddings_VE.dtype,
            backend=norm.backend,
        )


class Layer:
    """Attention or a recurrent mixer, then an MLP or experts, with their residual sums and norms.

    Pre-norm: x + Attention(Norm(x)), then x + Mlp(Norm(x)); Gemma also normalizes the outputs before the sums.
    Post-norm: Norm(x + Attention(x)), then Norm(x + Mlp(x)).

    Args:
        index: Index of the layer among the layers with attention or among the layers with a mixer.
        distances: Embeddings of distances; None: the model has none.
    """

    def __init__(
        self, weights: Weights, spec: LayerSpec, model: ModelSpec, index: int, distances: Distances | None = None
    ) -> None:
        sums = replace(weights, dtype=torch.float32) if model.has_float32_sum else weights

        def norm_of(norm: NormSpec | None) -> LayerNorm | RmsNorm | None:
            return None if norm is None else load_norm(sums, norm)

        self.kind = spec.kind
        self.dtype = weights.dtype
        self.scale = model.residual_scale
        self.is_pre_norm = model.is_pre_norm
        self.is_fused = weights.fusion is Fusion.FUSED
        self.attention_norm = norm_of(spec.attention_norm)
        self.mixer = None if spec.mixer is None else load_mixer(weights, spec.mixer, model.hidden_size, index)
        self.attention: Attention | None = None
        if spec.qkv is not None and spec.attention_out is not None:
            assert model.attention is not None
            window = model.kinds[spec.kind].window
            self.attention = Attention.load(
                weights, spec.qkv, model.attention, window, kv_index=index, layer=spec, distances=distances
            )
            self.attention_out = Linear.load(weights, spec.attention_out)
        self.norm_after_attention = norm_of(spec.after_attention)
        self.mlp_norm = norm_of(spec.mlp_norm)
        self.mlp: Mlp | SparseExperts | None = None
        if spec.mlp_in is not None and spec.mlp_out is not None:
            self.mlp = Mlp.load(weights, spec.mlp_in, spec.mlp_out)
        if spec.experts is not None:
            self.mlp = SparseExperts.load(weights, spec.experts, self.mlp)
        self.norm_after_mlp = norm_of(spec.after_mlp)

    def adapt(self, terms: Mapping[str, LowRankTerms]) -> None:
        """Sets the terms that adapters add to the maps of the layer, by the names of ADAPTED_LINEARS."""
        if self.attention is not None:
            self.attention.qkv.adapt(terms["qkv"])
            self.attention_out.adapt(terms["attention_out"])
        if isinstance(self.mlp, Mlp):
            self.mlp.adapt(terms["mlp_in"], terms["mlp_out"])

    def __call__(
        self,
        stream: Residual,
        batch: PackedBatch,
        metadata: AttentionMetadata | None,
        rotation: Rotation | None,
        relative_bias: Tensor | None,
    ) -> Residual:
        """Returns the next hidden states."""
        x_TD, stream = self.attention_input(stream)
        if self.mixer is not None:
            return self._plus_mlp(stream.plus(partial(self.mixer, batch=batch), x_TD, scale=self.scale))
        assert self.attention is not None
        assert metadata is not None
        return self.after_attention(self.attention(x_TD, batch, metadata, rotation, relative_bias), stream)

    def attention_input(self, stream: Residual) -> tuple[Tensor, Residual]:
        """Returns the input [T, D] of attention or of the mixer, and the hidden states."""
        if self.attention_norm is None or not self.is_pre_norm:
            return stream.hidden, stream
        x_TD, stream = stream.normed_and_sum(self.attention_norm)
        return x_TD.to(self.dtype), stream

    def after_attention(self, attended_TA: Tensor, stream: Residual) -> Residual:
        """Returns the next hidden states from the output of attention.

        It does not use the borders of the sequences; without fusion, it has only operations of torch, so that
        torch.compile can compile all of it.
        """
        if not self.is_pre_norm:
            assert self.attention_norm is not None
            assert self.mlp_norm is not None
            assert self.mlp is not None
            summed = stream.plus(self.attention_out, attended_TA)
            if self.norm_after_attention is not None:
                summed = stream.plus_term(summed.normed(self.norm_after_attention))
            hidden_TD = summed.normed(self.attention_norm)
            hidden_TD = Residual(hidden_TD, is_fused=self.is_fused).plus(self.mlp, hidden_TD).normed(self.mlp_norm)
            return Residual(hidden_TD, is_fused=self.is_fused)
        return self._plus_mlp(self._plus(stream, self.attention_out, attended_TA, self.norm_after_attention))

    def _plus_mlp(self, stream: Residual) -> Residual:
        if self.mlp_norm is None or self.mlp is None:
            return stream
        x_TD, stream = stream.normed_and_sum(self.mlp_norm)
        return self._plus(stream, self.mlp, x_TD, self.norm_after_mlp)

    def _plus(self, stream: Residual, mapping: AddingLayer, x: Tensor, norm: LayerNorm | RmsNorm | None) -> Residual:
        if norm is not None:
            return stream.plus_normed(norm, mapping(x))
        return stream.plus(mapping, x, scale=self.scale)


class SpecModel(PackedModel):
    """An encoder, a decoder or a recurrent model, with the head for its kind of model.

    Raises:
        WeightError: A tensor is missing or has the wrong shape.
        UnsupportedModelError: penstock does not support an activation.
    """

    def __init__(
        self, info: ModelInfo, spec: ModelSpec, weights: Weights, adapters: Sequence[AdapterWeights] = ()
    ) -> None:
        self.hidden_size = spec.hidden_size
        self.cache_spec = spec.cache_spec
        self.is_recordable = not spec.is_decoder and spec.disentangled is None
        base = weights.scope_of(spec.embedding.word_embeddings, spec.prefixes)
        self.embedding = Embedding(base, spec.embedding)
        self.dtype = weights.dtype
        self.sum_dtype = torch.float32 if spec.has_float32_sum else weights.dtype
        distances = None if spec.disentangled is None else Distances(base, spec.disentangled, info.max_model_len)
        self.layers: list[Layer] = []
        num_mixers = 0
        for part in spec.layers:
            index = num_mixers if part.mixer is not None else len(self.layers) - num_mixers
            self.layers.append(Layer(base.scope(part.prefix), part, spec, index, distances))
            num_mixers += part.mixer is not None
        self.attentions = {layer.kind: layer.attention for layer in self.layers if layer.attention is not None}
        self.last_attention = next((layer for layer in reversed(self.layers) if layer.attention is not None), None)
        self.rotary = {
            name: RotaryEmbedding(kind.rope, weights.device)
            for name, kind in spec.kinds.items()
            if kind.rope is not None
        }
        self.relative_bias: Tensor | None = None
        if spec.relative_bias is not None:
            assert spec.attention is not None
            num_heads = spec.attention.num_heads
            self.relative_bias = _load_bias(base, spec.relative_bias, num_heads, info.max_model_len)
        sums = replace(base, dtype=self.sum_dtype)
        self.final_norm = None if spec.final_norm is None else load_norm(sums, spec.final_norm)
        self.is_fused = weights.fusion is Fusion.FUSED
        self._adapted_rows = AdaptedRows()
        if adapters:
            self._load_adapters(adapters, weights)
        head = load_head(weights, base, spec.head, spec.embedding.word_embeddings)
        is_token_classifier = info.kind is ModelKind.TOKEN_CLASSIFIER
        self.sequence_head = None if is_token_classifier else head
        self.token_head = head if is_token_classifier or spec.scores_rows else None
        if info.sparse is not None and info.sparse.kind is SparseKind.VOCABULARY_LOGITS:
            # On a GPU in the model's dtype: float32 products take ten times as long and change the vectors little.
            view = replace(weights, dtype=torch.float32) if weights.device.type == "cpu" else weights
            self.vocabulary_head = VocabularyHead(view, spec, info)

    def forward(self, batch: PackedBatch, *, need_attention: bool = False) -> ModelOutput:
        """Runs the layers of the spec; attention weights are those of the last layer with attention."""
        if need_attention and self.last_attention is None:
            raise UnsupportedTaskError(
                "ATTENTION pooling needs attention weights, but the model has no attention.", param="pooling_type"
            )
        self._adapted_rows.groups = batch.adapters
        metadata = {kind: attention.metadata(batch) for kind, attention in self.attentions.items()}
        rotations = {kind: rotary(batch) for kind, rotary in self.rotary.items()}
        stream = Residual(self.embedding(batch).to(self.sum_dtype), is_fused=self.is_fused)
        weights_TH = None
        for layer in self.layers:
            layer_input = stream
            rotation = rotations.get(layer.kind)
            stream = layer(stream, batch, metadata.get(layer.kind), rotation, self.relative_bias)
            if need_attention and layer is self.last_attention and layer.attention is not None:
                x_TD, _ = layer.attention_input(layer_input)
                weights_TH = layer.attention.pooling_weights(x_TD, batch, rotation, self.relative_bias)
        hidden_TD = stream.hidden if self.final_norm is None else stream.normed(self.final_norm)
        return ModelOutput(hidden_states=hidden_TD.to(self.dtype), attention_weights=weights_TH)

    def _load_adapters(self, adapters: Sequence[AdapterWeights], weights: Weights) -> None:
        def terms_of(terms: Sequence[LowRankWeights | None]) -> LowRankTerms:
            return LowRankTerms(terms, self._adapted_rows, weights.dtype, weights.device)

        for index, layer in enumerate(self.layers):
            terms = [adapter.layers[index] for adapter in adapters]
            layer.adapt({name: terms_of([layer_terms.get(name) for layer_terms in terms]) for name in ADAPTED_LINEARS})
        if any(adapter.embedding is not None for adapter in adapters):
            self.embedding.adapt(terms_of([adapter.embedding for adapter in adapters]))


def _load_bias(weights: Weights, spec: RelativeBiasSpec | AlibiSpec, num_heads: int, max_len: int) -> Tensor:
    """Returns the bias [H, 2 * max_len + 1] of the attention scores by the distance of two tokens."""
    distances = np.arange(-max_len, max_len + 1)
    if isinstance(spec, AlibiSpec):
        return torch.from_numpy(spec.table(distances)).to(weights.device, weights.dtype)
    bias_BH = weights.tensor(spec.name, spec.num_buckets, num_heads)
    buckets = torch.from_numpy(spec.bucket_of(distances))
    return bias_BH[buckets.to(bias_BH.device)].t().contiguous()


def padding_aware_positions(input_ids_T: Tensor, positions_T: Tensor, pad_token_id: int) -> Tensor:
    """Returns the positions of RoBERTa and MPNet, which begin at pad_token_id + 1.

    As in transformers, a padding token in a text has position pad_token_id and is not counted.
    """
    is_text_T = input_ids_T.ne(pad_token_id)
    running_T = is_text_T.cumsum(0)
    starts_T = torch.arange(len(positions_T), device=positions_T.device) - positions_T
    before_T = (running_T - is_text_T.long())[starts_T]
    return (running_T - before_T) * is_text_T + pad_token_id
