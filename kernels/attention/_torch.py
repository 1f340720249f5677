"""Attention with torch's operators.

scaled_dot_product_attention (SDPA) supports any device and dtype. The memory of torch's flash kernel for CPUs grows
with the rows only, but a mask is [rows, keys]. Attention with a mask is therefore computed in blocks of rows, over the
keys that the block attends to.

On CUDA, 16-bit dtypes use the flash attention operator: one call for the whole batch ("varlen"). The operator is called
directly because the public torch.nn.attention.varlen adds a Python operator, a fill and a check of the heads to every
call. Its first parameters are the same since torch 2.5. A torch with other parameters does not use this path.

Shape letters besides those of the package: I rows, J keys of one sequence, G key heads.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import capability_of

MAX_BLOCK_ROWS = 128
# Elements of a mask or of a block of scores.
MAX_BLOCK_SCORES = 1 << 22

_FLASH_PARAMETERS = (
    *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"),
    *("return_debug_mask", "scale", "window_size_left", "window_size_right"),
)


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
    """Same as `attention`; `reach` is the window including the causal limit, negative if unlimited."""
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
    """Same as `attention_paged`; `left` is the left size of the window, negative if unlimited."""
    block_size = k_cache.shape[1]
    tables_NM = block_tables.to(q.device, torch.int64)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for blocks_M, length, context_len in zip(tables_NM, seq_lens, context_lens, strict=True):
        rows = slice(start, start + length)
        num_keys = context_len + length
        if length:
            blocks = blocks_M[: -(-num_keys // block_size)]
            k, v = (cache.index_select(0, blocks).flatten(0, 1)[:num_keys] for cache in (k_cache, v_cache))
            q4, k4, v4, out4 = (x.transpose(0, 1)[None] for x in (q[rows], k, v, out[rows]))
            _attend(q4, k4, v4, out4, scale, (left, 0), None, softcap)
        start = rows.stop
    return out


def _runs(seq_lens: Sequence[int], *, may_share: bool) -> Iterator[tuple[int, int]]:
    """Yields (length, count) for runs of neighbours of equal length. Skips empty sequences."""
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
    """Attention of N sequences of equal length. Queries are the last I of J positions; with a bias, I equals J."""
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


def bias_block(relative_bias: Tensor, rows: range, keys: range) -> Tensor:
    """Returns the bias [H, I, J] of consecutive query and key positions from a bias by distance [H, 2 * R + 1]."""
    zero = relative_bias.shape[1] // 2
    distances = relative_bias[:, zero + keys.start - rows.stop + 1 : zero + keys.stop - rows.start]
    return distances.unfold(1, len(keys), 1).flip(1)


def _mask(rows: range, keys: range, reach: tuple[int, int], relative_bias: Tensor | None, q: Tensor) -> Tensor:
    """[1, 1 or H, I, J], dtype of q: the bias (0 without one) for visible keys, -inf for masked keys."""
    if relative_bias is None:
        mask = torch.zeros((1, len(rows), len(keys)), dtype=q.dtype, device=q.device)
    else:
        mask = bias_block(relative_bias, rows, keys).to(q.dtype)
    left, right = reach
    if left < 0 and right < 0:
        return mask[None]
    rows_I1 = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    ahead_IJ = torch.arange(keys.start, keys.stop, device=q.device) - rows_I1
    if left >= 0:
        mask = mask.masked_fill(ahead_IJ < -left, float("-inf"))
    if right >= 0:
        mask = mask.masked_fill(ahead_IJ > right, float("-inf"))
    return mask[None]


def _attend_capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Attention with scores softcap * tanh(score / softcap), in float32, because SDPA has no cap."""
    scores = (q.float() @ k.float().transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap)
    return scores.add_(mask).softmax(-1) @ v.float()


def supports_varlen(q: Tensor, relative_bias: Tensor | None) -> bool:
    """Whether flash attention supports this call: 16-bit, no bias, a supported head size, Ampere or later."""
    head_size = q.shape[2]
    return (
        q.is_cuda
        and q.dtype != torch.float32
        and relative_bias is None
        and head_size % 8 == 0
        and head_size <= 256
        and capability_of(q.device) >= (8, 0)
        and has_flash_operator()
    )


@cache
def has_flash_operator() -> bool:
    """Whether this torch has the flash attention operator with the expected parameters."""
    arguments = torch.ops.aten._flash_attention_forward.default._schema.arguments
    return tuple(argument.name for argument in arguments[: len(_FLASH_PARAMETERS)]) == _FLASH_PARAMETERS


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, reach: tuple[int, int]
) -> Tensor:
    """Same as `attention`, without a bias."""
    if q.shape[1] != k.shape[1] and not supports_grouped_heads(q.device):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return _flash(q, k, v, cu_seqlens, max_seqlen, scale, reach)


@cache
def supports_grouped_heads(device: torch.device) -> bool:
    """Whether the flash attention operator accepts fewer key heads than query heads.

    Its kernels support this in every version, but the operator's signature does not tell. Tried once per device on a
    few tokens.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(8, heads, 16, generator=generator).to(device, torch.float16) for heads in (4, 2, 2))
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32).to(device)
    expected = _flash(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1), cu_seqlens, 5, 0.25, (-1, -1))
    try:
        grouped = _flash(q, k, v, cu_seqlens, 5, 0.25, (-1, -1))
    except RuntimeError:
        return False
    return torch.allclose(grouped, expected, rtol=0.0, atol=1e-2)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, reach: tuple[int, int]
) -> Tensor:
    # With a longest sequence of 1, grouped heads run in a decoding kernel that fails if a sequence is empty
    # (Dao-AILab/flash-attention#1537).
    longest = max(max_seqlen, 2)
    attended_THK: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        0.0,
        reach == (-1, 0),
        False,
        scale=scale,
        window_size_left=reach[0],
        window_size_right=reach[1],
    )[0]
    return attended_THK
