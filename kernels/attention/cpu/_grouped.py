"""Packed attention on CPU: batched matrix products over sequences of about equal length.

In bfloat16 the softmax is exp(scores) without the usual shift by the row's maximum: the unshifted exponentials feed
the second product, and the result is divided by their sums. It is two cheap elementwise passes instead of torch's
softmax, which costs more than both products together. It is exact as long as no sum leaves the range of the exponent
(bfloat16 has that of float32); every call checks its sums and takes the shifted softmax where one does. README.md has
the derivation and the figures.
"""

import torch
from torch import Tensor

from ..._scratch import scratch
from ._blockwise import attention_blockwise
from ._groups import Group
from ._plan import AttentionPlan
from ._tile import MAX_SUM, MIN_SUM

# Below this many columns torch's float32 softmax works element by element, 20 times slower than exp.
MIN_SOFTMAX_COLUMNS = 16


def takes_grouped(q: Tensor, relative_bias: Tensor | None, softcap: float | None) -> bool:
    """Whether this path is the faster one on CPU, or the only one."""
    if q.device.type != "cpu":
        return False
    if q.dtype == torch.float16:
        return softcap is not None
    return q.dtype == torch.bfloat16 or relative_bias is not None or softcap is not None


def attention_grouped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    relative_bias: Tensor | None,
    softcap: float | None,
    plan: AttentionPlan,
) -> Tensor:
    """Same as `attention`, by the groups of the plan."""
    with torch.no_grad():
        out = torch.empty(q.shape, dtype=q.dtype)
        fused = _fused_view(q, k, v)
        for group in plan.groups:
            if group.is_alone:
                rows = slice(group.start, group.end)
                out[rows] = attention_blockwise(
                    q[rows], k[rows], v[rows], (group.seq_len,), scale, plan.reach, relative_bias, softcap
                )
                continue
            _attend_group(
                group,
                (fused,) if fused is not None else (q[:, None], k[:, None], v[:, None]),
                scale,
                relative_bias,
                softcap,
                out,
            )
    return out


def _fused_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """[T, 3, H, K]: q, k and v as one view where they are parts of one product, so that one copy reorders them."""
    step = k.storage_offset() - q.storage_offset()
    storage = q.untyped_storage().data_ptr()
    if (
        q.shape != k.shape
        or not q.stride() == k.stride() == v.stride()
        or step <= 0
        or v.storage_offset() - k.storage_offset() != step
        or k.untyped_storage().data_ptr() != storage
        or v.untyped_storage().data_ptr() != storage
    ):
        return None
    num_tokens, num_heads, head_size = q.shape
    return q.as_strided((num_tokens, 3, num_heads, head_size), (q.stride(0), step, q.stride(1), q.stride(2)))


def _attend_group(
    group: Group,
    parts: tuple[Tensor, ...],
    scale: float,
    relative_bias: Tensor | None,
    softcap: float | None,
    out: Tensor,
) -> None:
    num_seqs, length, head_size = group.num_seqs, group.length, out.shape[2]
    # [n, H or Hkv, length, K] each, contiguous.
    if len(parts) == 1:
        q4, k4, v4 = _load("qkv", group, parts[0]).unbind(0)
    else:
        q4, k4, v4 = (_load(name, group, part)[0] for name, part in zip(("q", "k", "v"), parts, strict=True))
    if scale != 1.0:
        q4.mul_(scale)

    if group.rows is None:
        rows = out[group.start : group.end].unflatten(0, (group.num_true, group.seq_len))
    else:
        rows = scratch("attention.rows", (num_seqs, length, out.shape[1], head_size), out.dtype)
    _attend(group, q4, k4, v4, relative_bias, softcap, rows.transpose(1, 2))

    if group.is_true is not None:
        flat = rows.view(num_seqs * length, out.shape[1], head_size)
        if group.targets is None:
            torch.index_select(flat, 0, group.is_true, out=out[group.start : group.end])
        else:
            out.index_copy_(0, group.targets, flat.index_select(0, group.is_true))


