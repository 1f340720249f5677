"""The selective scan on CUDA, in three passes: states of single chunks, states between chunks, rows.

Within a chunk one program processes the rows in order for a block of C channels, with the states in registers. The
first two passes are skipped if no sequence is longer than a chunk. Chunks have the tile numbers of `find_tile`; unused
numbers are neither written nor read. README.md has the derivation.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._tiles_triton import find_tile
from ..backends import Recurrence, on_device

# Rows per program. Constant: if it depended on the lengths, the last bits of a sequence would depend on its batch.
CHUNK_SIZE = 128
# States per program, held by one warp.
MAX_STATES = 512
# States per program of `_pass_states_kernel`.
BLOCK_STATES = 1024


@triton.jit
def _step(state, rate, x, dt, b):
    """exp(dt a) state + dt x b: [C, S]. x and dt are [C], b is [S]."""
    return tl.exp2(dt[:, None] * rate) * state + (dt * x)[:, None] * b[None, :]


@triton.jit(do_not_specialize=["cu_seqlens_ptr", "num_seqs"])
def _chunk_states_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    cu_seqlens_ptr,
    states_ptr,
    steps_ptr,
    stride_x,
    stride_dt,
    stride_b,
    num_seqs,
    num_channels,
    state_size,
    log2_e,
    SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """states[chunk] = the state after its rows, from a state of 0; steps[chunk] = sum_t dt_t.

    Skips the last chunk of a sequence.
    """
    chunk = tl.program_id(0)
    _, _, row, end = find_tile(cu_seqlens_ptr, chunk, num_seqs, SIZE)
    if row + SIZE < end:
        channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        states = tl.arange(0, BLOCK_S)
        is_channel = channels < num_channels
        is_state = states < state_size
        mask = is_channel[:, None] & is_state[None, :]
        offsets = channels[:, None] * state_size + states[None, :]
        rate = tl.load(a_ptr + offsets, mask=mask, other=0.0) * log2_e
        state = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
        steps = tl.zeros((BLOCK_C,), tl.float32)
        for first in range(0, SIZE, UNROLL):
            for u in tl.static_range(UNROLL):
                t = row.to(tl.int64) + first + u
                x = tl.load(x_ptr + t * stride_x + channels, mask=is_channel, other=0.0).to(tl.float32)
                dt = tl.load(dt_ptr + t * stride_dt + channels, mask=is_channel, other=0.0)
                b = tl.load(b_ptr + t * stride_b + states, mask=is_state, other=0.0).to(tl.float32)
                state = _step(state, rate, x, dt, b)
                steps += dt
        index = chunk.to(tl.int64) * num_channels
        tl.store(states_ptr + index * state_size + offsets, state, mask=mask)
        tl.store(steps_ptr + index + channels, steps, mask=is_channel)


@triton.jit(do_not_specialize=["cu_seqlens_ptr"])
def _pass_states_kernel(
    states_ptr,
    steps_ptr,
    a_ptr,
    cu_seqlens_ptr,
    initial_ptr,
    num_channels,
    state_size,
    log2_e,
    HAS_INITIAL: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replaces the state that each chunk adds by the state before the chunk."""
    n = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    num_columns = num_channels * state_size
    mask = columns < num_columns
    start = tl.load(cu_seqlens_ptr + n)
    num_chunks = tl.cdiv(tl.load(cu_seqlens_ptr + n + 1) - start, SIZE)
    rate = tl.load(a_ptr + columns, mask=mask, other=0.0) * log2_e
    state = tl.zeros((BLOCK,), tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial_ptr + n.to(tl.int64) * num_columns + columns, mask=mask, other=0.0)
    for chunk in range(num_chunks):
        index = (start // SIZE + n + chunk).to(tl.int64)
        addresses = states_ptr + index * num_columns + columns
        is_needed = mask & (chunk < num_chunks - 1)
        added = tl.load(addresses, mask=is_needed, other=0.0)
        steps = tl.load(steps_ptr + index * num_channels + columns // state_size, mask=is_needed, other=0.0)
        tl.store(addresses, state, mask=mask)
        state = tl.exp2(steps * rate) * state + added


@triton.jit(do_not_specialize=["cu_seqlens_ptr", "num_seqs"])
def _rows_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    cu_seqlens_ptr,
    initial_ptr,
    states_ptr,
    final_ptr,
    y_ptr,
    stride_x,
    stride_dt,
    stride_b,
    stride_c,
    num_seqs,
    num_channels,
    state_size,
    log2_e,
    HAS_D: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_STATES: tl.constexpr,
    WANTS_FINAL: tl.constexpr,
    SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """y_t = sum(state_t c_t) + d x_t for the rows of one chunk, starting from the state before the chunk.

    A sequence without rows has one chunk for its final state. UNROLL rows are loaded ahead of the recurrence. Past the
    end the step size is 0, which does not change the state.
    """
    chunk = tl.program_id(0)
    n, start, row, end = find_tile(cu_seqlens_ptr, chunk, num_seqs, SIZE)
    if (row < end) | (row == start):
        channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        states = tl.arange(0, BLOCK_S)
        is_channel = channels < num_channels
        is_state = states < state_size
        mask = is_channel[:, None] & is_state[None, :]
        offsets = channels[:, None] * state_size + states[None, :]
        sequence = n.to(tl.int64) * num_channels * state_size
        rate = tl.load(a_ptr + offsets, mask=mask, other=0.0) * log2_e
        state = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
        if HAS_STATES:
            chunk_states = states_ptr + chunk.to(tl.int64) * num_channels * state_size
            state = tl.load(chunk_states + offsets, mask=mask & (row > start), other=0.0)
        if HAS_INITIAL:
            state += tl.load(initial_ptr + sequence + offsets, mask=mask & (row == start), other=0.0)
        d = tl.zeros((BLOCK_C,), tl.float32)
        if HAS_D:
            d = tl.load(d_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)
        for first in range(0, tl.minimum(SIZE, end - row), UNROLL):
            for u in tl.static_range(UNROLL):
                t = row.to(tl.int64) + first + u
                is_row = t < end
                x = tl.load(x_ptr + t * stride_x + channels, mask=is_channel & is_row, other=0.0).to(tl.float32)
                dt = tl.load(dt_ptr + t * stride_dt + channels, mask=is_channel & is_row, other=0.0)
                b = tl.load(b_ptr + t * stride_b + states, mask=is_state & is_row, other=0.0).to(tl.float32)
                c = tl.load(c_ptr + t * stride_c + states, mask=is_state & is_row, other=0.0).to(tl.float32)
                state = _step(state, rate, x, dt, b)
                y = tl.sum(state * c[None, :], 1) + d * x
                tl.store(y_ptr + t * num_channels + channels, y.to(y_ptr.dtype.element_ty), mask=is_channel & is_row)
        if WANTS_FINAL and row + SIZE >= end:
            tl.store(final_ptr + sequence + offsets, state, mask=mask)


def selective_scan_triton(scan: Recurrence) -> tuple[Tensor, Tensor | None]:
    """Same as `selective_scan`. Does not synchronise host and device."""
    x, dt, a, b, c, cu_seqlens, seq_lens, d, initial_states, return_final_states = scan
    channels, state_size = a.shape
    num_seqs = cu_seqlens.shape[0] - 1
    x, dt, b, c = (v if v.stride(1) == 1 else v.contiguous() for v in (x, dt, b, c))
    a = a.contiguous()
    cu_seqlens = cu_seqlens.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = torch.empty(num_seqs, channels, state_size, device=x.device) if return_final_states else None
    if num_seqs == 0 or a.numel() == 0:
        return y, final
    tile = tile_options(state_size)
    num_chunks = x.shape[0] // CHUNK_SIZE + num_seqs
    grid = (num_chunks, triton.cdiv(channels, tile["BLOCK_C"]))
    has_states = max(seq_lens) > CHUNK_SIZE
    strides = (x.stride(0), dt.stride(0), b.stride(0))
    sizes = (channels, state_size, math.log2(math.e))
    # The kernels do not read unused pointers; pass any tensor.
    initial = dt if initial_states is None else initial_states.contiguous()
    states = dt
    with on_device(x):
        if has_states:
            states = torch.empty(num_chunks, channels, state_size, device=x.device)
            steps = torch.empty(num_chunks, channels, device=x.device)
            _chunk_states_kernel[grid](
                x, dt, a, b, cu_seqlens, states, steps, *strides, num_seqs, *sizes, SIZE=CHUNK_SIZE, **tile
            )
            _pass_states_kernel[(num_seqs, triton.cdiv(channels * state_size, BLOCK_STATES))](
                states,
                steps,
                a,
                cu_seqlens,
                initial,
                *sizes,
                HAS_INITIAL=initial_states is not None,
                SIZE=CHUNK_SIZE,
                BLOCK=BLOCK_STATES,
            )
        _rows_kernel[grid](
            x,
            dt,
            a,
            b,
            c,
            x if d is None else d.contiguous(),
            cu_seqlens,
            initial,
            states,
            dt if final is None else final,
            y,
            *strides,
            c.stride(0),
            num_seqs,
            *sizes,
            HAS_D=d is not None,
            HAS_INITIAL=initial_states is not None,
            HAS_STATES=has_states,
            WANTS_FINAL=return_final_states,
            SIZE=CHUNK_SIZE,
            **tile,
        )
    return y, final


def tile_options(state_size: int) -> dict[str, int]:
    """Launch options for a state size: as many channels as fit in the registers of one warp.

    Without `maxnreg` ptxas uses 96 registers and spills one.
    """
    block_s = triton.next_power_of_2(state_size)
    return {
        "BLOCK_C": max(1, MAX_STATES // block_s),
        "BLOCK_S": block_s,
        "UNROLL": 4,
        "num_warps": max(1, block_s // 256),
        "maxnreg": 168,
    }
