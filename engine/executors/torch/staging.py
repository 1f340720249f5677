"""Copies many small tensors between the host and a device in one buffer, with one asynchronous copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeVar

import torch
from torch import Tensor

K = TypeVar("K")

_ALIGNMENT: Final = 256
"""Alignment in bytes, as torch aligns its own tensors; kernels are compiled for the alignment of their inputs."""


def copy_to_device(tensors: Mapping[K, Tensor | None], device: torch.device) -> dict[K, Tensor | None]:
    """Returns the tensors on a device, under the same names. Copies only tensors of another device.

    Copies to CUDA use pinned memory, because a copy from other memory may wait for all earlier work of the stream.
    torch does not reuse pinned memory before the copies from it are complete.
    """
    host = {name: t for name, t in tensors.items() if t is not None and t.device.type != device.type}
    if not host:
        return dict(tensors)
    staged = packed(list(host.values()), pin_memory=device.type == "cuda")
    on_device = staged.to(device, non_blocking=True)
    return {**tensors, **dict(zip(host, views(on_device, list(host.values())), strict=True))}


def packed(tensors: Sequence[Tensor], *, pin_memory: bool = False) -> Tensor:
    """Returns a buffer [B] uint8 on the host with copies of the tensors, in the layout of `views`."""
    buffer = empty_for(tensors, pin_memory=pin_memory)
    for view, tensor in zip(views(buffer, tensors), tensors, strict=True):
        view.copy_(tensor)
    return buffer


def empty_for(tensors: Sequence[Tensor], *, pin_memory: bool = False) -> Tensor:
    """Returns an uninitialized buffer [B] uint8 on the host that is large enough for the tensors."""
    return torch.empty(_ends(tensors)[-1] if tensors else 0, dtype=torch.uint8, pin_memory=pin_memory)


def views(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns contiguous views of a buffer with the shapes and types of the tensors `like`, in their order."""
    starts = [end - _padded_size(tensor) for end, tensor in zip(_ends(like), like, strict=True)]
    return [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, like, strict=True)
    ]


def _ends(tensors: Sequence[Tensor]) -> list[int]:
    return list(accumulate(map(_padded_size, tensors)))


def _padded_size(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