def _load(name: str, group: Group, part: Tensor) -> Tensor:
    """[C, n, H, length, K], contiguous: the group's rows of `part` [T, C, H, K], padded."""
    num_parts, num_heads, head_size = part.shape[1:]
    loaded = scratch("attention." + name, (num_parts, group.num_seqs, num_heads, group.length, head_size), part.dtype)
    if group.rows is not None:
        rows = part.index_select(0, group.rows).unflatten(0, (group.num_seqs, group.length))
    else:
        rows = part[group.start : group.end].unflatten(0, (group.num_true, group.seq_len))
        if group.num_true < group.num_seqs:
            loaded[:, group.num_true :].zero_()
        if group.seq_len < group.length:
            loaded[..., group.seq_len :, :].zero_()
    loaded[:, : rows.shape[0], :, : rows.shape[1]].copy_(rows.permute(2, 0, 3, 1, 4))
    return loaded


def _attend(
    group: Group,
    q4: Tensor,
    k4: Tensor,
    v4: Tensor,
    relative_bias: Tensor | None,
    softcap: float | None,
    target: Tensor,
) -> None:
    """Writes the rows of a group to `target` [n, H, L, K], which may have fewer rows than are computed."""
    num_seqs, num_heads, length, head_size = q4.shape
    num_kv_heads = k4.shape[1]
    batch, num_rows = num_seqs * num_kv_heads, num_heads // num_kv_heads * length

    # The query heads that share a key head become rows of one product. All these are views.
    q3 = q4.view(batch, num_rows, head_size)
    k3, v3 = k4.view(batch, length, head_size), v4.view(batch, length, head_size)
    scores = scratch("attention.scores", (batch, num_rows, length), q4.dtype)
    bias = None if relative_bias is None else relative_bias[:, :length, :length]
    _compute_scores(scores, q3, k3, bias, softcap, group)

    num_true, num_target_rows = target.shape[0], target.shape[2]
    rows = scratch("attention.tile", (batch, num_rows, head_size), q4.dtype)
    rows4 = rows.view(num_seqs, num_heads, length, head_size)[:num_true, :, :num_target_rows]
    if q4.dtype == torch.bfloat16 or (q4.dtype == torch.float32 and length < MIN_SOFTMAX_COLUMNS):
        scores.exp_()
        sums = scratch("attention.sums", (batch, num_rows, 1), q4.dtype)
        torch.sum(scores, -1, keepdim=True, out=sums)
        smallest, largest = torch.aminmax(sums)
        if smallest.item() > MIN_SUM and largest.item() < MAX_SUM:
            torch.bmm(scores, v3, out=rows)
            sums4 = sums.view(num_seqs, num_heads, length, 1)[:num_true, :, :num_target_rows]
            torch.div(rows4, sums4, out=target)
            return
        _compute_scores(scores, q3, k3, bias, softcap, group)
    weights = scratch("attention.weights", (batch, num_rows, length), q4.dtype)
    torch.softmax(scores, -1, out=weights)
    torch.bmm(weights, v3, out=rows)
    target.copy_(rows4)


def _compute_scores(
    scores: Tensor, q3: Tensor, k3: Tensor, bias: Tensor | None, softcap: float | None, group: Group
) -> None:
    torch.bmm(q3, k3.transpose(1, 2), out=scores)
    if softcap is not None:
        scores.mul_(1.0 / softcap).tanh_().mul_(softcap)
    scores4 = scores.view(group.num_seqs, -1, group.length, group.length)
    if bias is not None:
        # Padding may reach past the bias; what it holds there is hidden or dropped.
        scores4[:, :, : bias.shape[1], : bias.shape[2]].add_(bias)
    if group.mask is not None:
        scores4.add_(group.mask)
    for first, last, column in group.hidden:
        scores4[first:last, :, :, column:].fill_(float("-inf"))
