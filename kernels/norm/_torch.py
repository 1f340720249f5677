"""The norms through torch's own operations: the CPU, devices without triton, rows too wide for one program."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._reference import Embeddings, Norm


def norm_torch(x: Tensor, norm: Norm, residual: Tensor | None, return_sum: bool) -> tuple[Tensor, Tensor | None]:
    """Same as `add_norm`."""
    sum_TD = x.float()
    if residual is not None:
        sum_TD = sum_TD + residual
    normed_TD = _normalise(sum_TD, norm).to(x.dtype)
    return normed_TD, sum_TD.to(x.dtype if residual is None else residual.dtype) if return_sum else None


def embed_norm_torch(
    input_ids: Tensor,
    tables: Embeddings,
    norm: Norm,
    positions: Tensor | None,
    token_type_ids: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Same as `embed_norm`."""
    sum_TD = F.embedding(input_ids, tables.word).float()
    if tables.place is not None and positions is not None:
        places_T = positions if token_type_ids is None else positions + token_type_ids * tables.num_positions
        sum_TD = sum_TD + F.embedding(places_T, tables.place)
    return _normalise(sum_TD, norm).to(out_dtype)


def _normalise(sum_TD: Tensor, norm: Norm) -> Tensor:
    """Returns the normed rows of float32 rows, float32."""
    kind, weight, bias, eps = norm
    bias = None if bias is None else bias.float()
    if kind == "layer":
        return F.layer_norm(sum_TD, weight.shape, weight.float(), bias, eps)
    normed_TD = F.rms_norm(sum_TD, weight.shape, weight.float(), eps)
    return normed_TD if bias is None else normed_TD + bias
