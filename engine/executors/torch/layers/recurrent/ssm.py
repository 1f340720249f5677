"""What surrounds the recurrence of an SSM layer: its short causal convolution, and the states that a batch needs.

Shape letters: T packed tokens of N sequences, C channels, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from penstock.kernels.causal_conv1d import causal_conv1d

from ..activation import ActivationFunction, find_activation
from ..weights import Weights

if TYPE_CHECKING:
    from ...packed_batch import BatchCache, PackedBatch


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


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """One SSM layer's view of a batch's states. Without a cache nothing is found and nothing kept.

    Attributes:
        cache: Where states lie; None in a batch of whole sequences.
        layer: Number of the layer among the model's SSM layers.
        num_seqs: N.
    """

    cache: BatchCache | None
    layer: int
    num_seqs: int

    @classmethod
    def of(cls, batch: PackedBatch, layer: int) -> LayerStates:
        """Returns the view of `batch`."""
        return cls(batch.cache, layer, len(batch.seq_lens))

    @property
    def must_save(self) -> bool:
        """Whether any sequence of the batch goes on in a later one."""
        return self.cache is not None and _has_any(self.cache.save_indices)

    def load(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns what convolution and recurrence begin with, [N, ...] each; None where all begin at zero."""
        if self.cache is None or self.cache.ssm is None or not _has_any(self.cache.load_indices):
            return None, None
        return self._gather(self.cache, self.cache.ssm.conv), self._gather(self.cache, self.cache.ssm.ssm)

    def save(self, conv: Tensor | None, ssm: Tensor | None) -> None:
        """Writes the states of the sequences that go on, of [N, ...] after the batch, into their slots."""
        if self.cache is None or self.cache.ssm is None or conv is None or ssm is None:
            return
        indices, slots = self.cache.save_indices, self.cache.save_slots
        if indices is None or slots is None:
            return
        for pool, states in ((self.cache.ssm.conv, conv), (self.cache.ssm.ssm, ssm)):
            pool[self.layer].index_copy_(0, slots, states.index_select(0, indices).to(pool[self.layer].dtype))

    def _gather(self, cache: BatchCache, pools: list[Tensor]) -> Tensor:
        """Returns the states of the sequences that have some, and zeros for the others."""
        assert cache.load_indices is not None
        assert cache.load_slots is not None
        pool = pools[self.layer]
        states = pool.new_zeros(self.num_seqs, *pool.shape[1:])
        return states.index_copy_(0, cache.load_indices, pool.index_select(0, cache.load_slots))


def _has_any(indices: torch.Tensor | None) -> bool:
    """Whether there is an entry."""
    return indices is not None and indices.numel() > 0
