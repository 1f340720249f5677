"""Reference of pooling: the formulas of `pool` in float32, one sequence after the other."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Of the triton kernels one program holds a whole row.
MAX_TRITON_WIDTH = 8192


class Pooling(NamedTuple):
    """Arguments of `pool`; `width` is the number of columns of the result."""

    hidden_states: Tensor
    cu_seqlens: Tensor
    pooling: str
    width: int
    dimensions: Tensor | None
    normalize: bool | Tensor
    skip_tokens: Tensor | None
    weights: Tensor | None
    out_dtype: torch.dtype


def pool_reference(given: Pooling) -> Tensor:
    """Same as `pool`."""
    hidden_states, cu_seqlens, pooling, width, dimensions, normalize, skip_tokens, weights, out_dtype = given
    bounds = cu_seqlens.tolist()
    num_seqs = len(bounds) - 1
    skips = [0] * num_seqs if skip_tokens is None else skip_tokens.tolist()
    cuts = [width] * num_seqs if dimensions is None else dimensions.clamp(0, width).tolist()
    norms = normalize.tolist() if isinstance(normalize, Tensor) else [normalize] * num_seqs

    out_ND = torch.zeros(num_seqs, width, dtype=torch.float32, device=hidden_states.device)
    for n in range(num_seqs):
        start, end = bounds[n] + max(skips[n], 0), bounds[n + 1]
        if start >= end:
            continue
        rows_LD = hidden_states[start:end].float()
        positions_L = torch.arange(start - bounds[n], end - bounds[n], device=rows_LD.device)
        row_D = _pool_one(rows_LD, pooling, positions_L, None if weights is None else weights[start:end])
        row_D = row_D[: cuts[n]]
        out_ND[n, : cuts[n]] = F.normalize(row_D, dim=0, eps=1e-12) if norms[n] else row_D
    return out_ND.to(out_dtype)


def _pool_one(rows_LD: Tensor, pooling: str, positions_L: Tensor, weights_L: Tensor | None) -> Tensor:
    if pooling == "cls":
        return rows_LD[0]
    if pooling == "last":
        return rows_LD[-1]
    if pooling == "max":
        return rows_LD.amax(0)
    if pooling == "mean_sqrt_len":
        return rows_LD.sum(0) / math.sqrt(len(rows_LD))
    if weights_L is None:
        weights_L = torch.ones_like(positions_L) if pooling == "mean" else positions_L + 1
    weights_L = weights_L.float()
    total_weight: Tensor = weights_L.sum()
    total_D: Tensor = (rows_LD * weights_L[:, None]).sum(0)
    return total_D / total_weight.clamp(min=1e-9)
