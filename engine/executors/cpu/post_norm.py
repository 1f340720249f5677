"""BERT and its relatives for the native kernels: the original Transformer's encoder, from their checkpoints.

Shape letters: T packed tokens, D model width, E embedding width, I inner width of the MLP, H heads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu import EncoderSpec, LayerSpec

from ...checkpoint.views import ArrayWeights, Floats, as_floats, cast_table
from ...protocol.model_info import ModelInfo, ModelKind
from .distance_buckets import distance_buckets
from .encoder_configs import EncoderConfig
from .heads import HeadSteps
from .packed_arrays import PackedArrays
from .spec_reader import SpecReader, has_activation, has_head_size


class PostNormReader:
    """Reads one model of these families.

    Args:
        config: Of its family.
    """

    scores_rows = False

    def __init__(self, config: EncoderConfig) -> None:
        self._config = config
        self.hidden_size = config.hidden_size

    def fits(self, info: ModelInfo) -> bool:
        """Whether the native kernels have all that the model needs."""
        head_size = self._config.hidden_size // self._config.num_attention_heads
        return has_activation(self._config.hidden_act) and has_head_size(head_size)

    def cache_spec(self, info: ModelInfo) -> None:
        """None: attention looks both ways."""

    def spec(self, info: ModelInfo, weights: ArrayWeights) -> EncoderSpec:
        """Reads the encoder.

        Args:
            info: The resolved model.
            weights: View of the whole checkpoint.

        Raises:
            WeightError: A tensor is missing, has another shape, or holds NaN or inf.
            UnsupportedModelError: An option of it is not known.
        """
        config = self._config
        config.check()
        base = self._base(weights)
        D, E = config.hidden_size, config.embedding_width
        embeddings = base.scope("embeddings")
        bias = self._bias(base, info.max_model_len)
        return EncoderSpec(
            num_heads=config.num_attention_heads,
            pre_norm=False,
            words=cast_table(embeddings.table("word_embeddings.weight", config.vocab_size, E), info.dtype),
            places=self._places(embeddings),
            embedding_norm=SpecReader(embeddings).norm("LayerNorm", E, config.layer_norm_eps),
            projection=SpecReader(base).map("embeddings_project", E, D) if E != D else None,
            layers=(self._layer(base, index, bias) for index in range(config.num_hidden_layers)),
        )

    def head(self, info: ModelInfo, weights: ArrayWeights) -> HeadSteps:
        """Reads the classification head that the model's kind asks for."""
        D, read = self._config.hidden_size, SpecReader(weights)
        if info.kind is ModelKind.TOKEN_CLASSIFIER:
            return (read.map("classifier", D, info.num_labels),)
        dense, out, activation = self._config.head_names
        dense = dense.format(base=self._base(weights).prefix)
        return read.map(dense, D, D, activation=activation), read.map(out, D, info.num_labels)

    def places(self, batch: PackedArrays) -> NDArray[np.int64]:
        """Returns the rows of the table of positions and token types, [T]."""
        config, positions_T = self._config, batch.positions
        if config.padding_id is not None:
            positions_T = padding_aware_positions(batch, config.padding_id)
        if batch.token_type_ids is None or config.num_token_types <= 1:
            return positions_T
        return positions_T + batch.token_type_ids * config.max_position_embeddings

    def _base(self, weights: ArrayWeights) -> ArrayWeights:
        return weights.scope_of("embeddings.word_embeddings.weight", (self._config.base_prefix, ""))

    def _places(self, embeddings: ArrayWeights) -> Floats:
        """Returns the rows of positions and token types, summed, [Y * P, E]."""
        config, E = self._config, self._config.embedding_width
        places_PE = as_floats(embeddings.table("position_embeddings.weight", config.max_position_embeddings, E))
        if not config.num_token_types:
            return places_PE.copy()
        types_YE = as_floats(embeddings.table("token_type_embeddings.weight", config.num_token_types, E))
        return (types_YE[:, None] + places_PE).reshape(-1, E)

    def _bias(self, base: ArrayWeights, max_len: int) -> Floats | None:
        """Returns what is added to the scores by distance, [H, 2 * max_len + 1]."""
        config = self._config
        if not config.num_distances:
            return None
        name = "encoder.relative_attention_bias.weight"
        bias_BH = base.floats(name, config.num_distances, config.num_attention_heads)
        return np.ascontiguousarray(bias_BH[distance_buckets(np.arange(-max_len, max_len + 1))].T)

    def _layer(self, base: ArrayWeights, index: int, bias: Floats | None) -> LayerSpec:
        config, names = self._config, self._config.block_names
        read = SpecReader(base.scope(f"{config.blocks_name}.{index}"))
        D, I, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps  # noqa: E741
        return LayerSpec(
            attention_norm=read.norm(names.attention_norm, D, eps),
            qkv=read.qkv(names[:3], D, config.num_attention_heads),
            attention_out=read.map(names.attention_out, D, D),
            mlp_norm=read.norm(names.mlp_norm, D, eps),
            mlp_in=read.map(names.mlp_in, D, I, activation=config.hidden_act),
            mlp_out=read.map(names.mlp_out, I, D),
            bias=bias,
        )


def padding_aware_positions(batch: PackedArrays, padding_id: int) -> NDArray[np.int64]:
    """Returns the positions of RoBERTa and MPNet, [T]: they begin at padding_id + 1.

    A padding token that is part of a text stands at padding_id and is not counted, as in transformers.
    """
    is_text_T = batch.input_ids != padding_id
    running_T = is_text_T.cumsum()
    before_N = running_T[batch.starts] - is_text_T[batch.starts]
    places_T: NDArray[np.int64] = (running_T - np.repeat(before_N, batch.lengths)) * is_text_T + padding_id
    return places_T
