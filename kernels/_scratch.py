"""Memory for intermediate results, kept between calls: fresh pages cost more than the arithmetic in them."""

import math
import threading

import torch
from torch import Tensor

# Elements. Larger memory is not kept.
MAX_KEPT = 1 << 23
_CPU = torch.device("cpu")

_thread = threading.local()


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
    """Memory of this thread for one purpose, grown as needed; holds what the last use left.

    It may be written in any mode, since it is made outside inference mode. Off the CPU, where the allocator keeps
    memory itself, it is fresh.

    Args:
        name: The purpose, with the operation: two tensors that are needed at once have different names.
        shape: Of the tensor.
        dtype: Of the tensor.
        device: Of the tensor.
    """
    size = math.prod(shape)
    if device.type != "cpu" or size > MAX_KEPT:
        return torch.empty(shape, dtype=dtype, device=device)
    buffers: dict[tuple[str, torch.dtype], Tensor] = _thread.__dict__.setdefault("buffers", {})
    buffer = buffers.get((name, dtype))
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):
            buffer = torch.empty(size, dtype=dtype)
        buffers[name, dtype] = buffer
    return buffer[:size].view(shape)


def forget_scratch() -> None:
    """Gives this thread's memory back."""
    _thread.__dict__.clear()
