"""Flash attention in triton over packed rows or a paged cache. CUDA.

One program computes `BLOCK_M` rows of one sequence and one key head. Query heads that share a key head are rows of the
same tile (row r is token r // GROUP_SIZE, head r % GROUP_SIZE), so that a chunk of a few tokens fills a tile. The
program reads keys in tiles of `BLOCK_N` with the running maximum and sum of Dao, "FlashAttention-2" (2023). It reads
full tiles (all rows attend to all keys) first, without masks, then border tiles.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._tiles_triton import find_tile
from ..backends import capability_of, on_device
from . import MAX_HEAD_SIZE

LOG2_E = math.log2(math.e)
SHORT_ROWS = 64


class Tile(NamedTuple):
    """Tile sizes and launch options of a program. `max_registers` is per thread; None leaves it to ptxas."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


# Tiles by head size, rounded up to a power of two. A fixed table avoids autotuning while requests run.
# A warp group of Hopper (4 warps) multiplies 64 rows at once: 64 rows need 4 warps and 128 rows 8. Larger tiles read
# keys and values less often and need more registers. For the shapes of known models none spills on sm_80 and sm_90;
# test_compiled.py compiles a selection.

# float32, without tensor cores. Without a register limit ptxas uses 72 or 80 registers and spills.
_EXACT = {
    16: Tile(32, 32, 4, 2, 128),
    32: Tile(32, 32, 4, 2, 128),
    64: Tile(32, 32, 8, 2),
    128: Tile(16, 16, 4, 2, 128),
    256: Tile(16, 16, 4, 2),
}
# 16 bits; 16 bits with the shared memory of Hopper.
_HALF = {
    16: Tile(128, 32, 8, 2),
    32: Tile(128, 32, 8, 2),
    64: Tile(128, 64, 8, 2),
    128: Tile(128, 32, 8, 2),
    256: Tile(64, 32, 8, 2),
}
_HALF_ON_HOPPER = {
    16: Tile(128, 64, 8, 3),
    32: Tile(128, 64, 8, 3),
    64: Tile(128, 64, 8, 3),
    128: Tile(128, 64, 8, 3),
    256: Tile(128, 32, 8, 2),
}
# With a bias or a cap, which need further registers.
_LOADED = _HALF | {64: Tile(128, 32, 8, 2), 128: Tile(64, 64, 8, 2)}
_LOADED_ON_HOPPER = _HALF | {64: Tile(128, 32, 8, 2)}


def padded_head(head_size: int) -> int:
    """Head size rounded up to a power of two, at least 16."""
    return max(16, 1 << (head_size - 1).bit_length())


def tile_of(
    dtype: torch.dtype, head_size: int, capability: tuple[int, int], *, num_rows: int, is_loaded: bool = False
) -> Tile:
    """Returns the tile for a call.

    Args:
        dtype: Dtype of q, k and v.
        head_size: K, at most MAX_HEAD_SIZE.
        capability: Compute capability of the device.
        num_rows: Tokens of the longest sequence times the query heads per key head.
        is_loaded: Whether the scores have a bias or a cap.
    """
    width = padded_head(head_size)
    if dtype == torch.float32:
        return _EXACT[width]
    # Some devices of capability 12.0 and later have as little shared memory as 8.6.
    if (9, 0) <= capability < (12, 0):
        tile = (_LOADED_ON_HOPPER if is_loaded else _HALF_ON_HOPPER)[width]
    else:
        tile = (_LOADED if is_loaded else _HALF)[width]
    if num_rows > SHORT_ROWS:
        return tile
    if width == MAX_HEAD_SIZE:
        return _HALF[width]
    block_n = 32 if is_loaded else tile.block_n
    # Width 128: without a limit ptxas uses 168 registers on sm_80 and spills.
    return Tile(SHORT_ROWS, block_n, 4, tile.num_stages, 255 if width == 128 else None)


