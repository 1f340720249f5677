"""Reference of the gates: their formulas in float32."""

import math

import torch
from torch import Tensor


def gated_reference(x: Tensor, activation: str) -> Tensor:
    """Same as `gated`."""
    gate, up = x.float().chunk(2, dim=-1)
    if activation == "silu":
        share = 1 / (1 + torch.exp(-gate))
    elif activation == "gelu":
        share = (1 + torch.erf(gate / math.sqrt(2))) / 2
    else:
        share = (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2
    return (gate * share * up).to(x.dtype)


def gated_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float) -> Tensor:
    """Same as `gated_norm`."""
    gates = gate.float()
    groups = (x.float() * gates / (1 + torch.exp(-gates))).unflatten(1, (num_groups, -1))
    normed: Tensor = groups / torch.sqrt((groups**2).mean(-1, keepdim=True) + eps)
    return (normed.flatten(1) * weight).to(gate.dtype)
