"""One call of a kernel, the tensors that it is made of, and the sizes that they come in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

Result = Tensor | tuple[Tensor | None, ...] | None


@dataclass(frozen=True, slots=True)
class Work:
    """One call of a kernel, with its inputs.

    Attributes:
        call: Takes `backend`; without it the kernel chooses, as in a server.
        moved_bytes: Minimum bytes that the kernel reads and writes.
        operations: Floating-point operations of matrix products; 0 for kernels that are limited by memory bandwidth.
        written: The tensors that are written in place if nothing is returned.
        reference: The backend that it is compared with.
    """

    call: Callable[..., Result]
    moved_bytes: int
    operations: int = 0
    written: tuple[Tensor, ...] = ()
    reference: str = "torch"

    def results(self, **options: Any) -> list[Tensor]:
        """Runs it; returns all that it gives."""
        result = self.call(**options)
        tensors = self.written or (result if isinstance(result, tuple) else (result,))
        return [tensor.clone() for tensor in tensors if isinstance(tensor, Tensor)]


class Inputs:
    """Random tensors of one device, the same at every call."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._numbers = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers, of the kernel's type unless another is named."""
        return torch.randn(shape, generator=self._numbers, device=self.device).to(dtype or self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Numbers from 0 to 1, float32."""
        return torch.rand(shape, generator=self._numbers, device=self.device)

    def borders(self, lengths: tuple[int, ...]) -> Tensor:
        """Returns cu_seqlens for `lengths`."""
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)


class Packed(NamedTuple):
    """Rows of sequences."""

    lengths: tuple[int, ...]
    width: int


class Heads(NamedTuple):
    """Queries and keys of sequences; `past` is the number of tokens before each."""

    lengths: tuple[int, ...]
    heads: int = 12
    kv_heads: int = 12
    size: int = 64
    past: int = 0


class Groups(NamedTuple):
    """Rows of groups, each with a matrix of its own."""

    lengths: tuple[int, ...]
    inputs: int
    outputs: int


class States(NamedTuple):
    """Sizes of a state space layer."""

    lengths: tuple[int, ...]
    heads: int
    size: int
    state: int
