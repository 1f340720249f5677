"""Tensors of a checkpoint on their way into layers: scoped, checked, cast and moved. Knows no file format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec

import torch
from torch import Tensor

from ....checkpoint.views import TensorSource, WeightView
from ....families.spec import LinearSpec


class Fusion(Enum):
    """Operations that run in one kernel on a GPU.

    Members:
        NONE: Every operation is a kernel of torch's by itself.
        EPILOGUE: GELU is part of the product before it, in 16 bits.
        FUSED: As EPILOGUE; sums are part of the norms that follow, look-ups of embeddings part of their norm, and the
            activation of a gate part of its product; heads are normed, turned and stored at once.
    """

    NONE = "none"
    EPILOGUE = "epilogue"
    FUSED = "fused"

    @classmethod
    def of_device(cls, device: torch.device) -> Fusion:
        """Returns the fusion of models on this device. The kernels are made for compute capability 8.0 and later."""
        if device.type != "cuda":
            return cls.NONE
        is_made_for = find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)
        return cls.FUSED if is_made_for else cls.EPILOGUE


def are_finite(values: Tensor) -> bool:
    """Whether a tensor of any type holds neither NaN nor inf. Nearly always its sum alone tells, which is quick."""
    if values.is_floating_point() and values.itemsize == 1:
        values = values.float()  # torch sums no float8
    return bool(torch.isfinite(values.sum()) or torch.isfinite(values).all())


@dataclass(frozen=True, slots=True)
class Weights(WeightView[Tensor]):
    """A view of a checkpoint below one prefix.

    Attributes:
        source: The checkpoint.
        dtype: Type that model weights are cast to.
        device: Where they go.
        prefix: Put before every name, such as "bert.encoder.".
        fusion: How far the layers that are made of it go into each other's kernels.
    """

    source: TensorSource[Tensor]
    dtype: torch.dtype
    device: torch.device
    prefix: str = ""
    fusion: Fusion = Fusion.NONE

    are_finite = staticmethod(are_finite)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Reads one tensor.

        Args:
            name: Below the prefix.
            *shape: The shape that it must have.
            dtype: Instead of the view's own.

        Returns:
            A copy, on the device, that does not depend on the file.

        Raises:
            WeightError: It is missing, has another shape, or holds NaN or inf.
        """
        stored = self.stored(name, shape)
        self.check_finite(name, stored)
        return stored.to(self.device, dtype or self.dtype, copy=True)

    def table(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Reads a table whose single rows a forward looks up; arguments are those of `tensor`, and errors.

        NaN and inf are let pass: they cost the inputs that read their row alone, and rows that no text reaches are
        known to hold some.
        """
        return self.stored(name, shape).to(self.device, dtype or self.dtype, copy=True)

    def linear(self, spec: LinearSpec, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        """Reads weight [O, I] and bias [O] or None of a map, its parts joined; errors are those of `tensor`."""
        scopes = [(self.scope(name), rows) for name, rows in zip(spec.names, spec.rows, strict=True)]
        matrices = [scope.tensor("weight", rows, spec.in_features, dtype=dtype) for scope, rows in scopes]
        has_bias = scopes[0][0].has("bias") if spec.bias is None else spec.bias
        biases = [scope.tensor("bias", rows, dtype=dtype) for scope, rows in scopes] if has_bias else []
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices), torch.cat(biases) if biases else None

    def rows(self, name: str, indices: Sequence[int], *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Reads some rows of a tensor; arguments and errors are those of `tensor`, and `shape` that of the whole."""
        picked = self.stored(name, shape)[list(indices)]
        self.check_finite(name, picked)
        return picked.to(self.device, dtype or self.dtype)
