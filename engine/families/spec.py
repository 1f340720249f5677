"""The description of a packed model: names and shapes of its weights, and how its layers use them.

A family returns a ModelSpec for config.json. The executors read the weights that it names, and run it.

Shape letters: V vocabulary, D model width, E embedding width, H heads of q, G heads of k and v, K head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import UnsupportedModelError
from ..protocol.model_info import ModelInfo
from ..scheduling import CacheSpec, KvLayerSpec, SsmLayerSpec
from .rope import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """A LayerNorm or an RMSNorm.

    Attributes:
        name: Of its weights, without ".weight"; None: its weights are 1.
        size: Columns.
        eps: Added to the variance.
        is_rms: An RMSNorm.
        bias: Whether it has one; None: if the checkpoint holds one.
        offset: Added to the stored weight.
    """

    name: str | None
    size: int
    eps: float
    is_rms: bool = False
    bias: bool | None = False
    offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """activation(x W^T + b). W may be stored in parts.

    Attributes:
        names: Of the parts, from top to bottom, without ".weight".
        in_features: Columns of W.
        rows: Rows of each part.
        bias: Whether it has one; None: if the checkpoint holds one.
        activation: Name as in config.json; None for none.
        is_gated: The upper half of W is a gate: the result is activation(upper half) * lower half.
        is_below_base: The names are below the prefix of the base model, as those of its layers are. Only heads differ.
    """

    names: tuple[str, ...]
    in_features: int
    rows: tuple[int, ...]
    bias: bool | None = True
    activation: str | None = None
    is_gated: bool = False
    is_below_base: bool = False

    @property
    def out_features(self) -> int:
        """Rows of W."""
        return sum(self.rows)


def linear(
    names: str | Sequence[str],
    in_features: int,
    *rows: int,
    bias: bool | None = True,
    activation: str | None = None,
    is_gated: bool = False,
    is_below_base: bool = False,
) -> LinearSpec:
    """Returns a linear map. `rows` holds the rows of each part. A single name is the name of all parts together."""
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
class EmbeddingSpec:
    """The first hidden states: projection(norm(word + position + token type)). All names are below the base.

    Attributes:
        words: Name of the table [V, E].
        vocab_size: V.
        size: E.
        is_scaled: Rows of `words` are multiplied with sqrt(E), which is rounded to the type of the model before.
        scale: Rows of `words` are multiplied with it.
        positions: Name of the table of learnt positions; None where there is none.
        num_positions: Its rows.
        token_types: Name of the table of token types; None where there is none.
        num_token_types: Its rows; 0 for none.
        padding_id: Positions begin at padding_id + 1, and do not count this token; None: they begin at 0.
        norm: None where there is none.
        projection: E to D; None where they are equal.
    """

    words: str
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The attention of every layer.

    Attributes:
        num_heads: H.
        num_kv_heads: G; query head h reads key head h // (H / G).
        head_size: K.
        scale: Factor of the scores.
        is_causal: Whether a token sees only itself and earlier ones.
        softcap: c: scaled scores s become c * tanh(s / c); None for none.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    is_causal: bool = False
    softcap: float | None = None

    @property
    def kv_layer(self) -> KvLayerSpec:
        """The keys and values that a cache keeps of every token."""
        return KvLayerSpec(self.num_kv_heads, self.head_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """The differences between the attention of global and local layers.

    Attributes:
        window: (left, right) tokens that a query sees beside its own; None sees all.
        rope: Rotary positions; None for none.
    """

    window: tuple[int, int] | None = None
    rope: RopeSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """The mixer of Mamba: a convolution, and a recurrence whose step and matrices depend on the token.

    Attributes:
        prefix: Of the mixer, below its layer.
        inner_size: C, channels of the recurrence.
        state_size: S.
        conv_width: W.
        step_rank: Q.
        bias: Whether the outer projections have one.
        conv_bias: Whether the convolution has one.
        activation: After the convolution.
        norms: Of step, B and C; () where there are none.
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
    """The mixer of Mamba-2, whose recurrence decays a whole head at once.

    Attributes:
        prefix: Of the mixer, below its layer.
        num_heads: Heads of the recurrence.
        head_size: P, channels of a head.
        num_groups: Groups of heads that share their B and C matrices.
        state_size: S.
        conv_width: W.
        bias: Whether the outer projections have one.
        conv_bias: Whether the convolution has one.
        activation: After the convolution.
        step_limit: Smallest and largest step.
        eps: Of the norm before the output projection.
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


MixerSpec = MambaSpec | Mamba2Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Gated MLPs. Each token goes through the best few.

    Attributes:
        router: Name of the map [experts, D] that rates them, without ".weight".
        prefix: Of the experts, below the layer. The names of `up` and `down` are below it, and below the number of the
            expert unless `is_stacked`.
        is_stacked: The weights of all experts lie on top of each other.
        up: The gated map of one expert, D to 2 * I.
        down: The map back of one expert, I to D.
        num_experts: Number of them.
        top_k: Experts of a token.
        renormalise: Whether the weights of a token's experts sum to 1, instead of those of all.
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
        prefix: Of the layer, below the base.
        kind: Key of ModelSpec.kinds, of a layer with attention.
        attention_norm: Before attention or the mixer, or after the sum; None for none.
        mixer: In place of attention, which then has no maps; None for attention.
        qkv: D to (H + 2 * G) * K.
        query_norm: Of every head of q before the rotation, [K]; None for none.
        key_norm: As `query_norm`, of k.
        attention_out: H * K to D.
        after_attention: Of the output of attention, before it is added; None for none.
        mlp_norm: Before the MLP, or after its sum; None in a layer that has neither MLP nor experts.
        mlp_in: The first map of the MLP; None where there is none.
        mlp_out: Back to D.
        experts: Their result is added to that of the MLP; None for none.
        after_mlp: Of the output of the MLP, before it is added; None for none.
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
    """A learnt bias of the scores by the distance between two tokens.

    Attributes:
        name: Of the table [buckets, H], below the base.
        num_buckets: Its rows.
        bucket_of: Returns the row, int64, of each distance from a query to a key.
    """

    name: str
    num_buckets: int
    bucket_of: Callable[[NDArray[np.int64]], NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSpec:
    """A reranker's head: next-token logits of its answer tokens, from their rows of the output embedding.

    Attributes:
        tokens: One, or two: false and true.
        vocab_size: V.
        size: D.
        is_difference: There is one logit, true less false: its sigmoid is the softmax over the two.
        is_tied: Whether the output embedding is the input's; None: if the checkpoint holds no output embedding.
        scale: Factor of the logits.
        softcap: c: scaled logits s become c * tanh(s / c); None for none.
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
        dense: D to D, with its activation.
        norm: After it.
        decoder: Name of the map to the vocabulary; the word embedding where the checkpoint has none.
        biases: Names of its bias; the first that the checkpoint holds counts.
    """

    dense: LinearSpec
    norm: NormSpec
    decoder: str
    biases: tuple[str, ...]


def no_vocabulary_head(info: ModelInfo) -> UnsupportedModelError:
    """Returns the error for a checkpoint without the head that makes sparse vectors."""
    return UnsupportedModelError(
        f"{info.name} makes sparse vectors from a masked language model, but its checkpoint holds no head of one that "
        "penstock knows (BERT, RoBERTa, DistilBERT, MPNet, ModernBERT)."
    )


HeadSpec = tuple[LinearSpec | NormSpec, ...] | AnswerSpec
"""A classification head: maps and norms one after another, or the answer tokens of a reranker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model with packed tokens.

    Attributes:
        hidden_size: D.
        prefixes: Prefixes that the base model may have in a checkpoint, such as ("bert", "").
        embedding: The first hidden states.
        attention: Shared by all layers with attention; None if no layer has any.
        kinds: Kinds of attention, by name.
        layers: At least one.
        is_pre_norm: Norms stand before attention and MLP; else after the sums.
        is_decoder: Attention walks the keys in blocks, so that a prompt in chunks gives the same rows to the bit.
        final_norm: After the last layer; None for none.
        relative_bias: None for none.
        residual_scale: Factor of the results of attention, mixer, MLP and experts before they are added.
        has_float32_sum: The sum of the layers' results is float32 whatever the type of the model.
        head: Classification head; None in an embedding model.
        scores_rows: The head of a sequence is one map of a row, and so scores the row of any token too.
        vocabulary: Head of the masked language model that may be in the checkpoint; None: the family has none.
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
    relative_bias: RelativeBiasSpec | None = None
    residual_scale: float = 1.0
    has_float32_sum: bool = False
    head: HeadSpec | None = None
    scores_rows: bool = False
    vocabulary: VocabularySpec | None = None

    @property
    def cache_spec(self) -> CacheSpec | None:
        """The layers whose states a sequence keeps from chunk to chunk; None if sequences cannot run in chunks."""
        if self.attention is not None and not self.attention.is_causal:
            return None
        mixers = [layer.mixer for layer in self.layers if layer.mixer is not None]
        ropes = [kind.rope for kind in self.kinds.values() if kind.rope is not None]
        return CacheSpec(
            kv_layers=() if self.attention is None else (self.attention.kv_layer,) * (len(self.layers) - len(mixers)),
            ssm_layers=tuple(mixer.ssm_layer for mixer in mixers),
            shares_prefixes=not any(rope.depends_on_length for rope in ropes),
        )


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models with packed tokens.

    Attributes:
        model_type: Of config.json.
        prefix: Of the class names in transformers: "Bert" of "BertModel" and "BertForSequenceClassification".
        read: Returns the spec of a resolved model, or raises ModelLoadError.
        architectures: Class names in transformers that do not begin with `prefix`.
        leaves_out: Whether the model is one of a few that transformers has to run, by its architecture and config.json.
    """

    model_type: str
    prefix: str
    read: Callable[[ModelInfo], ModelSpec]
    architectures: tuple[str, ...] = ()
    leaves_out: Callable[[str, Mapping[str, Any]], bool] = lambda architecture, config: False
