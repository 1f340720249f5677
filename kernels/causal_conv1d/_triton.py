"""The causal convolution on CUDA: one program per tile of rows of one sequence and block of channels.

C channels, W columns of the weight. A tile is `TILE_ROWS` rows of one sequence, computed `BLOCK_ROWS` at a time.
Finding the tile and reading the weights costs as much as a few rows, so a tile has many.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._tiles_triton import find_tile
from ..backends import on_device
from . import Convolution

TILE_ROWS = 128
BLOCK_ROWS = 16
BLOCK_CHANNELS = 128


@triton.jit(do_not_specialize=["cu_seqlens_ptr", "num_seqs"])
def _convolve_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    cu_seqlens_ptr,
    initial_ptr,
    y_ptr,
    stride_row,
    num_seqs,
    num_channels,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_SILU: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """y_t = activation(bias + sum_w weight_w x_{t - (WIDTH - 1) + w}) for the rows of one tile."""
    n, start, row, end = find_tile(cu_seqlens_ptr, tl.program_id(0), num_seqs, TILE_ROWS)
    channels = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channels < num_channels
    bias = tl.zeros((BLOCK_CHANNELS,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
    for first in range(0, tl.minimum(TILE_ROWS, end - row), BLOCK_ROWS):
        rows = row + first + tl.arange(0, BLOCK_ROWS)
        mask = (rows < end)[:, None] & is_channel[None, :]
        total = tl.zeros((BLOCK_ROWS, BLOCK_CHANNELS), tl.float32) + bias[None, :]
        for w in tl.static_range(WIDTH):
            sources = rows - (WIDTH - 1) + w
            weight = tl.load(weight_ptr + channels * WIDTH + w, mask=is_channel, other=0.0).to(tl.float32)
            addresses = x_ptr + sources.to(tl.int64)[:, None] * stride_row + channels[None, :]
            x = tl.load(addresses, mask=mask & (sources >= start)[:, None], other=0.0).to(tl.float32)
            if HAS_INITIAL and w < WIDTH - 1:
                column = sources - start + (WIDTH - 1)
                initial = initial_ptr + (n.to(tl.int64) * num_channels + channels)[None, :] * (WIDTH - 1)
                x += tl.load(initial + column[:, None], mask=mask & (sources < start)[:, None], other=0.0).to(
                    tl.float32
                )
            total += weight[None, :] * x
        if HAS_SILU:
            total = total / (1.0 + tl.exp(-total))
        addresses = y_ptr + rows.to(tl.int64)[:, None] * num_channels + channels[None, :]
        tl.store(addresses, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["cu_seqlens_ptr"])
def _final_states_kernel(
    x_ptr,
    cu_seqlens_ptr,
    initial_ptr,
    final_ptr,
    stride_row,
    num_channels,
    WIDTH: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """final[n] = the last WIDTH - 1 inputs of sequence n, oldest first."""
    n = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_seqlens_ptr + n)
    end = tl.load(cu_seqlens_ptr + n + 1)
    channels = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channels < num_channels
    columns = (n * num_channels + channels) * (WIDTH - 1)
    for w in tl.static_range(WIDTH - 1):
        row = end - (WIDTH - 1) + w
        value = tl.load(x_ptr + row.to(tl.int64) * stride_row + channels, mask=is_channel & (row >= start), other=0.0)
        if HAS_INITIAL:
            column = row - start + (WIDTH - 1)
            value += tl.load(initial_ptr + columns + column, mask=is_channel & (row < start), other=0.0)
        tl.store(final_ptr + columns + w, value, mask=is_channel)


def causal_conv1d_triton(args: Convolution) -> tuple[Tensor, Tensor | None]:
    """Same as `causal_conv1d`. Does not synchronise host and device."""
    x, weight, bias, cu_seqlens, _, activation, initial_states, return_final_states = args
    num_rows, channels = x.shape
    num_seqs, width = cu_seqlens.shape[0] - 1, weight.shape[1]
    x = x if x.stride(1) == 1 else x.contiguous()
    has_initial = initial_states is not None and width > 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = torch.empty(num_seqs, channels, width - 1, dtype=x.dtype, device=x.device) if return_final_states else None
    # The kernel does not read unused pointers; pass any tensor.
    initial_or_any = x if initial_states is None else initial_states.contiguous()
    cu_seqlens = cu_seqlens.contiguous()
    channel_blocks = triton.cdiv(channels, BLOCK_CHANNELS)
    with on_device(x):
        if y.numel():
            _convolve_kernel[(num_rows // TILE_ROWS + num_seqs, channel_blocks)](
                x,
                weight.contiguous(),
                x if bias is None else bias.contiguous(),
                cu_seqlens,
                initial_or_any,
                y,
                x.stride(0),
                num_seqs,
                channels,
                WIDTH=width,
                HAS_BIAS=bias is not None,
                HAS_INITIAL=has_initial,
                HAS_SILU=activation == "silu",
                TILE_ROWS=TILE_ROWS,
                BLOCK_ROWS=BLOCK_ROWS,
                BLOCK_CHANNELS=BLOCK_CHANNELS,
            )
        if final is not None and final.numel():
            _final_states_kernel[(num_seqs, channel_blocks)](
                x,
                cu_seqlens,
                initial_or_any,
                final,
                x.stride(0),
                channels,
                WIDTH=width,
                HAS_INITIAL=has_initial,
                BLOCK_CHANNELS=BLOCK_CHANNELS,
            )
    return y, final
