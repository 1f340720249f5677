"""Grouped products on CUDA: each program finds its group and rows from the group ends on the device.

Any division of M rows has at most M / BLOCK_M + G tiles; surplus programs return at once. Programs of one tile share
its rows, programs of neighbouring tiles share weights, through the L2 cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backends import on_device

BLOCK_O = 128
# With at least this many rows per group on average, tiles have twice the rows.
MANY_ROWS = 128


@triton.jit(do_not_specialize=["num_groups"])
def _grouped_kernel(
    x_ptr,
    weight_ptr,
    ends_ptr,
    out_ptr,
    stride_x,
    num_groups,
    num_in,
    num_out,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[m] = W_g x[m]; program (tile of rows, tile of columns)."""
    g = tl.arange(0, BLOCK_G)
    ends = tl.load(ends_ptr + g, mask=g < num_groups, other=0)
    firsts = tl.load(ends_ptr + g - 1, mask=(g > 0) & (g < num_groups), other=0)
    tiles = (ends - firsts + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    # Number of groups that end before this tile. The padding up to BLOCK_G has no tiles.
    group = tl.sum(((tile_ends <= tile) & (g < num_groups)).to(tl.int32), 0)
    if group >= num_groups:
        return
    is_own = g == group
    first_tile = tl.sum(tl.where(is_own, tile_ends - tiles, 0), 0)
    end = tl.sum(tl.where(is_own, ends, 0), 0)
    first = tl.sum(tl.where(is_own, firsts, 0), 0) + (tile - first_tile) * BLOCK_M

    m = first + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    is_row, is_out = m < end, o < num_out
    x_rows = x_ptr + m.to(tl.int64)[:, None] * stride_x
    weight_rows = weight_ptr + (group.to(tl.int64) * num_out + o.to(tl.int64))[None, :] * num_in
    total = tl.zeros((BLOCK_M, BLOCK_O), tl.float32)
    for start in range(0, num_in, BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)
        is_in = i < num_in
        x = tl.load(x_rows + i[None, :], mask=is_row[:, None] & is_in[None, :], other=0.0)
        w = tl.load(weight_rows + i[:, None], mask=is_in[:, None] & is_out[None, :], other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION)
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * num_out + o[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


def tile_options(dtype: torch.dtype, num_rows: int, num_groups: int) -> dict[str, int]:
    """Tile sizes, warps and stages; test_compiled.py compiles all variants."""
    is_many = num_rows >= MANY_ROWS * num_groups
    if dtype == torch.float32:  # exact products use no tensor cores and need more registers
        tile = {"BLOCK_O": 64, "BLOCK_I": 16, "num_warps": 4, "num_stages": 2}
        # Without `maxnreg` ptxas uses 80 registers and spills two, with 64 groups or more.
        return {"BLOCK_M": 64, **tile} if is_many else {"BLOCK_M": 32, "maxnreg": 96, **tile}
    return {
        "BLOCK_M": 128 if is_many else 64,
        "BLOCK_O": BLOCK_O,
        "BLOCK_I": 64,
        "num_warps": 8 if is_many else 4,
        "num_stages": 3,
    }


def grouped_linear_triton(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Same as `grouped_linear`. Does not synchronise host and device."""
    num_rows, num_groups, num_out = x.shape[0], weight.shape[0], weight.shape[1]
    x = x if x.stride(1) == 1 else x.contiguous()
    weight, ends = weight.contiguous(), ends.contiguous()
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    tile = tile_options(x.dtype, num_rows, num_groups)
    grid = (triton.cdiv(num_rows, tile["BLOCK_M"]) + num_groups, triton.cdiv(num_out, tile["BLOCK_O"]))
    with on_device(x):
        _grouped_kernel[grid](
            x,
            weight,
            ends,
            out,
            x.stride(0),
            num_groups,
            x.shape[1],
            num_out,
            BLOCK_G=triton.next_power_of_2(num_groups),
            PRECISION="ieee",
            **tile,
        )
    return out
