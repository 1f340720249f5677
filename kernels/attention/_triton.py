"""Flash attention in triton: over packed rows, or over a paged cache. CUDA.

One program owns `BLOCK_M` rows of one sequence and one key head. The query heads that share the key head are rows too
(row r is token r // GROUP_SIZE, head r % GROUP_SIZE), so that a chunk of a few tokens still fills a tile. It walks the
keys that its rows see, `BLOCK_N` at a time, with the running maximum and sum of Dao, "FlashAttention-2" (2023): first
the tiles that all of its rows see whole, without masks, then those at a border.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._packed import capability_of, on_device
from .._tiles_triton import find_tile
from ._softmax_triton import add_tile
from ._tiles import MAX_HEAD_SIZE, Tile, padded_head, tile_of

LOG2_E = math.log2(math.e)


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
    stride_bias_row,
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
    """out[rows] = softmax(scores) v. `scale` and `cap` are times log2(e); `left` and `right` are the reach."""
    # Batches ascend in length, and the last rows of a causal sequence see most: the longest work begins first.
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
        # Rows past the end repeat the last, so that no row sees nothing.
        token = tl.minimum(r, num_rows - 1) // GROUP_SIZE
        position = context_len + token
        head = kv_head * GROUP_SIZE + r % GROUP_SIZE
        row = (start + token).to(tl.int64)
        q_addresses = q_ptr + (row * stride_q_row + head * stride_q_head)[:, None] + d[None, :]
        q = tl.load(q_addresses, mask=(r < num_rows)[:, None] & (d < HEAD_SIZE)[None, :], other=0.0)
        bias_rows = bias_ptr + head.to(tl.int64) * stride_bias_head + position.to(tl.int64) * stride_bias_row
        k_head_ptr = k_ptr + kv_head * stride_k_head
        v_head_ptr = v_ptr + kv_head * stride_v_head

        # Some row of the tile sees the keys from `first` to `end`; all rows see those from `whole` to `whole_end`.
        first_position = context_len + offset // GROUP_SIZE
        last_position = context_len + (tl.minimum(offset + BLOCK_M, num_rows) - 1) // GROUP_SIZE
        first = 0
        whole = 0
        if HAS_LEFT:
            first = tl.maximum(first_position - left, 0) // BLOCK_N * BLOCK_N
            whole = tl.cdiv(tl.maximum(last_position - left, 0), BLOCK_N) * BLOCK_N
        end = num_keys
        whole_end = num_keys // BLOCK_N * BLOCK_N
        if HAS_RIGHT:
            end = tl.minimum(last_position + right + 1, num_keys)
            whole_end = tl.minimum(first_position + right + 1, num_keys) // BLOCK_N * BLOCK_N
        whole_end = tl.maximum(whole, whole_end)

        maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        rows = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        # First the tiles that all rows see whole: t is their first key. Then those at a border: t counts them.
        for IS_BORDER in tl.static_range(2):
            begin = whole
            stop = whole_end
            if IS_BORDER:
                num_left = (whole - first) // BLOCK_N
                begin = 0
                stop = num_left + tl.cdiv(tl.maximum(end - whole_end, 0), BLOCK_N)
            for t in range(begin, stop, 1 if IS_BORDER else BLOCK_N):
                j0 = t
                if IS_BORDER:
                    j0 = tl.where(t < num_left, first + t * BLOCK_N, whole_end + (t - num_left) * BLOCK_N)
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
                    bias_rows,
                    position,
                    j0,
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
        # The addresses are computed again from values that are read again: kept since the beginning, they would take
        # registers from the loops.
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
    """Same as `attention`; with `block_tables`, k and v are caches: same as `attention_paged`.

    `tile` is that of the table unless given. The last axes of q, k, v and the bias are contiguous, the scale positive.
    """
    num_rows, _, head_size = q.shape
    if head_size > MAX_HEAD_SIZE:
        raise ValueError(f"the triton backend takes heads of at most {MAX_HEAD_SIZE}, got {head_size}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_seqs = cu_seqlens.shape[0] - 1
    # [slots, Hkv, K], a view of a cache.
    k3, v3 = (x if block_tables is None else x.flatten(0, 1) for x in (k, v))
    num_kv_heads = k3.shape[1]
    group_size = q.shape[1] // num_kv_heads
    if tile is None:
        is_loaded = relative_bias is not None or softcap is not None
        tile = tile_of(
            q.dtype, head_size, capability_of(q.device), num_rows=max_seqlen * group_size, is_loaded=is_loaded
        )
    # What a call does not need is never read; any tensor stands in for it.
    tables = cu_seqlens if block_tables is None else block_tables
    contexts = cu_seqlens if context_lens is None else context_lens
    bias = q if relative_bias is None else relative_bias
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
            bias.stride(1),
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
