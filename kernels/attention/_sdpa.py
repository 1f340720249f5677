"""Attention through torch's scaled_dot_product_attention (SDPA): any device, any dtype.

torch's flash kernel for CPUs needs memory for the rows only, but its masks are [rows, keys]. What needs a mask is
therefore computed in blocks of rows, over the keys that the block sees.

Shape letters besides those of the package: I rows, J keys of one sequence, G key heads.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_BLOCK_ROWS = 128
# Elements of a mask, or of scores.
MAX_BLOCK_SCORES = 1 << 22


def attention_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Sequence[int],
    scale: float,
    reach: tuple[int, int],
    relative_bias: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Same as `attention`; `reach` is the window with the causal limit in it, negative for no limit."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for length, num_seqs in _runs(seq_lens, may_share=softcap is None):
        rows = slice(start, start + num_seqs * length)
        q4, k4, v4, out4 = (x[rows].unflatten(0, (num_seqs, length)).transpose(1, 2) for x in (q, k, v, out))
        _attend(q4, k4, v4, out4, scale, reach, relative_bias, softcap)
        start = rows.stop
    return out


def attention_paged_sdpa(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
    left: int,
    softcap: float | None,
) -> Tensor:
    """Same as `attention_paged`; `left` is the reach of the window, negative for no limit."""
    block_size = k_cache.shape[1]
    tables_NM = block_tables.to(q.device, torch.int64)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for blocks_M, length, context_len in zip(tables_NM, seq_lens, context_lens, strict=True):
        rows, num_keys = slice(start, start + length), context_len + length
        if length:
            blocks = blocks_M[: -(-num_keys // block_size)]
            k, v = (cache.index_select(0, blocks).flatten(0, 1)[:num_keys] for cache in (k_cache, v_cache))
            q4, k4, v4, out4 = (x.transpose(0, 1)[None] for x in (q[rows], k, v, out[rows]))
            _attend(q4, k4, v4, out4, scale, (left, 0), None, softcap)
        start = rows.stop
    return out


def _runs(seq_lens: Sequence[int], *, may_share: bool) -> Iterator[tuple[int, int]]:
    """(length, number) of neighbours of equal length, without empty sequences."""
    if not may_share:
        yield from ((length, 1) for length in seq_lens if length)
        return
    for length, run in groupby(seq_lens):
        if length:
            yield length, sum(1 for _ in run)


def _attend(
    q_NHIK: Tensor,
    k_NGJK: Tensor,
    v_NGJK: Tensor,
    out_NHIK: Tensor,
    scale: float,
    reach: tuple[int, int],
    relative_bias: Tensor | None,
    softcap: float | None,
) -> None:
    """Attention of N sequences of one length; the rows are the last I of J tokens, all of them with a bias."""
    num_heads, num_rows = q_NHIK.shape[1:3]
    num_keys = k_NGJK.shape[2]
    past = num_keys - num_rows
    has_gqa = k_NGJK.shape[1] != num_heads
    is_causal = reach == (-1, 0) and past == 0
    if softcap is None and relative_bias is None and (is_causal or reach == (-1, -1)):
        out_NHIK.copy_(
            F.scaled_dot_product_attention(q_NHIK, k_NGJK, v_NGJK, is_causal=is_causal, scale=scale, enable_gqa=has_gqa)
        )
        return
    if softcap is not None and has_gqa:
        k_NGJK, v_NGJK = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k_NGJK, v_NGJK))
    left, right = reach
    num_masks = 1 if softcap is None and relative_bias is None else num_heads
    step = min(MAX_BLOCK_ROWS, max(1, MAX_BLOCK_SCORES // (num_masks * num_keys)))
    for start in range(0, num_rows, step):
        end = min(start + step, num_rows)
        first = max(0, past + start - left) if left >= 0 else 0
        last = min(num_keys, past + end + right) if right >= 0 else num_keys
        mask = _mask(range(past + start, past + end), range(first, last), reach, relative_bias, q_NHIK)
        rows, keys = (..., slice(start, end), slice(None)), (..., slice(first, last), slice(None))
        if softcap is None:
            block = F.scaled_dot_product_attention(
                q_NHIK[rows], k_NGJK[keys], v_NGJK[keys], attn_mask=mask, scale=scale, enable_gqa=has_gqa
            )
        else:
            block = _attend_capped(q_NHIK[rows], k_NGJK[keys], v_NGJK[keys], mask, scale, softcap)
        out_NHIK[rows].copy_(block)


def _mask(rows: range, keys: range, reach: tuple[int, int], relative_bias: Tensor | None, q: Tensor) -> Tensor:
    """[1, 1 or H, I, J], dtype of q: the bias, or 0, where a row sees a key; else -inf."""
    if relative_bias is None:
        mask = torch.zeros((1, len(rows), len(keys)), dtype=q.dtype, device=q.device)
    else:
        mask = relative_bias[:, rows.start : rows.stop, keys.start : keys.stop].to(q.dtype)
    left, right = reach
    rows_I1 = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    ahead_IJ = torch.arange(keys.start, keys.stop, device=q.device) - rows_I1
    if left >= 0:
        mask = mask.masked_fill(ahead_IJ < -left, float("-inf"))
    if right >= 0:
        mask = mask.masked_fill(ahead_IJ > right, float("-inf"))
    return mask[None]


def _attend_capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Attention with scores softcap * tanh(score / softcap), in float32: SDPA has no such cap."""
    scores = (q.float() @ k.float().transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap)
    return scores.add_(mask).softmax(-1) @ v.float()
