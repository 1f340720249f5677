"""Memory that the CPU paths keep between calls: faulting fresh pages in costs as much as the arithmetic in them."""

import threading

import torch
from torch import Tensor

# Elements. Larger buffers are not kept between calls.
MAX_KEPT_BUFFER = 1 << 23

_thread = threading.local()


def buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of this thread for one purpose, grown as needed; holds what the last use left.

    Made outside inference mode, so that any mode may write it.
    """
    size = 1
    for axis in shape:
        size *= axis
    if size > MAX_KEPT_BUFFER:
        return torch.empty(shape, dtype=dtype)
    buffers: dict[tuple[str, torch.dtype], Tensor] = _thread.__dict__.setdefault("buffers", {})
    kept = buffers.get((name, dtype))
    if kept is None or kept.numel() < size:
        with torch.inference_mode(False):
            kept = torch.empty(size, dtype=dtype)
        buffers[name, dtype] = kept
    return kept[:size].view(shape)
