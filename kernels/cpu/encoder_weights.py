"""Structure and weights (numpy arrays) of an encoder or decoder. CpuEncoder reads and packs them once.

Shape letters: N output width of a linear map, D model width, E embedding width, V vocabulary, P positions, H heads,
G key and value heads, I intermediate width, K head size, L longest sequence, R rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .library import ActivationCode

Floats = NDArray[np.float32]
ADAPTED_LINEARS: Final = ("qkv", "attention_out", "mlp_in", "mlp_out")
"""Maps of LayerWeights that an adapter may change, in the order of `enum Map` in csrc/types.h."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormWeights:
    """A LayerNorm or RMSNorm.

    Attributes:
        weight: [D] float32.
        bias: [D] float32 or None.
        eps: Added to the variance, or to the mean square.
        rms: RMSNorm: the mean is not subtracted.
    """

    weight: Floats
    bias: Floats | None = None
    eps: float = 1e-12
    rms: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearWeights:
    """A linear map x W^T + b with an optional activation.

    Attributes:
        weight: [N, D] float32. In a gated map the first half of the rows is the gate, the second half the values.
        bias: [N] float32 or None.
        activation: Activation of the result, or of the gate.
        gated: The result is activation(gate) * values.
    """

    weight: Floats
    bias: Floats | None = None
    activation: ActivationCode = ActivationCode.NONE
    gated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DistanceWeights:
    """Terms of the attention scores with embeddings of distances (DeBERTa).

    The score of query i and key j gets q_i keys[d] + k_j queries[d], where d is rows[L + i - j].

    Attributes:
        keys: [H, R, K] float32; None: no such term.
        queries: [H, R, K] float32, with the scale of the scores; None: no such term.
        rows: [2 * L + 1] int32 from 0 to R - 1, ascending: the row of each distance, -L .. L.
        num_distances: R, the same in all layers.
    """

    keys: Floats | None
    queries: Floats | None
    rows: NDArray[np.int32]
    num_distances: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """One layer.

    Attributes:
        attention_norm: Norm of attention: of its input with `pre_norm`, else of the sum after it. None: no norm.
        qkv: D to (H + 2 * G) * K. The rows of q, or `query_norm`, include the scale of the scores.
        attention_out: H * K to D.
        mlp_norm: Norm of the MLP, at the position of `attention_norm`.
        mlp_in: D to I.
        mlp_out: I to D.
        window: (left, right) tokens beside its own that a query attends to; None: all.
        rotary: [L, K] float32: cosines of K / 2 angles, then sines; None: no rotary embedding.
        bias: [H, 2 * L + 1] float32, added to the scores by the distance of key and query, -L .. L; None: no bias.
        distances: Terms of the scores with embeddings of distances. Encoders only. None: no such terms.
        query_norm: Norm before the rotary embedding: [K] of each query head in a decoder, [H * K] of all heads together
            in an encoder. None: no norm.
        key_norm: As `query_norm`, for key heads.
        after_attention: Norm of the output of attention before the residual sum. Without `pre_norm`: norm of the sum
            x + attention(x), which is added to x again before `attention_norm`. None: no norm.
        after_mlp: Norm of the output of the MLP before the residual sum. Decoders only.
        softcap: c: scores s become c * tanh(s / c). Decoders only. 0: no cap.
    """

    attention_norm: NormWeights | None
    qkv: LinearWeights
    attention_out: LinearWeights
    mlp_norm: NormWeights
    mlp_in: LinearWeights
    mlp_out: LinearWeights
    window: tuple[int, int] | None = None
    rotary: Floats | None = None
    bias: Floats | None = None
    distances: DistanceWeights | None = None
    query_norm: NormWeights | None = None
    key_norm: NormWeights | None = None
    after_attention: NormWeights | None = None
    after_mlp: NormWeights | None = None
    softcap: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class LowRankWeights:
    """The low-rank term of a linear map: x down^T up^T is added to x W^T.

    Attributes:
        down: [R, D] float32. For the word embeddings: [R, V].
        up: [N, R] float32, with the scale of the adapter. In a gated map the rows are ordered as in LinearWeights.
    """

    down: Floats
    up: Floats


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """A LoRA adapter (Hu et al., arXiv 2106.09685).

    Attributes:
        layers: The terms of each layer, by the names of ADAPTED_LINEARS. The terms of q include the scale of the scores
            if the rows of q in LayerWeights.qkv do.
        embedding: The term of the word embeddings; None: no term.
    """

    layers: Sequence[Mapping[str, LowRankWeights]]
    embedding: LowRankWeights | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderWeights:
    """An encoder or a decoder with its weights.

    Attributes:
        num_heads: H.
        num_kv_heads: G, a divisor of H; None: H.
        pre_norm: The norms are before attention and MLP, not after the residual sums.
        is_decoder: Attention reads keys tile by tile, and supports a KV cache. Requires `pre_norm` and layers without a
            bias by distance.
        word_embeddings: [V, E] word embeddings, float32 or uint16 (bits of bfloat16).
        position_embeddings: [P, E] float32 added to the word embeddings; None: no position embeddings.
        embedding_norm: Norm of the embeddings; None: no norm.
        projection: Embedding projection, E to D; None: no projection.
        layers: The layers. Iterated once. Without layers, the hidden states are the embeddings.
        final_norm: Norm after the last layer; None: no norm.
        adapters: Adapters that sequences may select.
    """

    num_heads: int
    num_kv_heads: int | None = None
    pre_norm: bool
    is_decoder: bool = False
    word_embeddings: NDArray[Any]
    position_embeddings: Floats | None
    embedding_norm: NormWeights | None
    projection: LinearWeights | None = None
    layers: Iterable[LayerWeights]
    final_norm: NormWeights | None = None
    adapters: Sequence[AdapterWeights] = ()
