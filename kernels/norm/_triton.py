"""Norms on CUDA: one program reads a few whole rows and writes each result once. README.md has the layout."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backends import on_device
from . import MAX_TRITON_WIDTH, Embeddings, Norm

# Elements and maximum rows of a program. The rows of a program share one read of the weights.
BLOCK_SIZE = 4096
MAX_BLOCK_ROWS = 16


@triton.jit
def _normalise(s, weight_ptr, bias_ptr, columns, width, eps, IS_RMS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Normalises s, float32 [ROWS, BLOCK_D]. Columns from `width` on must be 0; their results are undefined."""
    is_column = columns < width
    if not IS_RMS:
        mean = tl.sum(s, axis=1) / width
        s = tl.where(is_column[None, :], s - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(s * s, axis=1) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    normed = s * inverse[:, None] * weight[None, :]
    if HAS_BIAS:
        normed += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return normed


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    sum_ptr,
    num_rows,
    width,
    stride_x,
    stride_residual,
    eps,
    IS_RMS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STORES_SUM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Computes norm(x + residual) for BLOCK_ROWS rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    s = tl.load(x_ptr + rows[:, None] * stride_x + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        addresses = residual_ptr + rows[:, None] * stride_residual + columns[None, :]
        s += tl.load(addresses, mask=mask, other=0.0).to(tl.float32)
    offsets = rows[:, None] * width + columns[None, :]
    if STORES_SUM:
        tl.store(sum_ptr + offsets, s.to(sum_ptr.dtype.element_ty), mask=mask)
    normed = _normalise(s, weight_ptr, bias_ptr, columns, width, eps, IS_RMS, HAS_BIAS)
    tl.store(out_ptr + offsets, normed.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["ids_ptr", "positions_ptr", "types_ptr", "num_rows"])
def _embed_norm_kernel(
    ids_ptr,
    positions_ptr,
    types_ptr,
    word_ptr,
    position_table_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_positions,
    width,
    eps,
    IS_RMS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_TYPES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Computes norm(word[id] + position_table[position + type * num_positions]) for BLOCK_ROWS tokens."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_D)
    is_row = rows < num_rows
    mask = is_row[:, None] & (columns < width)[None, :]
    word = tl.load(ids_ptr + rows, mask=is_row, other=0).to(tl.int64)
    s = tl.load(word_ptr + word[:, None] * width + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_POSITIONS:
        position = tl.load(positions_ptr + rows, mask=is_row, other=0).to(tl.int64)
        if HAS_TYPES:
            position += tl.load(types_ptr + rows, mask=is_row, other=0).to(tl.int64) * num_positions
        s += tl.load(position_table_ptr + position[:, None] * width + columns[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
    normed = _normalise(s, weight_ptr, bias_ptr, columns, width, eps, IS_RMS, HAS_BIAS)
    tl.store(out_ptr + rows[:, None] * width + columns[None, :], normed.to(out_ptr.dtype.element_ty), mask=mask)


def norm_triton(x: Tensor, norm: Norm, residual: Tensor | None, return_sum: bool) -> tuple[Tensor, Tensor | None]:
    """Same as `add_norm`. Does not synchronise host and device."""
    kind, weight, bias, eps = norm
    num_rows, width = x.shape
    tile = tile_options(width)
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    sum_ = None
    if return_sum:
        sum_ = torch.empty((num_rows, width), dtype=x.dtype if residual is None else residual.dtype, device=x.device)
    if not num_rows:
        return out, sum_
    with on_device(x):
        _norm_kernel[(-(-num_rows // tile["BLOCK_ROWS"]),)](
            x,
            # The kernel does not use the pointers of absent arguments; pass any tensor.
            x if residual is None else residual,
            weight,
            weight if bias is None else bias,
            out,
            out if sum_ is None else sum_,
            num_rows,
            width,
            x.stride(0),
            width if residual is None else residual.stride(0),
            eps,
            IS_RMS=kind == "rms",
            HAS_RESIDUAL=residual is not None,
            HAS_BIAS=bias is not None,
            STORES_SUM=return_sum,
            **tile,
        )
    return out, sum_


def embed_norm_triton(
    input_ids: Tensor,
    tables: Embeddings,
    norm: Norm,
    positions: Tensor | None,
    token_type_ids: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Same as `embed_norm`. Does not synchronise host and device."""
    kind, weight, bias, eps = norm
    num_rows, width = input_ids.shape[0], weight.shape[0]
    tile = tile_options(width)
    out = torch.empty((num_rows, width), dtype=out_dtype, device=tables.word.device)
    if not num_rows:
        return out
    with on_device(out):
        _embed_norm_kernel[(-(-num_rows // tile["BLOCK_ROWS"]),)](
            input_ids.contiguous(),
            input_ids if positions is None else positions.contiguous(),
            input_ids if token_type_ids is None else token_type_ids.contiguous(),
            tables.word,
            tables.word if tables.position is None else tables.position,
            weight,
            weight if bias is None else bias,
            out,
            num_rows,
            tables.num_positions,
            width,
            eps,
            IS_RMS=kind == "rms",
            HAS_POSITIONS=positions is not None,
            HAS_TYPES=token_type_ids is not None,
            HAS_BIAS=bias is not None,
            **tile,
        )
    return out


def tile_options(width: int) -> dict[str, int]:
    """Launch options. They depend on the width only, so that a row's sums have the same order in every batch.

    Raises:
        ValueError: Rows have more than 8,192 columns.
    """
    if width > MAX_TRITON_WIDTH:
        raise ValueError(
            f"the triton backend supports at most {MAX_TRITON_WIDTH} columns, got {width}; use the torch backend"
        )
    block_d = max(64, 1 << (width - 1).bit_length())
    return {
        "BLOCK_ROWS": min(MAX_BLOCK_ROWS, max(1, BLOCK_SIZE // block_d)),
        "BLOCK_D": block_d,
        "num_warps": 4 if block_d <= BLOCK_SIZE else 8,
    }
