"""The gates through torch's own operations: the CPU, and devices without triton."""

import torch.nn.functional as F
from torch import Tensor


def gated_torch(x: Tensor, activation: str) -> Tensor:
    """Same as `gated`."""
    gate, up = x.float().chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate).mul_(up).to(x.dtype)
    return F.gelu(gate, approximate="none" if activation == "gelu" else "tanh").mul_(up).to(x.dtype)
