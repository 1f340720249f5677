"""The gates through torch's own operations: the CPU, and devices without triton."""

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_torch(x: Tensor, activation: str) -> Tensor:
    """Same as `gated`."""
    gate, up = x.float().chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate).mul_(up).to(x.dtype)
    return F.gelu(gate, approximate="none" if activation == "gelu" else "tanh").mul_(up).to(x.dtype)


def gated_norm_torch(x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float) -> Tensor:
    """Same as `gated_norm`."""
    groups = (x * F.silu(gate.float())).unflatten(1, (num_groups, -1))
    inverse = torch.rsqrt(groups.square().mean(-1, keepdim=True).add_(eps))
    normed: Tensor = groups.mul_(inverse).flatten(1)
    return normed.mul_(weight).to(gate.dtype)
