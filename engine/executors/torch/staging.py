"""Copies many small tensors between the host and a device: one buffer, one asynchronous copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeVar

import torch
from torch import Tensor

K = TypeVar("K")

_ALIGNMENT: Final = 256
"""Bytes, as of a tensor of its own: kernels are compiled for the alignment of their inputs."""


def put_all(tensors: Mapping[K, Tensor | None], device: torch.device) -> dict[K, Tensor | None]:
    """Returns the tensors on a device, under the same names; those that are there, or are None, as they are.

    To CUDA all others go in one copy, out of pinned memory: one out of memory that is not may wait for all that the
    stream has to do before it. torch does not reuse pinned memory before the copies from it have been made.
    """
    host = {name: t for name, t in tensors.items() if t is not None and t.device.type != device.type}
    if not host:
        return dict(tensors)
    staged = packed(list(host.values()), pin_memory=device.type == "cuda")
    on_device = staged.to(device, non_blocking=True)
    return {**tensors, **dict(zip(host, views(on_device, list(host.values())), strict=True))}


def packed(tensors: Sequence[Tensor], *, pin_memory: bool = False) -> Tensor:
    """Returns one buffer on the host, [B] uint8, that holds the tensors where `views` finds them."""
    buffer = empty_for(tensors, pin_memory=pin_memory)
    for place, tensor in zip(views(buffer, tensors), tensors, strict=True):
        place.copy_(tensor)
    return buffer


def empty_for(tensors: Sequence[Tensor], *, pin_memory: bool = False) -> Tensor:
    """Returns a buffer on the host, [B] uint8, with room for the tensors."""
    return torch.empty(_ends(tensors)[-1] if tensors else 0, dtype=torch.uint8, pin_memory=pin_memory)


def views(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns contiguous views of a buffer with the shapes and dtypes of some tensors, in their order."""

    def cut() -> Iterator[Tensor]:
        for end, tensor in zip(_ends(like), like, strict=True):
            start = end - _room(tensor)
            yield buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    return list(cut())


def _ends(tensors: Sequence[Tensor]) -> list[int]:
    return list(accumulate(map(_room, tensors)))


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