@triton.jit
def _load_tile(addresses, is_key, d, IS_BORDER: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Loads a tile [BLOCK_N, BLOCK_K] of keys or values, with zeros past the head and, if IS_BORDER, past the end."""
    if IS_BORDER:
        tile = tl.load(addresses, mask=is_key[:, None] & (d < HEAD_SIZE)[None, :], other=0.0)
    elif HEAD_SIZE == BLOCK_K:
        tile = tl.load(addresses)
    else:
        tile = tl.load(addresses, mask=(d < HEAD_SIZE)[None, :], other=0.0)
    return tile


@triton.jit
def add_tile(
    q,
    maximum,
    total,
    rows,
    k_ptr,
    v_ptr,
    stride_k_row,
    stride_v_row,
    start,
    table,
    bias_ptr,
    bias_rows,
    position,
    first_key,
    end,
    left,
    right,
    scale,
    cap,
    IS_BORDER: tl.constexpr,
    IS_PAGED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LOG2_E: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Adds the tile of keys from `first_key` on to the running softmax, and returns the new (maximum, total, rows).

    Inputs:
        q: [BLOCK_M, BLOCK_K], queries.
        maximum, total, rows: Largest score, sum of weights [BLOCK_M] and weighted values [BLOCK_M, BLOCK_K] so far.
        k_ptr, v_ptr, stride_k_row, stride_v_row: Keys and values of one head.
        start: First row of the sequence. Not read if IS_PAGED.
        table: Block table of the sequence. Read only if IS_PAGED.
        bias_rows: [BLOCK_M], address of the bias of key 0 for each query. Read only if HAS_BIAS.
        position: [BLOCK_M], position of each query in its sequence.
        end: End of the keys that the tile of queries attends to.
        left, right: Sizes of the window. Read only if HAS_LEFT, HAS_RIGHT and IS_BORDER.
        scale, cap: As for `_attention_kernel`.
        IS_BORDER: Some queries do not attend to all keys of the tile.
    """
    j = first_key + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_K)
    is_key = j < end
    if IS_PAGED:
        if IS_BORDER:
            block = tl.load(table + j // BLOCK_SIZE, mask=is_key, other=0)
        else:
            block = tl.load(table + j // BLOCK_SIZE)
        slot = block.to(tl.int64) * BLOCK_SIZE + j % BLOCK_SIZE
    else:
        slot = (start + j).to(tl.int64)
    k_addresses = k_ptr + (slot * stride_k_row)[:, None] + d[None, :]
    v_addresses = v_ptr + (slot * stride_v_row)[:, None] + d[None, :]
    k = _load_tile(k_addresses, is_key, d, IS_BORDER, HEAD_SIZE, BLOCK_K)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    # Without cap and bias the scale is applied in the exponent.
    factor = scale
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); scores arrive divided by the cap, times 2 log2(e).
        scores = cap - 2.0 * cap / (tl.exp2(scores * scale) + 1.0)
        factor = 1.0
    if HAS_BIAS:
        if IS_BORDER:
            bias = tl.load(bias_ptr + (bias_rows[:, None] + j[None, :]), mask=is_key[None, :], other=0.0)
        else:
            bias = tl.load(bias_ptr + (bias_rows[:, None] + j[None, :]))
        scores = scores * factor + bias.to(tl.float32) * LOG2_E
        factor = 1.0
    if IS_BORDER:
        is_seen = is_key[None, :]
        if HAS_LEFT:
            is_seen = is_seen & (j[None, :] >= position[:, None] - left)
        if HAS_RIGHT:
            is_seen = is_seen & (j[None, :] <= position[:, None] + right)
        scores = tl.where(is_seen, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * factor)
    shift = new_maximum
    if IS_BORDER or HAS_BIAS:
        # Avoids inf - inf for rows without a visible key so far.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores * factor - shift[:, None])
    shrink = tl.exp2(maximum - shift)
    total = total * shrink + tl.sum(weights, 1)
    v = _load_tile(v_addresses, is_key, d, IS_BORDER, HEAD_SIZE, BLOCK_K)
    rows = tl.dot(weights.to(v.dtype), v, rows * shrink[:, None], input_precision="ieee")
    return new_maximum, total, rows


@triton.jit
def _key_ranges(
    first_position,
    last_position,
    num_keys,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Returns (first, unmasked, unmasked_end, end) for the queries from `first_position` to `last_position`.

    At least one query sees the keys from `first` to `end`. All queries see those from `unmasked` to `unmasked_end`,
    which are full tiles.
    """
    first = 0
    unmasked = 0
    if HAS_LEFT:
        first = tl.maximum(first_position - left, 0) // BLOCK_N * BLOCK_N
        unmasked = tl.cdiv(tl.maximum(last_position - left, 0), BLOCK_N) * BLOCK_N
    end = num_keys
    unmasked_end = num_keys // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        end = tl.minimum(last_position + right + 1, num_keys)
        unmasked_end = tl.minimum(first_position + right + 1, num_keys) // BLOCK_N * BLOCK_N
    return first, unmasked, tl.maximum(unmasked, unmasked_end), end


@triton.jit(
    do_not_specialize=[
        *("cu_seqlens_ptr", "context_lens_ptr", "block_tables_ptr"),
        *("stride_table", "num_seqs", "left", "right"),
    ]
)
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    bias_ptr,
    cu_seqlens_ptr,
    context_lens_ptr,
    block_tables_ptr,
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_out_row,
    stride_bias_head,
    stride_table,
    num_seqs,
    num_kv_heads,
    left,
    right,
    scale,
    cap,
    IS_PAGED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LOG2_E: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes out[rows] = softmax(scores) v for one tile of rows and one key head.

    Inputs:
        q_ptr, k_ptr, v_ptr, out_ptr: As in `attention`, or k and v as in `attention_paged` if IS_PAGED.
        bias_ptr: Bias of distance 0, [H, distances]. Read only if HAS_BIAS.
        cu_seqlens_ptr: [num_seqs + 1], first row of each sequence or chunk.
        context_lens_ptr, block_tables_ptr: As in `attention_paged`. Read only if IS_PAGED.
        left, right: Sizes of the window. Read only if HAS_LEFT and HAS_RIGHT.
        scale: Factor of the scores times log2(e). With HAS_CAP: 2 log2(e) times this factor, divided by the cap.
        cap: Cap of the scores times log2(e). Read only if HAS_CAP.
        GROUP_SIZE: Query heads per key head.
        BLOCK_SIZE: Tokens per block of the cache.
        BLOCK_M, BLOCK_N, BLOCK_K: Rows, keys and padded head size of a tile.
    """
    # Longest work first: batches are sorted by length, and the last rows of a causal sequence have the most keys.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = program // num_kv_heads
    kv_head = program % num_kv_heads
    n, first_row, tile_row, end_row = find_tile(cu_seqlens_ptr, tile, num_seqs, BLOCK_M, GROUP_SIZE)
    if tile_row < end_row:
        start = first_row // GROUP_SIZE
        num_rows = end_row - first_row
        offset = tile_row - first_row
        context_len = 0
        table = block_tables_ptr
        if IS_PAGED:
            context_len = tl.load(context_lens_ptr + n)
            table += n.to(tl.int64) * stride_table
        num_keys = context_len + num_rows // GROUP_SIZE

        r = offset + tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_K)
        # Rows past the end repeat the last row, so that every row has a visible key.
        token = tl.minimum(r, num_rows - 1) // GROUP_SIZE
        position = context_len + token
        head = kv_head * GROUP_SIZE + r % GROUP_SIZE
        row = (start + token).to(tl.int64)
        q_addresses = q_ptr + (row * stride_q_row + head * stride_q_head)[:, None] + d[None, :]
        q = tl.load(q_addresses, mask=(r < num_rows)[:, None] & (d < HEAD_SIZE)[None, :], other=0.0)
        # In 32 bits, which saves registers: the bias has fewer than 2^31 elements.
        bias_rows = head * stride_bias_head - position
        k_head_ptr = k_ptr + kv_head * stride_k_head
        v_head_ptr = v_ptr + kv_head * stride_v_head

        first_position = context_len + offset // GROUP_SIZE
        last_position = context_len + (tl.minimum(offset + BLOCK_M, num_rows) - 1) // GROUP_SIZE
        first, unmasked, unmasked_end, end = _key_ranges(
            first_position, last_position, num_keys, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N
        )
        maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        rows = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        # The loop is unrolled: pass 0 adds the full tiles, pass 1 the border tiles on both sides of them. Both passes
        # share one call of add_tile, which is compiled without masks for the full tiles.
        for IS_BORDER in tl.static_range(2):
            begin = unmasked
            stop = unmasked_end
            if IS_BORDER:
                num_left = (unmasked - first) // BLOCK_N
                begin = 0
                stop = num_left + tl.cdiv(tl.maximum(end - unmasked_end, 0), BLOCK_N)
            # The first key of a full tile, or the index of a border tile.
            for tile_index in range(begin, stop, 1 if IS_BORDER else BLOCK_N):
                first_key = tile_index
                if IS_BORDER:
                    first_key = tl.where(
                        tile_index < num_left,
                        first + tile_index * BLOCK_N,
                        unmasked_end + (tile_index - num_left) * BLOCK_N,
                    )
                maximum, total, rows = add_tile(
                    q,
                    maximum,
                    total,
                    rows,
                    k_head_ptr,
                    v_head_ptr,
                    stride_k_row,
                    stride_v_row,
                    start,
                    table,
                    bias_ptr,
                    bias_rows,
                    position,
                    first_key,
                    end,
                    left,
                    right,
                    scale,
                    cap,
                    IS_BORDER,
                    IS_PAGED,
                    HAS_LEFT,
                    HAS_RIGHT,
                    HAS_CAP,
                    HAS_BIAS,
                    LOG2_E,
                    BLOCK_SIZE,
                    HEAD_SIZE,
                    BLOCK_N,
                    BLOCK_K,
                )

        rows = rows / total[:, None]
        # Recompute the addresses from values that are loaded again: live during the loops, they would cost registers.
        start = tl.load(cu_seqlens_ptr + n, volatile=True)
        num_rows = (tl.load(cu_seqlens_ptr + n + 1, volatile=True) - start) * GROUP_SIZE
        r = tile_row - start * GROUP_SIZE + tl.arange(0, BLOCK_M)
        row = (start + r // GROUP_SIZE).to(tl.int64)
        head = kv_head * GROUP_SIZE + r % GROUP_SIZE
        address = out_ptr + (row * stride_out_row + head * HEAD_SIZE)[:, None] + d[None, :]
        mask = (r < num_rows)[:, None] & (d < HEAD_SIZE)[None, :]
        tl.store(address, rows.to(out_ptr.dtype.element_ty), mask=mask)


def attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    reach: tuple[int, int],
    softcap: float | None,
    relative_bias: Tensor | None = None,
    block_tables: Tensor | None = None,
    context_lens: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Same as `attention`. With `block_tables`, k and v are caches: same as `attention_paged`.

    `tile` replaces the tile of the table. The last axes of q, k, v and the bias must be contiguous, the scale positive.
    """
    num_rows, _, head_size = q.shape
    if head_size > MAX_HEAD_SIZE:
        raise ValueError(f"the triton backend supports head sizes of at most {MAX_HEAD_SIZE}, got {head_size}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_seqs = cu_seqlens.shape[0] - 1
    # [slots, Hkv, K]; for a cache a view.
    k3, v3 = (x if block_tables is None else x.flatten(0, 1) for x in (k, v))
    num_kv_heads = k3.shape[1]
    group_size = q.shape[1] // num_kv_heads
    if tile is None:
        is_loaded = relative_bias is not None or softcap is not None
        tile = tile_of(
            q.dtype, head_size, capability_of(q.device), num_rows=max_seqlen * group_size, is_loaded=is_loaded
        )
    # The kernel does not read unused arguments; pass any tensor.
    tables = cu_seqlens if block_tables is None else block_tables
    contexts = cu_seqlens if context_lens is None else context_lens
    # Column 0 of this view is the bias of a token and itself.
    bias = q if relative_bias is None else relative_bias[:, relative_bias.shape[1] // 2 :]
    factor = scale * LOG2_E if softcap is None else 2.0 * scale / softcap * LOG2_E
    with on_device(q):
        _attention_kernel[((num_rows * group_size // tile.block_m + num_seqs) * num_kv_heads,)](
            q,
            k3,
            v3,
            out,
            bias,
            cu_seqlens.contiguous(),
            contexts,
            tables,
            q.stride(0),
            q.stride(1),
            k3.stride(0),
            k3.stride(1),
            v3.stride(0),
            v3.stride(1),
            out.stride(0),
            bias.stride(0),
            tables.stride(0),
            num_seqs,
            num_kv_heads,
            reach[0],
            reach[1],
            factor,
            0.0 if softcap is None else softcap * LOG2_E,
            IS_PAGED=block_tables is not None,
            HAS_LEFT=reach[0] >= 0,
            HAS_RIGHT=reach[1] >= 0,
            HAS_CAP=softcap is not None,
            HAS_BIAS=relative_bias is not None,
            LOG2_E=LOG2_E,
            GROUP_SIZE=group_size,
            BLOCK_SIZE=1 if block_tables is None else k.shape[1],
            HEAD_SIZE=head_size,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=padded_head(head_size),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            maxnreg=tile.max_registers,
        )
    return out
