"""The short causal convolution in front of a recurrence: every channel by itself, each sequence by itself.

Shape letters: T packed tokens of N sequences, C channels, W width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from penstock.kernels.causal_conv1d import causal_conv1d

from ..activation import ActivationFunction, find_activation
from ..weights import Weights

if TYPE_CHECKING:
    from ...packed_batch import PackedBatch

_FUSED: Final = ("silu", "swish")


class CausalConv:
    """y_t = activation(sum over w of weight_w * x_(t - W + 1 + w), plus a bias).

    Sums are float32 whatever the type of the input.

    Args:
        weights: View that holds `name`.
        name: Of the convolution, whose weight is stored as [C, 1, W].
        channels: C.
        width: W.
        bias: Whether it has one.
        activation: Name as in config.json.
    """

    def __init__(self, weights: Weights, name: str, channels: int, width: int, bias: bool, activation: str) -> None:
        scope = weights.scope(name)
        self._weight_CW = scope.tensor("weight", channels, 1, width, dtype=torch.float32).squeeze(1)
        self._bias_C = scope.tensor("bias", channels, dtype=torch.float32) if bias else None
        self._activation: ActivationFunction | None = find_activation(activation)
        if activation in _FUSED:
            self._activation = None

    def __call__(
        self, x_TC: Tensor, batch: PackedBatch, initial_states: Tensor | None, *, return_final_states: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns [T, C] and, if asked for, the last W - 1 inputs of every sequence, [N, C, W - 1].

        Args:
            x_TC: [T, C]; rows need not follow each other without gaps.
            batch: Where sequences begin.
            initial_states: [N, C, W - 1], inputs before the first; None for zeros.
            return_final_states: Whether to return the last inputs.
        """
        y_TC, states = causal_conv1d(
            x_TC,
            self._weight_CW,
            self._bias_C,
            batch.cu_seqlens,
            batch.seq_lens,
            activation="silu" if self._activation is None else None,
            initial_states=initial_states,
            return_final_states=return_final_states,
        )
        return (y_TC if self._activation is None else self._activation.apply(y_TC)), states
