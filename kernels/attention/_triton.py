"""Flash attention in triton: over a paged cache, or over packed rows where the scores are capped. CUDA.

One program owns `BLOCK_M` rows of one sequence and one key head. The query heads that share the key head are rows too
(row r is token r // GROUP_SIZE, head r % GROUP_SIZE), so that a chunk of a few tokens still fills a tile. It walks the
keys that its rows see, `BLOCK_N` at a time, with the running maximum and sum of Dao, "FlashAttention-2" (2023).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._packed import on_device

LOG2_E = math.log2(math.e)


@triton.jit(
    do_not_specialize=["cu_seqlens_ptr", "context_lens_ptr", "block_tables_ptr", "stride_table", "left", "right"]
)
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
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
    stride_table,
    head_size,
    left,
    right,
    scale,
    cap,
    IS_PAGED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[rows] = softmax(scores) v. `scale` and `cap` are times log2(e); `left` and `right` are the reach."""
    tile = tl.program_id(0)
    n = tl.program_id(1)
    kv_head = tl.program_id(2)
    start = tl.load(cu_seqlens_ptr + n)
    num_rows = (tl.load(cu_seqlens_ptr + n + 1) - start) * GROUP_SIZE
    if tile * BLOCK_M < num_rows:
        context_len = 0
        if IS_PAGED:
            context_len = tl.load(context_lens_ptr + n)
        num_keys = context_len + num_rows // GROUP_SIZE

        r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_K)
        is_row = r < num_rows
        token = r // GROUP_SIZE
        position = context_len + token
        # Rows past the end repeat the last, so that no row sees nothing.
        position = tl.minimum(position, num_keys - 1)
        head = kv_head * GROUP_SIZE + r % GROUP_SIZE
        row = (start + token).to(tl.int64)
        mask_q = is_row[:, None] & (d < head_size)[None, :]
        q = tl.load(q_ptr + (row * stride_q_row + head * stride_q_head)[:, None] + d[None, :], mask=mask_q, other=0.0)

        # The keys that some row of the tile sees.
        first = 0
        if HAS_LEFT:
            first = tl.maximum(context_len + tile * BLOCK_M // GROUP_SIZE - left, 0)
        end = num_keys
        if HAS_RIGHT:
            last_token = tl.minimum(tile * BLOCK_M + BLOCK_M, num_rows) - 1
            end = tl.minimum(context_len + last_token // GROUP_SIZE + right + 1, num_keys)

        maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        rows = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        for j0 in range(first // BLOCK_N * BLOCK_N, end, BLOCK_N):
            j = j0 + tl.arange(0, BLOCK_N)
            is_key = j < end
            if IS_PAGED:
                table = block_tables_ptr + n.to(tl.int64) * stride_table
                block = tl.load(table + j // BLOCK_SIZE, mask=is_key, other=0)
                slot = block.to(tl.int64) * BLOCK_SIZE + j % BLOCK_SIZE
            else:
                slot = (start + j).to(tl.int64)
            mask_k = is_key[:, None] & (d < head_size)[None, :]
            k = tl.load(
                k_ptr + (slot * stride_k_row + kv_head * stride_k_head)[:, None] + d[None, :], mask=mask_k, other=0.0
            )
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if HAS_CAP:
                # tanh(x) = 1 - 2 / (exp(2 x) + 1); scores arrive divided by the cap, times 2 log2(e).
                scores = cap - 2.0 * cap / (tl.exp2(scores) + 1.0)
            is_seen = is_key[None, :]
            if HAS_LEFT:
                is_seen = is_seen & (j[None, :] >= position[:, None] - left)
            if HAS_RIGHT:
                is_seen = is_seen & (j[None, :] <= position[:, None] + right)
            scores = tl.where(is_seen, scores, float("-inf"))

            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
            # A row that has seen nothing yet must not subtract infinities.
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.exp2(scores - shift[:, None])
            factor = tl.exp2(maximum - shift)
            total = total * factor + tl.sum(weights, 1)
            v = tl.load(
                v_ptr + (slot * stride_v_row + kv_head * stride_v_head)[:, None] + d[None, :], mask=mask_k, other=0.0
            )
            rows = rows * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            maximum = new_maximum

        rows = rows / total[:, None]
        address = out_ptr + (row * stride_out_row + head * head_size)[:, None] + d[None, :]
        tl.store(address, rows.to(out_ptr.dtype.element_ty), mask=mask_q)


def attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    reach: tuple[int, int],
    softcap: float | None,
    block_tables: Tensor | None = None,
    context_lens: Tensor | None = None,
) -> Tensor:
    """Same as `attention` without a bias; with `block_tables`, k and v are caches: same as `attention_paged`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_seqs = cu_seqlens.shape[0] - 1
    head_size = q.shape[2]
    # [slots, Hkv, K], a view of a cache.
    k3, v3 = (x if block_tables is None else x.flatten(0, 1) for x in (k, v))
    group_size = q.shape[1] // k3.shape[1]
    options = tile_options(head_size, q.dtype)
    # What a call without a cache passes is never read.
    tables = cu_seqlens if block_tables is None else block_tables
    contexts = cu_seqlens if context_lens is None else context_lens
    factor = scale * LOG2_E if softcap is None else 2.0 * scale / softcap * LOG2_E
    grid = (triton.cdiv(max_seqlen * group_size, options["BLOCK_M"]), num_seqs, k3.shape[1])
    with on_device(q):
        _attention_kernel[grid](
            q,
            k3,
            v3,
            out,
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
            tables.stride(0),
            head_size,
            reach[0],
            reach[1],
            factor,
            0.0 if softcap is None else softcap * LOG2_E,
            HAS_LEFT=reach[0] >= 0,
            HAS_RIGHT=reach[1] >= 0,
            IS_PAGED=block_tables is not None,
            HAS_CAP=softcap is not None,
            GROUP_SIZE=group_size,
            BLOCK_SIZE=1 if block_tables is None else k.shape[1],
            **options,
        )
    return out


def tile_options(head_size: int, dtype: torch.dtype) -> dict[str, int]:
    """Launch options: tiles as large as registers hold without spilling (test_attention_compiled.py)."""
    block_k = max(16, triton.next_power_of_2(head_size))
    if dtype == torch.float32:
        # Without tensor cores: small tiles.
        block_m, block_n = (32, 32) if block_k <= 128 else (16, 16)
    elif block_k <= 64:
        block_m, block_n = 128, 64
    else:
        block_m, block_n = 64, 64 if block_k <= 128 else 32
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": 8, "num_stages": 2}
