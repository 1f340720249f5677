"""What an encoder or a decoder is made of, with its weights as numpy has them; packing reads them once.

Shape letters: N output width of a map, D model width, E embedding width, V vocabulary, P places, H heads, G heads of
keys and values, I inner width, K head size, L longest sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .machine import Activation

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormSpec:
    """A LayerNorm, or an RMSNorm.

    Attributes:
        weight: [D] float32.
        bias: [D] float32 or None.
        eps: Added to the variance.
        rms: Without the mean.
    """

    weight: Floats
    bias: Floats | None = None
    eps: float = 1e-12
    rms: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MapSpec:
    """x W^T + b.

    Attributes:
        weight: [N, D] float32; of a gated map the gate's rows above those of the values.
        bias: [N] float32 or None.
        activation: Of the result, or of the gate.
        gated: The result is activation(gate) * values.
    """

    weight: Floats
    bias: Floats | None = None
    activation: Activation = Activation.NONE
    gated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSpec:
    """One layer.

    Attributes:
        attention_norm: None: the input is not normalised.
        qkv: D to (H + 2 * G) * K, the scale of the scores in the rows of q, or in `query_norm`.
        attention_out: H * K to D.
        mlp_norm: As its name says.
        mlp_in: D to I.
        mlp_out: I to D.
        window: (left, right) tokens that a query sees beside its own; None sees all.
        rotary: [L, K] float32: cosines of K / 2 angles, then sines; None for none.
        bias: [H, 2 * L + 1] float32, added to the scores of a key by its distance to the query, -L .. L; None for none.
        query_norm: [K], of decoders alone, as is what follows: of every head before it turns; None for none.
        key_norm: As `query_norm`.
        after_attention: Norm of the output of attention, before it is added; None for none.
        after_mlp: Norm of the output of the MLP.
        softcap: c: scores s become c * tanh(s / c); 0 for none.
    """

    attention_norm: NormSpec | None
    qkv: MapSpec
    attention_out: MapSpec
    mlp_norm: NormSpec
    mlp_in: MapSpec
    mlp_out: MapSpec
    window: tuple[int, int] | None = None
    rotary: Floats | None = None
    bias: Floats | None = None
    query_norm: NormSpec | None = None
    key_norm: NormSpec | None = None
    after_attention: NormSpec | None = None
    after_mlp: NormSpec | None = None
    softcap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderSpec:
    """An encoder or a decoder with its weights.

    Attributes:
        num_heads: H.
        num_kv_heads: G, which divides H; None for H.
        pre_norm: Norms stand before attention and MLP, not after the sums.
        is_decoder: Keys may lie in pages, and attention goes over them block by block; `pre_norm`, without a bias by
            distance.
        words: [V, E], float32; uint16 holds bfloat16.
        places: [P, E] float32, added to the words' rows; None for none.
        embedding_norm: Of the sum; None for none.
        projection: E to D; None where they are the same.
        layers: At least one; read once, one after another.
        final_norm: After the last; None for none.
    """

    num_heads: int
    num_kv_heads: int | None = None
    pre_norm: bool
    is_decoder: bool = False
    words: NDArray[Any]
    places: Floats | None
    embedding_norm: NormSpec | None
    projection: MapSpec | None = None
    layers: Iterable[LayerSpec]
    final_norm: NormSpec | None = None
