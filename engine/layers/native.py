"""The native kernels as a layer: what they read of a checkpoint, and their forward over a packed batch.

Shape letters: T packed tokens, N sequences, D model width, H heads, L longest sequence, K head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.native import Activation, EncoderSpec, Format, Machine, MapSpec, NativeEncoder, NormSpec

from .attention.encoder import fused_qkv
from .weights import Weights

if TYPE_CHECKING:
    from ..packed_batch import PackedBatch

Floats = NDArray[np.float32]

# As in activation.py; what is missing here runs through torch.
_ACTIVATIONS: Final[dict[str, Activation]] = {
    **dict.fromkeys(("gelu", "gelu_python"), Activation.GELU),
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), Activation.GELU_TANH
    ),
    "quick_gelu": Activation.QUICK_GELU,
    "relu": Activation.RELU,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "tanh": Activation.TANH,
}


def native_activation(name: str) -> Activation | None:
    """Returns the activation that config.json calls `name`; None where the native kernels have none."""
    return _ACTIVATIONS.get(name)


def as_floats(tensor: Tensor) -> Floats:
    """Returns a tensor's values in float32."""
    floats: Floats = tensor.float().contiguous().numpy()
    return floats


def as_words(table_VD: Tensor) -> NDArray[Any]:
    """Returns a table in place: float32, or bfloat16 as uint16."""
    if table_VD.dtype == torch.bfloat16:
        words: NDArray[Any] = table_VD.view(torch.int16).numpy().view(np.uint16)
        return words
    return as_floats(table_VD)


@dataclass(frozen=True, slots=True)
class SpecReader:
    """Reads specs from a view of a checkpoint; in float32, which the packing rounds once.

    Attributes:
        weights: The view.
    """

    weights: Weights

    def norm(self, name: str, size: int, eps: float, *, bias: bool = True) -> NormSpec:
        """A LayerNorm [D]."""
        scope = self.weights.scope(name)
        weight_D = as_floats(scope.tensor("weight", size, dtype=torch.float32))
        bias_D = as_floats(scope.tensor("bias", size, dtype=torch.float32)) if bias else None
        return NormSpec(weight=weight_D, bias=bias_D, eps=eps)

    def map(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        activation: Activation = Activation.NONE,
        gated: bool = False,
    ) -> MapSpec:
        """A linear map [out_features, in_features]."""
        scope = self.weights.scope(name)
        weight_OI = as_floats(scope.tensor("weight", out_features, in_features, dtype=torch.float32))
        bias_O = as_floats(scope.tensor("bias", out_features, dtype=torch.float32)) if bias else None
        return MapSpec(weight=weight_OI, bias=bias_O, activation=activation, gated=gated)

    def qkv(self, names: Sequence[str], size: int, num_heads: int, *, bias: bool = True) -> MapSpec:
        """The maps of q, k and v as one, the scale of the scores in it."""
        weight, bias_O = fused_qkv(self.weights, names, size, num_heads, bias=bias)
        return MapSpec(weight=as_floats(weight), bias=None if bias_O is None else as_floats(bias_O))


class NativeForward:
    """The forward of an encoder through the native kernels.

    Args:
        machine: Runs it.
        spec: The encoder with its weights.
        dtype: Of the weights: float32, or bfloat16.
    """

    def __init__(self, machine: Machine, spec: EncoderSpec, dtype: torch.dtype) -> None:
        self._encoder = NativeEncoder(machine, spec, native_format(machine, dtype))

    def __call__(
        self, batch: PackedBatch, places_T: Tensor, *, need_attention: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the encoder over a batch on the CPU.

        Args:
            batch: Whole sequences.
            places_T: [T] int64, rows of the table that is added to the words' rows.
            need_attention: Also return the weights.

        Returns:
            [T, D] float32, the last layer's rows; [T, H] float32 or None, as ModelOutput has them.
        """
        hidden_TD, weights_TH = self._encoder(
            batch.input_ids.numpy(),
            places_T.numpy(),
            batch.cu_seqlens.numpy(),
            visible_N=_visible(batch),
            need_attention=need_attention,
        )
        return torch.from_numpy(hidden_TD), None if weights_TH is None else torch.from_numpy(weights_TH)


def native_format(machine: Machine, dtype: torch.dtype) -> Format:
    """Returns how products with weights of a type are computed."""
    if dtype == torch.float32:
        return Format.F32
    return Format.DOT if Format.DOT in machine.formats else Format.BF16


def _visible(batch: PackedBatch) -> NDArray[np.int32] | None:
    """Returns the tokens of each sequence that others attend to, [N]; None where it is all of them."""
    if not batch.hidden:
        return None
    visible_N = np.array(batch.seq_lens, np.int32)
    starts_N = batch.cu_seqlens.numpy()[:-1]
    for hidden in batch.hidden:
        members = np.searchsorted(starts_N, hidden.rows[:, 0].numpy())
        visible_N[members] = hidden.is_visible.sum(1).numpy()
    return visible_N
