"""State space duality on CUDA, in three passes: states of single chunks, states between chunks, rows.

Q rows of a chunk, P head size. Chunks have the tile numbers of `find_tile`; unused numbers are neither written nor
read. README.md has the derivation.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._tiles_triton import find_tile
from ..backends import Recurrence, on_device

# Larger chunks need too many registers. "Exact" is float32, which uses no tensor cores.
MAX_CHUNK_SIZE = 128
MAX_EXACT_CHUNK_SIZE = 64
BLOCK_STATES = 1024


@triton.jit
def _decay_logs(dt_ptr, a_ptr, stride_dt, row, end, head, log2_e, SIZE: tl.constexpr):
    """Returns (dt [Q], log2 of the decays [Q], float64). Step sizes past the end are 0."""
    rows = row + tl.arange(0, SIZE)
    dt = tl.load(dt_ptr + rows.to(tl.int64) * stride_dt + head, mask=rows < end, other=0.0)
    rate = tl.load(a_ptr + head).to(tl.float64) * log2_e
    return dt, tl.cumsum(dt.to(tl.float64) * rate, 0)


@triton.jit(do_not_specialize=["cu_seqlens_ptr", "num_seqs"])
def _chunk_states_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    cu_seqlens_ptr,
    states_ptr,
    chunk_decay_ptr,
    stride_x,
    stride_x_head,
    stride_dt,
    stride_b,
    stride_b_group,
    num_seqs,
    num_heads,
    heads_per_group,
    head_size,
    state_size,
    LOG2_E: tl.constexpr,
    WANTS_FINAL: tl.constexpr,
    PRECISION: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """states[chunk, h] = sum_j dt_j 2 ** (log_last - log_j) x_j b_j^T; chunk_decay[chunk, h] = 2 ** log_last.

    Skips the last chunk of a sequence unless WANTS_FINAL.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    _, _, row, end = find_tile(cu_seqlens_ptr, chunk, num_seqs, SIZE)
    last_row = row + SIZE
    if WANTS_FINAL:
        last_row = row
    if (row < end) & (last_row < end):
        dt, logs = _decay_logs(dt_ptr, a_ptr, stride_dt, row, end, head, LOG2_E, SIZE)
        last = tl.sum(tl.where(tl.arange(0, SIZE) == SIZE - 1, logs, 0.0), 0)
        weights = dt * tl.exp2((last - logs).to(tl.float32))
        num_blocks_s = tl.cdiv(state_size, BLOCK_S)
        p = tl.program_id(2) // num_blocks_s * BLOCK_P + tl.arange(0, BLOCK_P)
        s = tl.program_id(2) % num_blocks_s * BLOCK_S + tl.arange(0, BLOCK_S)
        rows = (row + tl.arange(0, SIZE)).to(tl.int64)
        is_row = rows < end
        x_addresses = x_ptr + rows[None, :] * stride_x + head * stride_x_head + p[:, None]
        x = tl.load(x_addresses, mask=is_row[None, :] & (p < head_size)[:, None], other=0.0)
        b_addresses = b_ptr + rows[:, None] * stride_b + head // heads_per_group * stride_b_group + s[None, :]
        b = tl.load(b_addresses, mask=is_row[:, None] & (s < state_size)[None, :], other=0.0)
        if PRECISION == "bf16":
            state = tl.dot((x.to(tl.float32) * weights[None, :]).to(tl.bfloat16), b)
        else:
            state = tl.dot(x.to(tl.float32) * weights[None, :], b.to(tl.float32), input_precision=PRECISION)
        index = chunk.to(tl.int64) * num_heads + head
        addresses = states_ptr + (index * head_size + p)[:, None] * state_size + s[None, :]
        tl.store(addresses, state, mask=(p < head_size)[:, None] & (s < state_size)[None, :])
        tl.store(chunk_decay_ptr + index, tl.exp2(last.to(tl.float32)))


