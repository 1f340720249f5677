"""Fused pooling on CUDA: one program reads the rows of one sequence once and writes the result.

Long sequences are split into blocks of `BLOCK_ROWS` rows with a program each; a second kernel adds the blocks and
finishes. Both paths add the same numbers in the same order, so the result is the same. README.md has the layout.

Names: a block is `BLOCK_ROWS` rows of one sequence; `limit` is the number of columns that a sequence keeps, at
most `width`, the number of columns of the output. The columns from `limit` to `width` are 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backends import on_device
from ._torch import MAX_TRITON_WIDTH, PoolArguments

BLOCK_ROWS = 256
# Above either limit, one program pools each whole sequence. MAX_PROGRAMS counts (sequence, block) pairs.
MAX_PROGRAMS = 1 << 15
MAX_BLOCK_BYTES = 1 << 26
COMPILE_OPTIONS = {"maxnreg": 128, "enable_fp_fusion": True}


@triton.jit
def _bounds(cu_seqlens_ptr, skip_ptr, n, HAS_SKIP: tl.constexpr):
    """Returns (first row of the sequence, first row to pool, end row)."""
    start = tl.load(cu_seqlens_ptr + n)
    end = tl.load(cu_seqlens_ptr + n + 1)
    first = start
    if HAS_SKIP:
        first = start + tl.minimum(tl.maximum(tl.load(skip_ptr + n), 0), end - start)
    return start, first, end


@triton.jit
def _first_block(start, n, BLOCK_ROWS: tl.constexpr):
    """Index of the first block of a sequence among the blocks of all sequences.

    A sequence of L rows has at most L // BLOCK_ROWS + 1 blocks, so the blocks of two sequences never overlap.
    """
    return (start // BLOCK_ROWS + n).to(tl.int64)


@triton.jit
def _column_limit(dimensions_ptr, n, width, HAS_DIMENSIONS: tl.constexpr):
    limit = width
    if HAS_DIMENSIONS:
        limit = tl.minimum(tl.maximum(tl.load(dimensions_ptr + n), 0), width)
    return limit


@triton.jit
def _read_mask(columns, limit, hidden_size, is_row):
    """Mask of the columns to read: up to `limit`; none if `is_row` is false.

    The limit is rounded up to a multiple of 16 so that the compiler can use 16-byte loads. The row's width, a multiple
    of 16 in most models, bounds it.
    """
    read_limit = tl.where(is_row, tl.cdiv(limit, 16) * 16, 0)
    return (columns < tl.multiple_of(read_limit, 16)) & (columns < hidden_size)


@triton.jit
def _initial_total(POOLING: tl.constexpr, BLOCK_D: tl.constexpr):
    if POOLING == "max":
        total = tl.full((BLOCK_D,), float("-inf"), tl.float32)
    else:
        total = tl.zeros((BLOCK_D,), tl.float32)
    return total


@triton.jit
def _reduce_block(
    hidden_ptr,
    weights_ptr,
    stride_row,
    start,
    row,
    end,
    columns,
    limit,
    hidden_size,
    POOLING: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Returns (sum or maximum, sum of the explicit weights) of rows `row` to `end` of one sequence, float32.

    UNROLL loads are in flight at a time. Loads past the end are masked.
    """
    total = _initial_total(POOLING, BLOCK_D)
    weight = tl.full((), 0.0, tl.float32)
    for i in range(row, end, UNROLL):
        for u in tl.static_range(UNROLL):
            r = i + u
            mask = _read_mask(columns, limit, hidden_size, r < end)
            address = hidden_ptr + r.to(tl.int64) * stride_row + columns
            if POOLING == "max":
                x = tl.load(address, mask=mask, other=float("-inf")).to(tl.float32)
                total = tl.maximum(total, x, propagate_nan=tl.PropagateNan.ALL)
            else:
                x = tl.load(address, mask=mask, other=0.0).to(tl.float32)
                if POOLING == "weighted":
                    w = tl.load(weights_ptr + r, mask=r < end, other=0.0)
                    total += w * x
                    weight += w
                elif POOLING == "weighted_mean":
                    total += (r - start + 1).to(tl.float32) * x
                else:
                    total += x
    return total, weight


