"""kv_store on CUDA: one program copies the key and the value of one token."""

import triton
import triton.language as tl
from torch import Tensor

from .._packed import on_device

# Bytes that a thread moves at once: the widest load there is.
BYTES_PER_THREAD = 16


@triton.jit(do_not_specialize=["rows_ptr", "slots_ptr"])
def _kv_store_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    rows_ptr,
    slots_ptr,
    stride_k_row,
    stride_v_row,
    width,
    HAS_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """cache[slots[s]] = x[rows[s]] for k and v."""
    s = tl.program_id(0).to(tl.int64)
    row = s
    if HAS_ROWS:
        row = tl.load(rows_ptr + s)
    slot = tl.load(slots_ptr + s)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < width
    key = tl.load(k_ptr + row * stride_k_row + columns, mask=mask)
    value = tl.load(v_ptr + row * stride_v_row + columns, mask=mask)
    tl.store(k_cache_ptr + slot * width + columns, key, mask=mask)
    tl.store(v_cache_ptr + slot * width + columns, value, mask=mask)


def kv_store_triton(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor | None, slots: Tensor) -> None:
    """Same as `kv_store`; does not synchronise host and device."""
    width = k.shape[1] * k.shape[2]
    with on_device(k):
        _kv_store_kernel[(slots.shape[0],)](
            k,
            v,
            k_cache,
            v_cache,
            # Without rows the pointer is never read; any tensor stands in for it.
            slots if rows is None else rows.contiguous(),
            slots.contiguous(),
            k.stride(0),
            v.stride(0),
            width,
            HAS_ROWS=rows is not None,
            **tile_options(width, k.element_size()),
        )


def tile_options(width: int, itemsize: int) -> dict[str, int]:
    """Launch options by elements of a row and their size in Bytes."""
    block_d = triton.next_power_of_2(width)
    num_warps = min(8, max(1, block_d * itemsize // (32 * BYTES_PER_THREAD)))
    return {"BLOCK_D": block_d, "num_warps": num_warps}
