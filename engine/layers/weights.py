"""The named tensors of a checkpoint on their way into layers: scoped, checked, cast and moved. Knows no file format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.native import Machine

from ..protocol.errors import WeightError


class TensorSource(Protocol):
    """Where tensors come from: a checkpoint on disk."""

    def __contains__(self, name: str) -> bool:
        """Whether a tensor of that name exists."""
        ...

    def read(self, name: str) -> Tensor:
        """Returns the tensor as it is stored, on the CPU; the memory may belong to the file."""
        ...


def are_finite(values: Tensor) -> bool:
    """Whether a tensor of any type holds neither NaN nor inf. Nearly always its sum alone tells, which is quick."""
    if values.is_floating_point() and values.itemsize == 1:
        values = values.float()  # torch sums no float8
    return bool(torch.isfinite(values.sum()) or torch.isfinite(values).all())


@dataclass(frozen=True, slots=True)
class Weights:
    """A view of a checkpoint below one prefix.

    Attributes:
        source: The checkpoint.
        dtype: Type that model weights are cast to.
        device: Where they go.
        machine: The native kernels, for models that can run through them; None leaves all to torch.
        prefix: Put before every name, such as "bert.encoder.".
    """

    source: TensorSource
    dtype: torch.dtype
    device: torch.device
    machine: Machine | None = None
    prefix: str = ""

    def scope(self, name: str) -> Weights:
        """Returns the view below `name`; "" is this view itself."""
        return replace(self, prefix=f"{self.prefix}{name}.") if name else self

    def has(self, name: str) -> bool:
        """Whether the tensor exists."""
        return self.prefix + name in self.source

    def scope_of(self, name: str, prefixes: Sequence[str]) -> Weights:
        """Returns the first of `prefixes` below which `name` exists: checkpoints are saved with and without a head.

        Raises:
            WeightError: It exists below none of them.
        """
        for prefix in prefixes:
            scoped = self.scope(prefix)
            if scoped.has(name):
                return scoped
        candidates = " or ".join(repr(self.scope(p).prefix + name) for p in prefixes)
        raise WeightError(f"The checkpoint has no weight {candidates}.")

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
        stored = self._stored(name, shape)
        self._check_finite(name, stored)
        return stored.to(self.device, dtype or self.dtype, copy=True)

    def table(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Reads a table of which a forward looks up single rows; arguments are those of `tensor`, and errors.

        NaN and inf are let pass: they cost the inputs that read their row alone, and rows that no text reaches are
        known to hold some.
        """
        return self._stored(name, shape).to(self.device, dtype or self.dtype, copy=True)

    def rows(self, name: str, indices: Sequence[int], *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Reads some rows of a tensor; arguments and errors are those of `tensor`, and `shape` that of the whole."""
        picked = self._stored(name, shape)[list(indices)]
        self._check_finite(name, picked)
        return picked.to(self.device, dtype or self.dtype)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns a tensor as it is stored, checked."""
        full_name = self.prefix + name
        if full_name not in self.source:
            raise WeightError(f"The checkpoint has no weight {full_name!r}.")
        stored = self.source.read(full_name)
        if tuple(stored.shape) != shape:
            raise WeightError(
                f"The weight {full_name!r} has the shape {list(stored.shape)}; "
                f"the configuration asks for {list(shape)}."
            )
        return stored

    def _check_finite(self, name: str, stored: Tensor) -> None:
        """Refuses NaN and inf. A forward need not show them: attention, tanh and softmax make numbers of them."""
        if not are_finite(stored):
            raise WeightError(
                f"The weight {self.prefix + name!r} holds NaN or inf: its file is damaged, or was saved by a training "
                "that failed; download the model again, or serve another."
            )