@triton.jit
def _finish(
    out_ptr,
    normalize_ptr,
    total,
    weight,
    n,
    seq_start,
    first_row,
    end_row,
    columns,
    limit,
    width,
    POOLING: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """out[n] = total / divisor with 0 from column `limit` on, divided by max(norm, 1e-12) if NORMALIZE says so."""
    divisor = tl.full((), 1.0, tl.float32)
    if POOLING == "mean":
        divisor = (end_row - first_row).to(tl.float32)
    elif POOLING == "mean_sqrt_len":
        divisor = tl.sqrt((end_row - first_row).to(tl.float32))
    elif POOLING == "weighted_mean":
        length = (end_row - seq_start).to(tl.int64)
        skipped = (first_row - seq_start).to(tl.int64)
        divisor = ((length * (length + 1) - skipped * (skipped + 1)) // 2).to(tl.float32)
    elif POOLING == "weighted":
        divisor = weight
    row = total / tl.where(divisor < 1e-9, 1e-9, divisor)
    row = tl.where(columns < tl.where(first_row < end_row, limit, 0), row, 0.0)
    if NORMALIZE != "none":
        norm = tl.sqrt(tl.sum(row * row, 0))
        norm = tl.where(norm < 1e-12, 1e-12, norm)
        if NORMALIZE == "by_sequence":
            norm = tl.where(tl.load(normalize_ptr + n) != 0, norm, 1.0)
        row = row / norm
    tl.store(out_ptr + n.to(tl.int64) * width + columns, row.to(out_ptr.dtype.element_ty), mask=columns < width)


@triton.jit(do_not_specialize=["cu_seqlens_ptr", "dimensions_ptr", "normalize_ptr", "skip_ptr", "width"])
def _pool_kernel(
    hidden_ptr,
    cu_seqlens_ptr,
    dimensions_ptr,
    normalize_ptr,
    skip_ptr,
    weights_ptr,
    out_ptr,
    stride_row,
    hidden_size,
    width,
    POOLING: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_DIMENSIONS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[n] = normalize(truncate(pool(rows of sequence n))), one program per sequence."""
    n = tl.program_id(0)
    start, first, end = _bounds(cu_seqlens_ptr, skip_ptr, n, HAS_SKIP)
    limit = _column_limit(dimensions_ptr, n, width, HAS_DIMENSIONS)
    columns = tl.arange(0, BLOCK_D)
    weight = tl.full((), 0.0, tl.float32)
    if POOLING == "cls" or POOLING == "last":
        r = first if POOLING == "cls" else end - 1
        mask = _read_mask(columns, limit, hidden_size, first < end)
        total = tl.load(hidden_ptr + r.to(tl.int64) * stride_row + columns, mask=mask, other=0.0).to(tl.float32)
    else:
        total = _initial_total(POOLING, BLOCK_D)
        for row in range(first, end, BLOCK_ROWS):
            block_end = tl.minimum(row + BLOCK_ROWS, end)
            block_total, block_weight = _reduce_block(
                hidden_ptr,
                weights_ptr,
                stride_row,
                start,
                row,
                block_end,
                columns,
                limit,
                hidden_size,
                POOLING,
                UNROLL,
                BLOCK_D,
            )
            if POOLING == "max":
                total = tl.maximum(total, block_total, propagate_nan=tl.PropagateNan.ALL)
            else:
                total += block_total
                weight += block_weight
    _finish(out_ptr, normalize_ptr, total, weight, n, start, first, end, columns, limit, width, POOLING, NORMALIZE)


@triton.jit(do_not_specialize=["cu_seqlens_ptr", "dimensions_ptr", "skip_ptr", "width"])
def _partial_kernel(
    hidden_ptr,
    cu_seqlens_ptr,
    dimensions_ptr,
    skip_ptr,
    weights_ptr,
    block_total_ptr,
    block_weight_ptr,
    stride_row,
    hidden_size,
    width,
    POOLING: tl.constexpr,
    HAS_DIMENSIONS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """block_total[first block of n + b] = sum or maximum of block b of sequence n, if the sequence has a block b."""
    n = tl.program_id(0)
    block = tl.program_id(1)
    start, first, end = _bounds(cu_seqlens_ptr, skip_ptr, n, HAS_SKIP)
    # Compares block numbers, because block * BLOCK_ROWS could overflow int32 for a block that does not exist.
    if block < tl.cdiv(end - first, BLOCK_ROWS):
        limit = _column_limit(dimensions_ptr, n, width, HAS_DIMENSIONS)
        columns = tl.arange(0, BLOCK_D)
        row = first + block * BLOCK_ROWS
        block_end = tl.minimum(row + BLOCK_ROWS, end)
        total, weight = _reduce_block(
            hidden_ptr,
            weights_ptr,
            stride_row,
            start,
            row,
            block_end,
            columns,
            limit,
            hidden_size,
            POOLING,
            UNROLL,
            BLOCK_D,
        )
        index = _first_block(start, n, BLOCK_ROWS) + block
        tl.store(block_total_ptr + index * hidden_size + columns, total, mask=columns < hidden_size)
        if POOLING == "weighted":
            tl.store(block_weight_ptr + index, weight)


@triton.jit(do_not_specialize=["cu_seqlens_ptr", "dimensions_ptr", "normalize_ptr", "skip_ptr", "width"])
def _combine_kernel(
    block_total_ptr,
    block_weight_ptr,
    cu_seqlens_ptr,
    dimensions_ptr,
    normalize_ptr,
    skip_ptr,
    out_ptr,
    hidden_size,
    width,
    POOLING: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_DIMENSIONS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[n] = normalize(truncate(blocks of sequence n, added in order)), one program per sequence."""
    n = tl.program_id(0)
    start, first, end = _bounds(cu_seqlens_ptr, skip_ptr, n, HAS_SKIP)
    limit = _column_limit(dimensions_ptr, n, width, HAS_DIMENSIONS)
    columns = tl.arange(0, BLOCK_D)
    weight = tl.full((), 0.0, tl.float32)
    total = _initial_total(POOLING, BLOCK_D)
    for block in range(tl.cdiv(end - first, BLOCK_ROWS)):
        index = _first_block(start, n, BLOCK_ROWS) + block
        mask = _read_mask(columns, limit, hidden_size, first < end)
        block_total = tl.load(block_total_ptr + index * hidden_size + columns, mask=mask, other=0.0)
        if POOLING == "max":
            total = tl.maximum(total, block_total, propagate_nan=tl.PropagateNan.ALL)
        else:
            total += block_total
            if POOLING == "weighted":
                weight += tl.load(block_weight_ptr + index)
    _finish(out_ptr, normalize_ptr, total, weight, n, start, first, end, columns, limit, width, POOLING, NORMALIZE)


def pool_triton(args: PoolArguments, max_seqlen: int | None) -> Tensor:
    """Same as `pool`. Does not synchronise host and device.

    Raises:
        ValueError: Rows have more than 8,192 columns.
    """
    hidden_states, cu_seqlens, pooling, width, dimensions, normalize, skip_tokens, weights, out_dtype = args
    num_tokens, hidden_size = hidden_states.shape
    num_seqs = cu_seqlens.shape[0] - 1
    if hidden_size > MAX_TRITON_WIDTH:
        raise ValueError(
            f"the triton backend supports at most {MAX_TRITON_WIDTH} columns, got {hidden_size}; use the torch backend"
        )
    out = torch.empty(num_seqs, width, dtype=out_dtype, device=hidden_states.device)
    # The kernels do not read unused pointers; pass any tensor.
    bounds = cu_seqlens.contiguous()
    limits = bounds if dimensions is None else dimensions.contiguous()
    norms = normalize.contiguous().view(torch.uint8) if isinstance(normalize, Tensor) else bounds
    skips = bounds if skip_tokens is None else skip_tokens.contiguous()
    row_weights = bounds if weights is None else weights.contiguous()
    sizes = hidden_states.stride(0), hidden_size, width
    mode = "by_sequence" if isinstance(normalize, Tensor) else "all" if normalize else "none"
    flags = {
        "POOLING": pooling,
        "HAS_DIMENSIONS": dimensions is not None,
        "HAS_SKIP": skip_tokens is not None,
        "BLOCK_ROWS": BLOCK_ROWS,
    }
    # Not by `width`, which clients choose: a new tile would be compiled while requests run.
    tile = tile_options(hidden_size)

    num_blocks = triton.cdiv(num_tokens if max_seqlen is None else min(max_seqlen, num_tokens), BLOCK_ROWS)
    num_totals = num_tokens // BLOCK_ROWS + num_seqs  # one past the last index of _first_block
    is_small = num_blocks * num_seqs <= MAX_PROGRAMS and num_totals * hidden_size * 4 <= MAX_BLOCK_BYTES
    is_split = pooling not in ("cls", "last") and num_blocks > 1 and is_small
    with on_device(hidden_states):
        if not is_split:
            _pool_kernel[(num_seqs,)](
                hidden_states, bounds, limits, norms, skips, row_weights, out, *sizes, NORMALIZE=mode, **flags, **tile
            )
            return out
        totals = torch.empty(num_totals, hidden_size, dtype=torch.float32, device=hidden_states.device)
        total_weights = torch.empty(num_totals, dtype=torch.float32, device=hidden_states.device)
        _partial_kernel[(num_seqs, num_blocks)](
            hidden_states, bounds, limits, skips, row_weights, totals, total_weights, *sizes, **flags, **tile
        )
        del tile["UNROLL"]
        _combine_kernel[(num_seqs,)](
            totals, total_weights, bounds, limits, norms, skips, out, *sizes[1:], NORMALIZE=mode, **flags, **tile
        )
    return out


def tile_options(hidden_size: int) -> dict[str, int]:
    """Launch options for a row width: 8 columns per thread (16 bytes in bfloat16), more beyond 4,096 columns.

    Without `maxnreg` ptxas uses only 32 or 40 registers and spills two. With 16 warps, 128 per thread are available.
    """
    block_d = max(64, triton.next_power_of_2(hidden_size))
    num_warps = min(16, max(1, block_d // 256))
    return {"BLOCK_D": block_d, "num_warps": num_warps, "UNROLL": 8 if block_d <= 4096 else 4, **COMPILE_OPTIONS}
