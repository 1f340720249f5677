"""What the kernels of pooling do with the rows of one sequence: find, read, reduce and finish them.

Letters beside those of the layer: `limit` is the number of columns a sequence keeps.
"""

import triton
import triton.language as tl


@triton.jit
def bounds(cu_seqlens_ptr, skip_ptr, n, HAS_SKIP: tl.constexpr):
    """(First row of the sequence, first row pooled, end)."""
    start = tl.load(cu_seqlens_ptr + n)
    end = tl.load(cu_seqlens_ptr + n + 1)
    first = start
    if HAS_SKIP:
        first = start + tl.minimum(tl.maximum(tl.load(skip_ptr + n), 0), end - start)
    return start, first, end


@triton.jit
def columns_kept(dimensions_ptr, n, width, HAS_DIMENSIONS: tl.constexpr):
    limit = width
    if HAS_DIMENSIONS:
        limit = tl.minimum(tl.maximum(tl.load(dimensions_ptr + n), 0), width)
    return limit


@triton.jit
def read_mask(columns, limit, hidden_size, is_row):
    """The columns to read: up to `limit`, none if not `is_row`.

    Rounded up to 16, and cut at the end of the row, which is a multiple of 16 in most models: a mask that may end
    anywhere forbids loads of 16 bytes.
    """
    read_limit = tl.where(is_row, tl.cdiv(limit, 16) * 16, 0)
    return (columns < tl.multiple_of(read_limit, 16)) & (columns < hidden_size)


@triton.jit
def total_of_none(POOLING: tl.constexpr, BLOCK_D: tl.constexpr):
    """What rows are added to: the maximum, or the sum, of no row."""
    if POOLING == "max":
        total = tl.full((BLOCK_D,), float("-inf"), tl.float32)
    else:
        total = tl.zeros((BLOCK_D,), tl.float32)
    return total


@triton.jit
def reduce_block(
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
    """Rows `row` to `end` of one sequence: (their sum or maximum, the sum of their explicit weights), float32.

    UNROLL loads are in flight at a time; rows past the end add nothing.
    """
    total = total_of_none(POOLING, BLOCK_D)
    weight = tl.full((), 0.0, tl.float32)
    for i in range(row, end, UNROLL):
        for u in tl.static_range(UNROLL):
            r = i + u
            mask = read_mask(columns, limit, hidden_size, r < end)
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
def finish(
    out_ptr,
    normalize_ptr,
    total,
    weight,
    n,
    start,
    first,
    end,
    columns,
    limit,
    width,
    POOLING: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """out[n] = cut(total / divisor), divided by max(norm, 1e-12) where asked for."""
    divisor = tl.full((), 1.0, tl.float32)
    if POOLING == "mean":
        divisor = (end - first).to(tl.float32)
    elif POOLING == "mean_sqrt_len":
        divisor = tl.sqrt((end - first).to(tl.float32))
    elif POOLING == "weighted_mean":
        length = (end - start).to(tl.int64)
        skipped = (first - start).to(tl.int64)
        divisor = ((length * (length + 1) - skipped * (skipped + 1)) // 2).to(tl.float32)
    elif POOLING == "weighted":
        divisor = weight
    row = total / tl.where(divisor < 1e-9, 1e-9, divisor)
    row = tl.where(columns < tl.where(first < end, limit, 0), row, 0.0)
    if NORMALIZE != "none":
        norm = tl.sqrt(tl.sum(row * row, 0))
        norm = tl.where(norm < 1e-12, 1e-12, norm)
        if NORMALIZE == "by_sequence":
            norm = tl.where(tl.load(normalize_ptr + n) != 0, norm, 1.0)
        row = row / norm
    tl.store(out_ptr + n.to(tl.int64) * width + columns, row.to(out_ptr.dtype.element_ty), mask=columns < width)
