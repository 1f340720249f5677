"""Reads the tensors of a checkpoint for layers: checks, casts and moves them to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec

import torch
from torch import Tensor

from ....checkpoint.views import TensorSource, WeightView, dequantize
from ....families.spec import LinearSpec


class Fusion(Enum):
    """Operations that share a kernel on a GPU.

    Members:
        NONE: Every operation is its own kernel.
        EPILOGUE: A 16-bit product includes the GELU that follows it.
        FUSED: Also: a norm includes the sum or the lookup of embeddings before it, the product of a gate includes its
            activation, and one kernel normalizes, rotates and stores queries and keys.
    """

    NONE = "none"
    EPILOGUE = "epilogue"
    FUSED = "fused"

    @classmethod
    def of_device(cls, device: torch.device) -> Fusion:
        """Returns the fusion for a device; the kernels need compute capability 8.0."""
        if device.type != "cuda":
            return cls.NONE
        is_supported = find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)
        return cls.FUSED if is_supported else cls.EPILOGUE


def are_finite(values: Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinite values; nearly always its sum is enough, which is fast."""
    if values.is_floating_point() and values.itemsize == 1:
        values = values.float()  # torch cannot sum float8
    return bool(torch.isfinite(values.sum()) or torch.isfinite(values).all())


@dataclass(frozen=True, slots=True)
class Weights(WeightView[Tensor]):
    """The tensors of a checkpoint below a prefix.

    Attributes:
        source: The checkpoint.
        dtype: Type of the weights in the model.
        device: Device of the model.
        prefix: Prefix of all names, for example "bert.encoder.".
        fusion: Fusion of the layers that use these weights.
    """

    source: TensorSource[Tensor]
    dtype: torch.dtype
    device: torch.device
    prefix: str = ""
    fusion: Fusion = Fusion.NONE

    are_finite = staticmethod(are_finite)

    @staticmethod
    def dequantize(stored: Tensor, scale: Tensor, num_columns: int) -> Tensor:
        """Multiplies blocks of quantised weights with their scales."""
        return torch.from_numpy(dequantize(stored.numpy(), scale.float().numpy(), num_columns))

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Reads one tensor.

        Args:
            name: Name without the prefix.
            *shape: Expected shape.
            dtype: Replaces the type of the view.

        Returns:
            A copy on the device, which does not depend on the file.

        Raises:
            WeightError: The tensor is missing, or has another shape, or has NaN or infinite values.
        """
        stored = self.stored(name, shape)
        self.check_finite(name, stored)
        return stored.to(self.device, dtype or self.dtype, copy=True)

    def table(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Reads an embedding table; arguments and errors are those of `tensor`.

        The table may have NaN and infinite values: they affect only inputs that read their row, and there are models
        with such values in rows that no text reads.
        """
        return self.stored(name, shape).to(self.device, dtype or self.dtype, copy=True)

    def linear(self, spec: LinearSpec, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        """Reads the weight [O, I] and the bias [O] or None of a map and joins its parts; raises as `tensor` does."""
        scopes = [(self.scope(name), rows) for name, rows in zip(spec.names, spec.rows, strict=True)]
        matrices = [scope.tensor("weight", rows, spec.in_features, dtype=dtype) for scope, rows in scopes]
        has_bias = spec.bias.is_read(scopes[0][0].has("bias"))
        biases = [scope.tensor("bias", rows, dtype=dtype) for scope, rows in scopes] if has_bias else []
        weight = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        bias = torch.cat(biases) if biases else None
        if spec.is_gate_below:
            half = spec.out_features // 2
            weight, bias = weight.roll(half, 0), None if bias is None else bias.roll(half)
        return weight, bias

    def rows(self, name: str, indices: Sequence[int], *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Reads some rows of a tensor of shape `shape`; arguments and errors are those of `tensor`."""
        picked = self.stored(name, shape)[list(indices)]
        self.check_finite(name, picked)
        return picked.to(self.device, dtype or self.dtype)
