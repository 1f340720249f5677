"""Normalisation of rows, fused with the step before it: the sum with a residual, or the lookup of embeddings.

Statistics, sums and products are float32 for every input dtype, and every result is rounded once.
Sources: Ba et al., Layer Normalization (arXiv 1607.06450); Zhang and Sennrich, Root Mean Square Layer Normalization
(arXiv 1910.07467).
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import FLOAT_DTYPES, Backend, choose, describe

__all__ = ["MAX_TRITON_WIDTH", "Backend", "Embeddings", "Norm", "NormKind", "add_norm", "embed_norm"]

# A program of the triton backend loads a whole row.
MAX_TRITON_WIDTH = 8192

NormKind = Literal["layer", "rms"]


class Norm(NamedTuple):
    """Parameters of a LayerNorm or RMSNorm.

    Attributes:
        kind: "layer" or "rms".
        weight: [D], float32/bfloat16/float16, contiguous.
        bias: [D], as `weight`; None: no bias.
        eps: Added to the variance, or to the mean square.
    """

    kind: NormKind
    weight: Tensor
    bias: Tensor | None
    eps: float


class Embeddings(NamedTuple):
    """Embedding tables of any float dtype, contiguous.

    Attributes:
        word: [V, D], by token id.
        position: [Y * P, D], by token type and position: row y * P + p. None if the model has no position embeddings.
        num_positions: P.
    """

    word: Tensor
    position: Tensor | None = None
    num_positions: int = 0


def add_norm(
    x: Tensor,
    norm: Norm,
    *,
    residual: Tensor | None = None,
    return_sum: bool = False,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Normalises the rows of s = x + residual in one pass over memory.

        layer   (s - mean(s)) / sqrt(var(s) + eps) * weight + bias
        rms     s / sqrt(mean(s^2) + eps) * weight + bias

    The sum is not rounded before it is normalised. A row's result does not depend on the other rows. Tests allow a
    difference to the reference of 1e-5 of the largest value for float32, else 1e-2.

    Args:
        x: [T, D], float32/bfloat16/float16, last axis contiguous. Not modified.
        norm: Parameters of the norm.
        residual: [T, D], float32/bfloat16/float16 (its dtype may differ from that of `x`), last axis contiguous. Not
            modified. None: no residual.
        return_sum: Whether to return the sum, too.
        backend: None selects "triton" for CUDA tensors if it is installed and D <= 8192, else "torch".

    Returns:
        The normalised rows [T, D], dtype of x; and the sum [T, D], dtype of `residual` (of x without one), or None.

    Raises:
        ValueError: Shapes, dtypes or strides do not match; the message names the argument.
    """
    width = norm.weight.shape[0]
    if x.dim() != 2 or x.shape[1] != width or x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"x must be [T, {width}] float32, bfloat16 or float16, got {describe(x)}")
    if residual is not None and (residual.shape != x.shape or residual.dtype not in FLOAT_DTYPES):
        raise ValueError(f"residual must be {list(x.shape)} float32, bfloat16 or float16, got {describe(residual)}")
    if x.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("the last axis of x and residual must be contiguous")
    if backend is None and width > MAX_TRITON_WIDTH:
        backend = "torch"
    backend = choose(backend, x)
    if backend == "triton":
        from ._triton import norm_triton

        return norm_triton(x, norm, residual, return_sum)
    return _norm_torch(x, norm, residual, return_sum)


def embed_norm(
    input_ids: Tensor,
    tables: Embeddings,
    norm: Norm,
    *,
    positions: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    out_dtype: torch.dtype,
    backend: Backend | None = None,
) -> Tensor:
    """Looks up embeddings, adds them in float32 and normalises the sum: the input of an encoder in one kernel.

    s = word[id] + position_table[position + type * num_positions], then as `add_norm`. A NaN in a row of a table
    affects only the tokens that use the row.

    Args:
        input_ids: [T], int64 or int32. On CUDA the values of ids, positions and types are not checked, because a check
            would need a device-to-host copy.
        tables: The embedding tables.
        norm: Parameters of the norm.
        positions: [T], int64 or int32; None if there is no position table.
        token_type_ids: As `positions`; None: all 0.
        out_dtype: float32, bfloat16 or float16.
        backend: As for `add_norm`.

    Returns:
        [T, D], `out_dtype`.

    Raises:
        ValueError: Shapes or dtypes do not match; the message names the argument.
        IndexError: An id, position or type has no row (CPU only).
    """
    width = norm.weight.shape[0]
    for name, table in (("word", tables.word), ("position", tables.position)):
        if table is not None and (table.dim() != 2 or table.shape[1] != width or not table.is_contiguous()):
            raise ValueError(f"the {name} table must be [rows, {width}] and contiguous, got {describe(table)}")
    if (positions is None) != (tables.position is None):
        raise ValueError("positions and the position table must be given together")
    if token_type_ids is not None and positions is None:
        raise ValueError("token_type_ids need positions")
    if input_ids.dim() != 1 or input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"input_ids must be int64 or int32 [T], got {describe(input_ids)}")
    for name, index in (("positions", positions), ("token_type_ids", token_type_ids)):
        if index is not None and (index.shape != input_ids.shape or index.dtype not in (torch.int64, torch.int32)):
            raise ValueError(f"{name} must be int64 or int32 {list(input_ids.shape)}, got {describe(index)}")
    if out_dtype not in FLOAT_DTYPES:
        raise ValueError(f"out_dtype must be float32, bfloat16 or float16, got {out_dtype}")
    if backend is None and width > MAX_TRITON_WIDTH:
        backend = "torch"
    backend = choose(backend, tables.word)
    if backend == "triton":
        from ._triton import embed_norm_triton

        return embed_norm_triton(input_ids, tables, norm, positions, token_type_ids, out_dtype)
    return _embed_norm_torch(input_ids, tables, norm, positions, token_type_ids, out_dtype)


def _norm_torch(x: Tensor, norm: Norm, residual: Tensor | None, return_sum: bool) -> tuple[Tensor, Tensor | None]:
    sum_TD = x.float()
    if residual is not None:
        sum_TD = sum_TD + residual
    normed_TD = _normalise(sum_TD, norm).to(x.dtype)
    return normed_TD, sum_TD.to(x.dtype if residual is None else residual.dtype) if return_sum else None


def _embed_norm_torch(
    input_ids: Tensor,
    tables: Embeddings,
    norm: Norm,
    positions: Tensor | None,
    token_type_ids: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    sum_TD = F.embedding(input_ids, tables.word).float()
    if tables.position is not None and positions is not None:
        rows_T = positions if token_type_ids is None else positions + token_type_ids * tables.num_positions
        sum_TD = sum_TD + F.embedding(rows_T, tables.position)
    return _normalise(sum_TD, norm).to(out_dtype)


def _normalise(sum_TD: Tensor, norm: Norm) -> Tensor:
    kind, weight, bias, eps = norm
    bias = None if bias is None else bias.float()
    if kind == "layer":
        return F.layer_norm(sum_TD, weight.shape, weight.float(), bias, eps)
    normed_TD = F.rms_norm(sum_TD, weight.shape, weight.float(), eps)
    return normed_TD if bias is None else normed_TD + bias
