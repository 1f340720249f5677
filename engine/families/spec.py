"""The description of a packed model: names and shapes of its weights, and the structure of its layers.

A family converts config.json to a ModelSpec. The executors read its weights and run it.

Shape letters: V vocabulary, D model width, E embedding width, H heads of q, G heads of k and v, K head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import UnsupportedModelError
from ..protocol.model_info import DenseSpec, ModelInfo
from ..protocol.tasks import PoolingType
from ..scheduling import CacheSpec, KvLayerSpec, SsmLayerSpec
from .rope import RopeSpec


class Bias(Enum):
    """Whether a checkpoint stores a bias for a norm or a linear map."""

    NONE = auto()
    REQUIRED = auto()
    OPTIONAL = auto()

    @classmethod
    def of(cls, has_bias: bool) -> Bias:
        """Returns REQUIRED or NONE."""
        return cls.REQUIRED if has_bias else cls.NONE

    def is_read(self, is_stored: bool) -> bool:
        """Whether to read the bias. To read a required bias that is not stored is an error."""
        return self is Bias.REQUIRED or (self is Bias.OPTIONAL and is_stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """A LayerNorm or an RMSNorm.

    Attributes:
        name: Name of the weights without ".weight"; None: the weights are 1.
        size: Columns.
        eps: Added to the variance.
        is_rms: RMSNorm instead of LayerNorm.
        bias: Whether it has a bias.
        offset: Added to the stored weights.
    """

    name: str | None
    size: int
    eps: float
    is_rms: bool = False
    bias: Bias = Bias.NONE
    offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """activation(x W^T + b). W may be stored in parts.

    Attributes:
        names: Names of the parts, from top to bottom, without ".weight".
        in_features: Columns of W.
        rows: Rows of each part.
        bias: Whether it has a bias.
        activation: Name as in config.json; None: no activation.
        is_gated: The upper half of W is a gate: the result is activation(upper half) * lower half.
        is_gate_below: The checkpoint stores the gate in the lower half. The executors swap the halves.
        is_below_base: Heads only: the names are below the prefix of the base model.
    """

    names: tuple[str, ...]
    in_features: int
    rows: tuple[int, ...]
    bias: Bias = Bias.REQUIRED
    activation: str | None = None
    is_gated: bool = False
    is_gate_below: bool = False
    is_below_base: bool = False

    @property
    def out_features(self) -> int:
        """Rows of W."""
        return sum(self.rows)


def linear(
    names: str | Sequence[str],
    in_features: int,
    *rows: int,
    bias: Bias = Bias.REQUIRED,
    activation: str | None = None,
    is_gated: bool = False,
    is_below_base: bool = False,
) -> LinearSpec:
    """Returns a LinearSpec. `rows`: rows of each part. A single name names all parts together."""
    names = (names,) if isinstance(names, str) else tuple(names)
    return LinearSpec(
        names=names,
        in_features=in_features,
        rows=rows if len(names) == len(rows) else (sum(rows),),
        bias=bias,
        activation=activation,
        is_gated=is_gated,
        is_below_base=is_below_base,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticTable:
    """The stored table of a static embedding: weights[i] * table[mapping[i]] is the row of token i.

    A row of zeros follows the last token. It is the row of a text without tokens.

    Attributes:
        shape: [R, D], or [V] for one weight per token.
        has_mapping: The checkpoint has `mapping` [V], the table row of each token; otherwise R is V.
        has_weights: The checkpoint has `weights` [V], a factor for each token.
    """

    shape: tuple[int, ...]
    has_mapping: bool
    has_weights: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchSpec:
    """The rows of an image: class row, then patches W^T + b; plus positions. All names are below the base.

    Attributes:
        name: Name of W, [D, 3, S, S] or [D, S * S * 3], and of b, without ".weight" and ".bias".
        is_linear: W is [D, S * S * 3], in the order of ImagePatches.
        bias: Whether there is a b.
        class_row: Name of the class row [D]; None: no class row.
        positions: Name of the table [Q, D].
        num_positions: Q.
        resizes_positions: The table is a square grid, which is resized to the grid of each image. Otherwise all
            images have Q rows.
    """

    name: str
    is_linear: bool
    bias: Bias
    class_row: str | None
    positions: str
    num_positions: int
    resizes_positions: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSpec:
    """The first hidden states: projection(norm(word + position + token type)). All names are below the base.

    Attributes:
        word_embeddings: Name of the table [V, E].
        vocab_size: V.
        size: E.
        is_scaled: Multiply rows of `word_embeddings` with sqrt(E), rounded to the model's dtype.
        scale: Factor of the rows of `word_embeddings`.
        positions: Name of the table of learned positions; None without a table.
        num_positions: Rows of the table.
        token_types: Name of the table of token types; None without a table.
        num_token_types: Rows of the table; 0 without a table.
        padding_id: Positions begin at padding_id + 1, and do not count this token; None: they begin at 0.
        norm: Norm of the sum; None: no norm.
        projection: Projection from E to D; None if they are equal.
        static: How `word_embeddings` is stored in a model without layers; None: as [V, E].
        patches: The rows of images instead of words; `word_embeddings` is then the first of their weights. None: the
            model reads texts.
    """

    word_embeddings: str
    vocab_size: int
    size: int
    is_scaled: bool = False
    scale: float = 1.0
    positions: str | None = None
    num_positions: int = 0
    token_types: str | None = None
    num_token_types: int = 0
    padding_id: int | None = None
    norm: NormSpec | None = None
    projection: LinearSpec | None = None
    static: StaticTable | None = None
    patches: PatchSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The attention of every layer.

    Attributes:
        num_heads: H.
        num_kv_heads: G; query head h reads key head h // (H / G).
        head_size: K.
        scale: Factor of the scores.
        is_causal: Whether a token attends only to itself and earlier tokens.
        softcap: c: scaled scores s become c * tanh(s / c); None: no cap.
        query_growth: (b, n): the query at position p is multiplied with 1 + b * log(1 + p // n); None: no growth.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    is_causal: bool = False
    softcap: float | None = None
    query_growth: tuple[float, int] | None = None

    @property
    def kv_layer(self) -> KvLayerSpec:
        """The keys and values of a token in the cache."""
        return KvLayerSpec(self.num_kv_heads, self.head_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """The attention of one layer type, such as global or local.

    Attributes:
        window: (left, right) tokens that a query attends to beside itself; None: no window.
        rope: Rotary positions; None: no rotary positions.
    """

    window: tuple[int, int] | None = None
    rope: RopeSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """The mixer of Mamba: a convolution, and a recurrence with step and matrices computed from the token.

    Attributes:
        prefix: Prefix of the mixer within its layer.
        inner_size: C, channels of the recurrence.
        state_size: S.
        conv_width: W.
        step_rank: Q.
        bias: Whether the outer projections have biases.
        conv_bias: Whether the convolution has a bias.
        activation: Activation after the convolution.
        norms: Norms of step, B and C; () without norms.
    """

    prefix: str
    inner_size: int
    state_size: int
    conv_width: int
    step_rank: int
    bias: bool
    conv_bias: bool
    activation: str
    norms: tuple[NormSpec, ...] = ()

    @property
    def ssm_layer(self) -> SsmLayerSpec:
        """The states that a sequence keeps from chunk to chunk."""
        return SsmLayerSpec((self.inner_size, self.conv_width - 1), (self.inner_size, self.state_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec:
    """The mixer of Mamba-2: a recurrence with one decay per head.

    Attributes:
        prefix: Prefix of the mixer within its layer.
        num_heads: Heads of the recurrence.
        head_size: P, channels of a head.
        num_groups: Groups of heads that share their B and C matrices.
        state_size: S.
        conv_width: W.
        bias: Whether the outer projections have biases.
        conv_bias: Whether the convolution has a bias.
        activation: Activation after the convolution.
        step_limit: Smallest and largest step.
        eps: Epsilon of the norm before the output projection.
    """

    prefix: str
    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    conv_width: int
    bias: bool
    conv_bias: bool
    activation: str
    step_limit: tuple[float, float]
    eps: float

    @property
    def inner_size(self) -> int:
        """C, channels of all heads."""
        return self.num_heads * self.head_size

    @property
    def conv_size(self) -> int:
        """E, channels of the convolution."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def ssm_layer(self) -> SsmLayerSpec:
        """The states that a sequence keeps from chunk to chunk."""
        return SsmLayerSpec((self.conv_size, self.conv_width - 1), (self.num_heads, self.head_size, self.state_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """A gated convolution over the token and its neighbours on both sides: out(c * conv(b * x)).

    b, c and x [D] are the thirds of one projection of the token, and out projects from D to D.

    Attributes:
        prefix: Prefix of the mixer within its layer.
        width: W, tokens that the convolution reads.
        bias: Whether the projections and the convolution have biases.
    """

    prefix: str
    width: int
    bias: bool


MixerSpec = MambaSpec | Mamba2Spec | ShortConvSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts: gated MLPs. Each token uses the `top_k` experts with the highest router scores.

    Attributes:
        router: Name of the router's weight [experts, D], without ".weight".
        prefix: Prefix of the experts within the layer. Then follow, unless `is_stacked`, the index of the expert, and
            the names of `up` and `down`.
        is_stacked: The weights of all experts are one tensor.
        up: Gated projection of one expert, D to 2 * I.
        down: Projection of one expert, I to D.
        num_experts: Number of experts.
        top_k: Experts per token.
        renormalise: Whether the weights of a token's experts sum to 1. Otherwise the weights of all experts do.
    """

    router: str
    prefix: str
    is_stacked: bool
    up: LinearSpec
    down: LinearSpec
    num_experts: int
    top_k: int
    renormalise: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Attention or a recurrent mixer, then an MLP, experts, or both. All names are below `prefix`.

    Attributes:
        prefix: Prefix of the layer within the base model.
        kind: Key of ModelSpec.kinds, for a layer with attention.
        attention_norm: Norm before attention or the mixer, or after the residual sum; None: no norm.
        mixer: Recurrent mixer; None for a layer with attention.
        qkv: Projection from D to (H + 2 * G) * K.
        query_norm: Norm of every head of q before the rotation, [K], or of all heads together, [H * K]; None: no norm.
        key_norm: Like `query_norm`, for k.
        attention_out: Projection from H * K to D.
        after_attention: Norm of the output of attention before the residual sum; None: no norm. In a post-norm model it
            normalises the sum of this output and the input, and its result is added to the input again.
        mlp_norm: Norm before the MLP, or after the residual sum; None in a layer without MLP and experts.
        mlp_in: First projection of the MLP; None without an MLP.
        mlp_out: Second projection of the MLP, to D.
        experts: Experts; their output is added to that of the MLP. None without experts.
        after_mlp: Norm of the output of the MLP before the residual sum; None: no norm.
    """

    prefix: str
    kind: str = ""
    attention_norm: NormSpec | None
    mixer: MixerSpec | None = None
    qkv: LinearSpec | None = None
    query_norm: NormSpec | None = None
    key_norm: NormSpec | None = None
    attention_out: LinearSpec | None = None
    after_attention: NormSpec | None = None
    mlp_norm: NormSpec | None = None
    mlp_in: LinearSpec | None = None
    mlp_out: LinearSpec | None = None
    experts: ExpertsSpec | None = None
    after_mlp: NormSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeBiasSpec:
    """A learned bias of the attention scores by the distance between two tokens.

    Attributes:
        name: Name of the table [buckets, H] within the base model.
        num_buckets: Rows of the table.
        bucket_of: Returns the row, int64, of each distance from a query to a key.
    """

    name: str
    num_buckets: int
    bucket_of: Callable[[NDArray[np.int64]], NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlibiSpec:
    """A constant bias of the attention scores: minus the distance between two tokens, times the slope of the head.

    Source: Press et al., Train Short, Test Long (arXiv 2108.12409).
    """

    num_heads: int

    def table(self, distances: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns [H, N] float32, the bias at each of N distances."""
        slopes_H = np.array(_slopes(self.num_heads), np.float32)
        return -slopes_H[:, None] * np.abs(distances).astype(np.float32)


def _slopes(num_heads: int) -> list[float]:
    """Returns 2^(-8 i / H) for head i = 1 .. H. If H is no power of 2, other heads have every second slope of 2 * H."""
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes if power == num_heads else slopes + _slopes(2 * power)[::2][: num_heads - power]


@dataclass(frozen=True, slots=True, kw_only=True)
class DisentangledSpec:
    """Terms of the attention scores with learned embeddings of distances (DeBERTa).

    The score of query i and key j is q_i k_j + q_i key(e_d) + k_j query(e_d), times the scale of the attention, where
    e_d is the embedding of the distance i - j.

    Attributes:
        distances: Name of the table [R, D] of embeddings within the base model.
        num_distances: R.
        norm: Norm of the embeddings, within the base model; None: no norm.
        key: Projection to H * K of the second term, below the prefix of each layer; None: no such term.
        query: Projection to H * K of the third term, likewise.
        row_of: Returns the row, int64, of each distance i - j. It does not decrease with the distance.
    """

    distances: str
    num_distances: int
    norm: NormSpec | None
    key: LinearSpec | None
    query: LinearSpec | None
    row_of: Callable[[NDArray[np.int64]], NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHeadSpec:
    """The head of a generative reranker: next-token logits of its answer tokens.

    Attributes:
        tokens: One token, or two: false and true.
        vocab_size: V.
        size: D.
        is_difference: Return one logit, true minus false: its sigmoid is the softmax over the two.
        is_tied: Whether the output embedding is the input embedding; None: if the checkpoint has no output embedding.
        scale: Factor of the logits.
        softcap: c: scaled logits s become c * tanh(s / c); None: no cap.
    """

    tokens: tuple[int, ...]
    vocab_size: int
    size: int
    is_difference: bool
    is_tied: bool | None
    scale: float
    softcap: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularySpec:
    """The head of a masked language model: decoder(norm(dense(x))).

    Attributes:
        dense: Projection from D to D, with its activation.
        norm: Norm after `dense`.
        decoder: Name of the projection to the vocabulary; the word embedding if the checkpoint has none.
        biases: Possible names of its bias; the first one in the checkpoint is used.
    """

    dense: LinearSpec
    norm: NormSpec
    decoder: str
    biases: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPoolSpec:
    """Pools the rows of a sequence with a learned query: y + mlp(norm(y)), where y is attention(query, rows, rows).

    The attention has the heads of the model, and the names of torch.nn.MultiheadAttention.

    Attributes:
        query: Name of the query, [1, 1, D], within the base model.
        prefix: Prefix of the attention within the base model.
        norm: Norm before the MLP.
        mlp_in: First projection of the MLP, with its activation.
        mlp_out: Second projection of the MLP.
    """

    query: str
    prefix: str
    norm: NormSpec
    mlp_in: LinearSpec
    mlp_out: LinearSpec


def no_vocabulary_head(info: ModelInfo) -> UnsupportedModelError:
    """Returns the error for a sparse model with a checkpoint without a masked language model's head."""
    return UnsupportedModelError(
        f"{info.name} computes sparse vectors with a masked language model, but its checkpoint has no head of a masked "
        "language model that penstock supports (BERT, RoBERTa, DistilBERT, MPNet, ModernBERT)."
    )


HeadSpec = tuple[LinearSpec | NormSpec, ...] | AnswerHeadSpec
"""A classification head: a sequence of projections and norms, or the answer tokens of a reranker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model with packed tokens.

    Attributes:
        hidden_size: D.
        prefixes: Prefixes that the base model may have in a checkpoint, such as ("bert", "").
        embedding: The first hidden states.
        attention: Attention of all layers; None if no layer has attention.
        kinds: Attention by layer type.
        layers: At least one, except in a static embedding.
        is_pre_norm: Norms are before attention and MLP; otherwise after the residual sums.
        is_decoder: Attention processes the keys in blocks, so that chunks return the same bits as the whole prompt.
        final_norm: Norm after the last layer; None: no norm.
        relative_bias: Bias of the attention scores; None: no bias.
        disentangled: Terms of the attention scores with embeddings of distances; None: no such terms.
        residual_scale: Factor of the outputs of attention, mixer, MLP and experts before the residual sums.
        has_float32_sum: The residual sums are float32 in models of every dtype.
        head: Classification head; None in an embedding model.
        scores_rows: The classification head also scores single tokens.
        vocabulary: Head of a masked language model, which the checkpoint may have; None: the family has none.
        attention_pool: Pools the rows of a sequence to one row, which is then the only one; None: no such step.
        other_names: The same model with other weight names, for checkpoints in a second layout; None: one layout.
    """

    hidden_size: int
    prefixes: tuple[str, ...]
    embedding: EmbeddingSpec
    attention: AttentionSpec | None
    kinds: Mapping[str, AttentionKind]
    layers: tuple[LayerSpec, ...]
    is_pre_norm: bool
    is_decoder: bool = False
    final_norm: NormSpec | None = None
    relative_bias: RelativeBiasSpec | AlibiSpec | None = None
    disentangled: DisentangledSpec | None = None
    residual_scale: float = 1.0
    has_float32_sum: bool = False
    head: HeadSpec | None = None
    scores_rows: bool = False
    vocabulary: VocabularySpec | None = None
    attention_pool: AttentionPoolSpec | None = None
    other_names: ModelSpec | None = None

    def with_stored_names(self, has_tensor: Callable[[str], bool]) -> ModelSpec:
        """Returns `other_names` if the checkpoint has the projections of its first layer, otherwise this spec."""
        other = self.other_names
        if other is None:
            return self
        layer = other.layers[0]
        names = [f"{layer.prefix}.{part.names[0]}.weight" for part in (layer.qkv, layer.mlp_in) if part is not None]
        has_names = any(all(has_tensor(f"{p}.{name}" if p else name) for name in names) for p in other.prefixes)
        return other if has_names else self

    @property
    def cache_spec(self) -> CacheSpec | None:
        """The layers with keys and values or states; None if sequences cannot run in chunks."""
        if not self.layers or (self.attention is not None and not self.attention.is_causal):
            return None
        mixers = [layer.mixer for layer in self.layers if layer.mixer is not None]
        ropes = [kind.rope for kind in self.kinds.values() if kind.rope is not None]
        return CacheSpec(
            kv_layers=() if self.attention is None else (self.attention.kv_layer,) * (len(self.layers) - len(mixers)),
            ssm_layers=tuple(mixer.ssm_layer for mixer in mixers if not isinstance(mixer, ShortConvSpec)),
            shares_prefixes=not any(rope.depends_on_length for rope in ropes),
        )


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models with packed tokens.

    Attributes:
        model_type: model_type of config.json.
        prefix: Prefix of the class names in transformers, such as "Bert" of "BertModel".
        read: Returns the spec of a resolved model. Raises ModelLoadError.
        architectures: Class names in transformers that do not begin with `prefix`.
        leaves_out: Whether transformers must run a model, by its architecture and config.json.
        is_chosen_by_class: Its model_type belongs to another family, and only the class name chooses this one.
        checks_positions: `read` rejects unsupported values of position_embedding_type.
        pooling: Pooling of models without sentence-transformers' files; None: the default of encoders or decoders.
        dense: Returns the Dense modules of models without sentence-transformers' files, by their config.json.
    """

    model_type: str
    prefix: str
    read: Callable[[ModelInfo], ModelSpec]
    architectures: tuple[str, ...] = ()
    leaves_out: Callable[[str, Mapping[str, Any]], bool] = lambda architecture, config: False
    is_chosen_by_class: bool = False
    checks_positions: bool = False
    pooling: PoolingType | None = None
    dense: Callable[[Mapping[str, Any]], tuple[DenseSpec, ...]] = lambda config: ()
