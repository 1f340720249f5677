"""Head norm, rotary embedding and KV cache write on CUDA: one program per block of heads of one token."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..backends import on_device
from . import HeadNorm, KvDestination

# Elements per program.
BLOCK_SIZE = 2048


@triton.jit(do_not_specialize=["slots_ptr"])
def _rotary_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    stride_row,
    stride_angles,
    num_heads,
    num_rotated_heads,
    num_kv_heads,
    eps,
    HAS_NORM: tl.constexpr,
    HAS_STORE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Reads a head in parts: first and second columns of the pairs and, with BLOCK_REST, the other columns."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    slot = token
    if HAS_STORE:
        slot = tl.load(slots_ptr + token)
    is_rotated = heads < num_rotated_heads
    # Heads of v are read only if they are stored.
    is_read = is_rotated
    if HAS_STORE:
        is_read = is_rotated | ((heads < num_heads) & (slot >= 0))
    pairs = tl.arange(0, BLOCK_PAIRS)
    is_pair = pairs < NUM_PAIRS
    mask = is_read[:, None] & is_pair[None, :]
    addresses = qkv_ptr + token * stride_row + heads[:, None] * HEAD_SIZE + pairs[None, :]
    a = tl.load(addresses, mask=mask, other=0.0)
    b = tl.load(addresses + NUM_PAIRS, mask=mask, other=0.0)
    first = a.to(tl.float32)
    second = b.to(tl.float32)
    if BLOCK_REST > 0:
        columns = 2 * NUM_PAIRS + tl.arange(0, BLOCK_REST)
        is_rest = columns < HEAD_SIZE
        mask_rest = is_read[:, None] & is_rest[None, :]
        rest_addresses = qkv_ptr + token * stride_row + heads[:, None] * HEAD_SIZE + columns[None, :]
        c = tl.load(rest_addresses, mask=mask_rest, other=0.0)
        rest = c.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, 1)
        if BLOCK_REST > 0:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / HEAD_SIZE + eps)[:, None]
        mask_weight = is_rotated[:, None] & is_pair[None, :]
        weights = weight_ptr + heads[:, None] * HEAD_SIZE + pairs[None, :]
        first = first * scale * tl.load(weights, mask=mask_weight, other=0.0)
        second = second * scale * tl.load(weights + NUM_PAIRS, mask=mask_weight, other=0.0)
        if BLOCK_REST > 0:
            rest_weights = weight_ptr + heads[:, None] * HEAD_SIZE + columns[None, :]
            rest = rest * scale * tl.load(rest_weights, mask=is_rotated[:, None] & is_rest[None, :], other=0.0)
    cos = tl.load(cos_ptr + token * stride_angles + pairs, mask=is_pair, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * stride_angles + pairs, mask=is_pair, other=0.0)[None, :]
    rotated_a = (first * cos - second * sin).to(a.dtype)
    rotated_b = (second * cos + first * sin).to(b.dtype)
    mask_rotated = is_rotated[:, None] & is_pair[None, :]
    tl.store(addresses, rotated_a, mask=mask_rotated)
    tl.store(addresses + NUM_PAIRS, rotated_b, mask=mask_rotated)
    if BLOCK_REST > 0 and HAS_NORM:
        c = tl.where(is_rotated[:, None], rest.to(c.dtype), c)
        tl.store(rest_addresses, c, mask=is_rotated[:, None] & is_rest[None, :])
    if HAS_STORE:
        is_value = heads >= num_rotated_heads
        is_key = is_rotated & (heads >= num_rotated_heads - num_kv_heads)
        is_stored = (is_key | (is_value & (heads < num_heads))) & (slot >= 0)
        # A program may have heads of both k and v, which go to different caches.
        a = tl.where(is_value[:, None], a, rotated_a)
        b = tl.where(is_value[:, None], b, rotated_b)
        key_row = slot * num_kv_heads + heads - (num_rotated_heads - num_kv_heads)
        value_row = slot * num_kv_heads + heads - num_rotated_heads
        keys = k_cache_ptr + key_row[:, None] * HEAD_SIZE
        values = v_cache_ptr + value_row[:, None] * HEAD_SIZE
        mask_key = (is_stored & is_key)[:, None]
        mask_value = (is_stored & is_value)[:, None]
        tl.store(keys + pairs[None, :], a, mask=mask_key & is_pair[None, :])
        tl.store(keys + NUM_PAIRS + pairs[None, :], b, mask=mask_key & is_pair[None, :])
        tl.store(values + pairs[None, :], a, mask=mask_value & is_pair[None, :])
        tl.store(values + NUM_PAIRS + pairs[None, :], b, mask=mask_value & is_pair[None, :])
        if BLOCK_REST > 0:
            tl.store(keys + columns[None, :], c, mask=mask_key & is_rest[None, :])
            tl.store(values + columns[None, :], c, mask=mask_value & is_rest[None, :])


def rotary_triton(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_rotated: int, norm: HeadNorm | None, store: KvDestination | None
) -> None:
    """Same as `rotary`. Does not synchronise host and device."""
    num_rows, num_heads, head_size = qkv.shape
    num_pairs = cos.shape[1]
    tile = tile_options(num_heads if store is not None else num_rotated, head_size, num_pairs)
    grid = (num_rows, triton.cdiv(num_heads if store is not None else num_rotated, tile["BLOCK_HEADS"]))
    with on_device(qkv):
        # The kernel does not use the pointers of absent arguments; pass any tensor.
        _rotary_kernel[grid](
            qkv,
            cos,
            sin,
            cos if norm is None else norm.weight,
            qkv if store is None else store.k_cache,
            qkv if store is None else store.v_cache,
            qkv if store is None else store.slot_mapping,
            qkv.stride(0),
            cos.stride(0),
            num_heads,
            num_rotated,
            num_heads - num_rotated,
            0.0 if norm is None else norm.eps,
            HAS_NORM=norm is not None,
            HAS_STORE=store is not None,
            HEAD_SIZE=head_size,
            NUM_PAIRS=num_pairs,
            **tile,
        )


def tile_options(num_heads: int, head_size: int, num_pairs: int) -> dict[str, Any]:
    """Launch options for the number of heads to read, the head size and the number of rotated pairs of columns.

    Without `maxnreg` ptxas uses 56 registers and spills one, in float32 if a norm and a partial rotation are combined.
    """
    rest = head_size - 2 * num_pairs
    block_pairs = triton.next_power_of_2(num_pairs)
    block_rest = triton.next_power_of_2(rest) if rest else 0
    block_heads = max(1, BLOCK_SIZE // (2 * block_pairs + block_rest))
    # Tile sizes must be powers of two.
    block_heads = 1 << (block_heads.bit_length() - 1)
    return {
        "BLOCK_HEADS": min(block_heads, triton.next_power_of_2(num_heads)),
        "BLOCK_PAIRS": block_pairs,
        "BLOCK_REST": block_rest,
        "num_warps": 4,
        "maxnreg": 128,
    }