@triton.jit(do_not_specialize=["cu_seqlens_ptr"])
def _pass_states_kernel(
    states_ptr,
    chunk_decay_ptr,
    cu_seqlens_ptr,
    initial_ptr,
    final_ptr,
    num_heads,
    head_states,
    HAS_INITIAL: tl.constexpr,
    WANTS_FINAL: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replaces the state that each chunk adds by the state before the chunk; `head_states` is P * S."""
    n = tl.program_id(0)
    head = tl.program_id(1)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < head_states
    start = tl.load(cu_seqlens_ptr + n)
    num_chunks = tl.cdiv(tl.load(cu_seqlens_ptr + n + 1) - start, SIZE)
    state = tl.zeros((BLOCK,), tl.float32)
    sequence = (n.to(tl.int64) * num_heads + head) * head_states
    if HAS_INITIAL:
        state = tl.load(initial_ptr + sequence + columns, mask=mask, other=0.0)
    for chunk in range(num_chunks):
        index = (start // SIZE + n + chunk).to(tl.int64) * num_heads + head
        addresses = states_ptr + index * head_states + columns
        is_needed = chunk < num_chunks - 1
        if WANTS_FINAL:
            is_needed = chunk < num_chunks
        added = tl.load(addresses, mask=mask & is_needed, other=0.0)
        chunk_decay = tl.load(chunk_decay_ptr + index, mask=is_needed, other=0.0)
        tl.store(addresses, state, mask=mask)
        state = chunk_decay * state + added
    if WANTS_FINAL:
        tl.store(final_ptr + sequence + columns, state, mask=mask)


@triton.jit(do_not_specialize=["cu_seqlens_ptr", "num_seqs"])
def _rows_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    cu_seqlens_ptr,
    states_ptr,
    y_ptr,
    stride_x,
    stride_x_head,
    stride_dt,
    stride_b,
    stride_b_group,
    stride_c,
    stride_c_group,
    num_seqs,
    num_heads,
    heads_per_group,
    head_size,
    state_size,
    LOG2_E: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_STATES: tl.constexpr,
    PRECISION: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """y_i = sum_{j <= i} dt_j 2 ** (log_i - log_j) (c_i b_j) x_j + 2 ** log_i state c_i + d x_i for one chunk."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    _, _, row, end = find_tile(cu_seqlens_ptr, chunk, num_seqs, SIZE)
    if row < end:
        dt, logs = _decay_logs(dt_ptr, a_ptr, stride_dt, row, end, head, LOG2_E, SIZE)
        high = logs.to(tl.float32)
        rest = (logs - high.to(tl.float64)).to(tl.float32)
        offsets = tl.arange(0, SIZE)
        rows = (row + offsets).to(tl.int64)
        is_row = rows < end
        p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
        is_p = p < head_size
        group = head // heads_per_group
        index = chunk.to(tl.int64) * num_heads + head
        products = tl.zeros((SIZE, SIZE), tl.float32)
        past = tl.zeros((SIZE, BLOCK_P), tl.float32)
        for first in range(0, state_size, BLOCK_S):
            s = first + tl.arange(0, BLOCK_S)
            is_s = s < state_size
            c_addresses = c_ptr + rows[:, None] * stride_c + group * stride_c_group + s[None, :]
            c = tl.load(c_addresses, mask=is_row[:, None] & is_s[None, :], other=0.0)
            b_addresses = b_ptr + rows[None, :] * stride_b + group * stride_b_group + s[:, None]
            b = tl.load(b_addresses, mask=is_row[None, :] & is_s[:, None], other=0.0)
            if PRECISION == "bf16":
                products = tl.dot(c, b, products)
            else:
                c = c.to(tl.float32)
                products = tl.dot(c, b.to(tl.float32), products, input_precision=PRECISION)
            if HAS_STATES:
                state_addresses = states_ptr + (index * head_size + p)[None, :] * state_size + s[:, None]
                state = tl.load(state_addresses, mask=is_p[None, :] & is_s[:, None], other=0.0)
                if PRECISION == "bf16":
                    past = tl.dot(c, state.to(tl.bfloat16), past)
                else:
                    past = tl.dot(c, state, past, input_precision=PRECISION)
        # Two differences: large sums would otherwise lose the digits of small steps.
        exponents = (high[:, None] - high[None, :]) + (rest[:, None] - rest[None, :])
        exponents = tl.where(offsets[:, None] >= offsets[None, :], exponents, float("-inf"))
        weights = tl.exp2(exponents) * dt[None, :] * products
        x_addresses = x_ptr + rows[:, None] * stride_x + head * stride_x_head + p[None, :]
        x = tl.load(x_addresses, mask=is_row[:, None] & is_p[None, :], other=0.0)
        if PRECISION == "bf16":
            y = tl.dot(weights.to(tl.bfloat16), x)
        else:
            y = tl.dot(weights, x.to(tl.float32), input_precision=PRECISION)
        if HAS_STATES:
            y += tl.exp2(high)[:, None] * past
        if HAS_D:
            y += tl.load(d_ptr + head).to(tl.float32) * x.to(tl.float32)
        y_addresses = y_ptr + (rows[:, None] * num_heads + head) * head_size + p[None, :]
        tl.store(y_addresses, y.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_p[None, :])


def ssd_triton(scan: Recurrence, chunk_size: int | None) -> tuple[Tensor, Tensor | None]:
    """Same as `ssd`. Does not synchronise host and device."""
    x, dt, a, b, c, cu_seqlens, seq_lens, d, initial_states, return_final_states = scan
    num_rows, num_heads, head_size = x.shape
    num_groups, state_size = b.shape[1:]
    num_seqs = cu_seqlens.shape[0] - 1
    x, b, c = (v if v.stride(2) == 1 else v.contiguous() for v in (x, b, c))
    dt = dt if dt.stride(1) == 1 else dt.contiguous()
    a = a.contiguous()
    cu_seqlens = cu_seqlens.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = None
    if return_final_states:
        final = torch.empty(num_seqs, num_heads, head_size, state_size, device=x.device)
    if num_seqs == 0 or y.shape[1] * head_size * state_size == 0:
        return y, final
    # By dtype only: if it depended on the lengths, the last bits of a sequence would depend on its batch.
    tile = tile_options(x.dtype, head_size, state_size, chunk_size or MAX_CHUNK_SIZE)
    size: int = tile["SIZE"]
    num_chunks = num_rows // size + num_seqs
    has_states = initial_states is not None or max(seq_lens, default=0) > size
    sizes = (num_seqs, num_heads, num_heads // num_groups, head_size, state_size)
    strides = (x.stride(0), x.stride(1), dt.stride(0), b.stride(0), b.stride(1))
    # The kernels do not read unused pointers; pass any tensor.
    states = dt
    with on_device(x):
        if has_states or final is not None:
            states = torch.empty(num_chunks, num_heads, head_size, state_size, device=x.device)
            chunk_decay = torch.empty(num_chunks, num_heads, device=x.device)
            blocks = triton.cdiv(head_size, tile["BLOCK_P"]) * triton.cdiv(state_size, tile["BLOCK_S"])
            _chunk_states_kernel[(num_chunks, num_heads, blocks)](
                x, dt, a, b, cu_seqlens, states, chunk_decay, *strides, *sizes, WANTS_FINAL=return_final_states, **tile
            )
            _pass_states_kernel[(num_seqs, num_heads, triton.cdiv(head_size * state_size, BLOCK_STATES))](
                states,
                chunk_decay,
                cu_seqlens,
                dt if initial_states is None else initial_states.contiguous(),
                dt if final is None else final,
                num_heads,
                head_size * state_size,
                HAS_INITIAL=initial_states is not None,
                WANTS_FINAL=return_final_states,
                SIZE=size,
                BLOCK=BLOCK_STATES,
            )
        _rows_kernel[(num_chunks, num_heads, triton.cdiv(head_size, tile["BLOCK_P"]))](
            x,
            dt,
            a,
            b,
            c,
            dt if d is None else d.contiguous(),
            cu_seqlens,
            states,
            y,
            *strides,
            c.stride(0),
            c.stride(1),
            *sizes,
            HAS_D=d is not None,
            HAS_STATES=has_states,
            **tile,
        )
    return y, final


def tile_options(dtype: torch.dtype, head_size: int, state_size: int, chunk_size: int) -> dict[str, Any]:
    """Launch options of the kernels with products.

    float16 is multiplied as tf32, which has the same precision and does not overflow. float32 is multiplied exactly,
    without tensor cores, which needs more registers.
    """
    precision = {torch.float32: "ieee", torch.float16: "tf32", torch.bfloat16: "bf16"}[dtype]
    is_exact = precision == "ieee"
    size = min(chunk_size, MAX_EXACT_CHUNK_SIZE if is_exact else MAX_CHUNK_SIZE)
    is_large = size > MAX_EXACT_CHUNK_SIZE
    return {
        "LOG2_E": math.log2(math.e),
        "PRECISION": precision,
        "SIZE": size,
        "BLOCK_P": min(32 if is_exact else 64, max(16, triton.next_power_of_2(head_size))),
        "BLOCK_S": min(32 if is_exact or is_large else 64, max(16, triton.next_power_of_2(state_size))),
        "num_warps": 8 if is_exact or is_large else 4,
    }
