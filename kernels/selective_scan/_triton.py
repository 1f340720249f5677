"""The selective scan on CUDA: one program walks one sequence for a block of channels, states in registers.

Letters beside those of the layer: C channels.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._packed import Recurrence, on_device

# States of a program; one warp holds them.
MAX_STATES = 512


@triton.jit(do_not_specialize=["cu_seqlens_ptr"])
def _scan_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    cu_seqlens_ptr,
    initial_ptr,
    final_ptr,
    y_ptr,
    stride_x,
    stride_dt,
    stride_b,
    stride_c,
    num_channels,
    state_size,
    log2_e,
    HAS_D: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    WANTS_FINAL: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """A step is state = exp(dt_t a) state + dt_t x_t b_t; y_t = sum(state c_t) + d x_t.

    UNROLL rows are read ahead of the recurrence; past the end a step size of 0 leaves the state as it is.
    """
    n = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_seqlens_ptr + n)
    end = tl.load(cu_seqlens_ptr + n + 1)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    states = tl.arange(0, BLOCK_S)
    is_channel = channels < num_channels
    is_state = states < state_size
    mask = is_channel[:, None] & is_state[None, :]
    offsets = channels[:, None] * state_size + states[None, :]
    rate = tl.load(a_ptr + offsets, mask=mask, other=0.0) * log2_e
    first = n * num_channels * state_size
    state = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial_ptr + first + offsets, mask=mask, other=0.0)
    d = tl.zeros((BLOCK_C,), tl.float32)
    if HAS_D:
        d = tl.load(d_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
    for first_row in range(0, end - start, UNROLL):
        for u in tl.static_range(UNROLL):
            t = start.to(tl.int64) + first_row + u
            is_row = t < end
            x = tl.load(x_ptr + t * stride_x + channels, mask=is_channel & is_row, other=0.0).to(tl.float32)
            dt = tl.load(dt_ptr + t * stride_dt + channels, mask=is_channel & is_row, other=0.0)
            b = tl.load(b_ptr + t * stride_b + states, mask=is_state & is_row, other=0.0).to(tl.float32)
            c = tl.load(c_ptr + t * stride_c + states, mask=is_state & is_row, other=0.0).to(tl.float32)
            state = tl.exp2(dt[:, None] * rate) * state + (dt * x)[:, None] * b[None, :]
            y = tl.sum(state * c[None, :], 1) + d * x
            tl.store(y_ptr + t * num_channels + channels, y.to(y_ptr.dtype.element_ty), mask=is_channel & is_row)
    if WANTS_FINAL:
        tl.store(final_ptr + first + offsets, state, mask=mask)


def selective_scan_triton(scan: Recurrence) -> tuple[Tensor, Tensor | None]:
    """Same as `selective_scan`. Does not synchronise host and device."""
    x, dt, a, b, c, cu_seqlens, _, d, initial_states, return_final_states = scan
    channels, state_size = a.shape
    num_seqs = cu_seqlens.shape[0] - 1
    x, dt, b, c = (v if v.stride(1) == 1 else v.contiguous() for v in (x, dt, b, c))
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = torch.empty(num_seqs, channels, state_size, device=x.device) if return_final_states else None
    tile = tile_options(state_size)
    if num_seqs and a.numel():
        with on_device(x):
            # Pointers that a call does not need are never read; any tensor stands in for them.
            _scan_kernel[(num_seqs, triton.cdiv(channels, tile["BLOCK_C"]))](
                x,
                dt,
                a.contiguous(),
                b,
                c,
                x if d is None else d.contiguous(),
                cu_seqlens.contiguous(),
                dt if initial_states is None else initial_states.contiguous(),
                dt if final is None else final,
                y,
                x.stride(0),
                dt.stride(0),
                b.stride(0),
                c.stride(0),
                channels,
                state_size,
                math.log2(math.e),
                HAS_D=d is not None,
                HAS_INITIAL=initial_states is not None,
                WANTS_FINAL=return_final_states,
                **tile,
            )
    return y, final


def tile_options(state_size: int) -> dict[str, int]:
    """Launch options by state size: as many channels as one warp has registers for.

    NOTE: without `maxnreg` ptxas spills a register to get by with 96.
    """
    block_s = triton.next_power_of_2(state_size)
    return {
        "BLOCK_C": max(1, MAX_STATES // block_s),
        "BLOCK_S": block_s,
        "UNROLL": 4,
        "num_warps": max(1, block_s // 256),
        "maxnreg": 168,
    }
