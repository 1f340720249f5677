"""Norm, rotation and storing on CUDA: one program reads some heads of one token, and writes them where they go."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..backends import on_device
from . import HeadNorm, KvSlots

# Elements that a program holds.
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
    num_turned_heads,
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
    """Heads in pieces: the first of each pair of columns, the second, and, with BLOCK_REST, the other columns."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    slot = token
    if HAS_STORE:
        slot = tl.load(slots_ptr + token)
    is_turned = heads < num_turned_heads
    # Heads of v are read only where they are stored.
    is_read = is_turned
    if HAS_STORE:
        is_read = is_turned | ((heads < num_heads) & (slot >= 0))
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
        mask_weight = is_turned[:, None] & is_pair[None, :]
        weights = weight_ptr + heads[:, None] * HEAD_SIZE + pairs[None, :]
        first = first * scale * tl.load(weights, mask=mask_weight, other=0.0)
        second = second * scale * tl.load(weights + NUM_PAIRS, mask=mask_weight, other=0.0)
        if BLOCK_REST > 0:
            rest_weights = weight_ptr + heads[:, None] * HEAD_SIZE + columns[None, :]
            rest = rest * scale * tl.load(rest_weights, mask=is_turned[:, None] & is_rest[None, :], other=0.0)
    cos = tl.load(cos_ptr + token * stride_angles + pairs, mask=is_pair, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * stride_angles + pairs, mask=is_pair, other=0.0)[None, :]
    turned_a = (first * cos - second * sin).to(a.dtype)
    turned_b = (second * cos + first * sin).to(b.dtype)
    mask_turned = is_turned[:, None] & is_pair[None, :]
    tl.store(addresses, turned_a, mask=mask_turned)
    tl.store(addresses + NUM_PAIRS, turned_b, mask=mask_turned)
    if BLOCK_REST > 0 and HAS_NORM:
        c = tl.where(is_turned[:, None], rest.to(c.dtype), c)
        tl.store(rest_addresses, c, mask=is_turned[:, None] & is_rest[None, :])
    if HAS_STORE:
        is_value = heads >= num_turned_heads
        is_key = is_turned & (heads >= num_turned_heads - num_kv_heads)
        kept = (is_key | (is_value & (heads < num_heads))) & (slot >= 0)
        # Keys lie in one cache and values in the other: a program may have heads of both.
        a = tl.where(is_value[:, None], a, turned_a)
        b = tl.where(is_value[:, None], b, turned_b)
        key_row = slot * num_kv_heads + heads - (num_turned_heads - num_kv_heads)
        value_row = slot * num_kv_heads + heads - num_turned_heads
        keys = k_cache_ptr + key_row[:, None] * HEAD_SIZE
        values = v_cache_ptr + value_row[:, None] * HEAD_SIZE
        mask_key = (kept & is_key)[:, None]
        mask_value = (kept & is_value)[:, None]
        tl.store(keys + pairs[None, :], a, mask=mask_key & is_pair[None, :])
        tl.store(keys + NUM_PAIRS + pairs[None, :], b, mask=mask_key & is_pair[None, :])
        tl.store(values + pairs[None, :], a, mask=mask_value & is_pair[None, :])
        tl.store(values + NUM_PAIRS + pairs[None, :], b, mask=mask_value & is_pair[None, :])
        if BLOCK_REST > 0:
            tl.store(keys + columns[None, :], c, mask=mask_key & is_rest[None, :])
            tl.store(values + columns[None, :], c, mask=mask_value & is_rest[None, :])


def rotary_triton(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_turned: int, norm: HeadNorm | None, store: KvSlots | None
) -> None:
    """Same as `rotary`; does not synchronise host and device."""
    num_rows, num_heads, head_size = qkv.shape
    num_pairs = cos.shape[1]
    tile = tile_options(num_heads if store is not None else num_turned, head_size, num_pairs)
    grid = (num_rows, triton.cdiv(num_heads if store is not None else num_turned, tile["BLOCK_HEADS"]))
    with on_device(qkv):
        # Pointers that a call does not need are never read; any tensor stands in for them.
        _rotary_kernel[grid](
            qkv,
            cos,
            sin,
            cos if norm is None else norm.weight,
            qkv if store is None else store.k_cache,
            qkv if store is None else store.v_cache,
            qkv if store is None else store.slots,
            qkv.stride(0),
            cos.stride(0),
            num_heads,
            num_turned,
            num_heads - num_turned,
            0.0 if norm is None else norm.eps,
            HAS_NORM=norm is not None,
            HAS_STORE=store is not None,
            HEAD_SIZE=head_size,
            NUM_PAIRS=num_pairs,
            **tile,
        )


def tile_options(num_heads: int, head_size: int, num_pairs: int) -> dict[str, Any]:
    """Launch options by the heads that are read, their size and the pairs of columns that turn.

    NOTE: without `maxnreg` ptxas spills a register to get by with 56 in float32, where part of a normed head turns.
    """
    rest = head_size - 2 * num_pairs
    block_pairs = triton.next_power_of_2(num_pairs)
    block_rest = triton.next_power_of_2(rest) if rest else 0
    block_heads = max(1, BLOCK_SIZE // (2 * block_pairs + block_rest))
    # A power of two, as the width of a tile has to be.
    block_heads = 1 << (block_heads.bit_length() - 1)
    return {
        "BLOCK_HEADS": min(block_heads, triton.next_power_of_2(num_heads)),
        "BLOCK_PAIRS": block_pairs,
        "BLOCK_REST": block_rest,
        "num_warps": 4,
        "maxnreg": 128,
    }
