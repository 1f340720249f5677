"""Packed attention on CPU: batched matrix products over sequences of about equal length.

In bfloat16 the softmax is exp(scores) without the usual shift by the row's maximum: the unshifted exponentials feed
the second product, and the result is divided by their sums. It is two cheap elementwise passes instead of torch's
softmax, which costs more than both products together. It is exact as long as no sum leaves the range of the exponent
(bfloat16 has that of float32); every call checks its sums and takes the shifted softmax where one does. README.md has
the derivation and the figures.
"""

import threading

import torch
from torch import Tensor

from ._chunks import Chunk, Tile
from ._plan import AttentionPlan
from ._sdpa import attention_sdpa

MIN_SUM, MAX_SUM = 1e-30, 1e30
# Below this many columns torch's float32 softmax works element by element, 20 times slower than exp.
MIN_SOFTMAX_COLUMNS = 16
# Tokens. In float32, SDPA with a mask is faster up to here.
MIN_WINDOWED_LENGTH = 512
# Elements. Larger buffers are not kept between calls.
MAX_KEPT_BUFFER = 1 << 23

_thread = threading.local()


def takes_grouped(q: Tensor, reach: tuple[int, int], longest: int, relative_bias: Tensor | None) -> bool:
    """Whether this path is the faster one: in float32 torch's SDPA is as good, unless it needs a large mask."""
    if q.device.type != "cpu" or q.dtype == torch.float16:
        return False
    is_windowed = reach[0] >= 0
    return q.dtype == torch.bfloat16 or relative_bias is not None or (is_windowed and longest > MIN_WINDOWED_LENGTH)


def attention_grouped(
    q: Tensor, k: Tensor, v: Tensor, scale: float, relative_bias: Tensor | None, plan: AttentionPlan
) -> Tensor:
    """Same as `attention`, by the chunks of the plan."""
    with torch.no_grad():
        out = torch.empty(q.shape, dtype=q.dtype)
        fused = _fused_view(q, k, v)
        for chunk in plan.chunks:
            if chunk.tiles is None:
                rows = slice(chunk.start, chunk.end)
                out[rows] = attention_sdpa(
                    q[rows], k[rows], v[rows], (chunk.seq_len,), scale, plan.reach, relative_bias
                )
                continue
            _attend_chunk(
                chunk,
                (fused,) if fused is not None else (q[:, None], k[:, None], v[:, None]),
                scale,
                relative_bias,
                out,
            )
    return out


def _fused_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """[T, 3, H, K]: q, k and v as one view where they are slices of one product, so that one copy reorders them."""
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


def _attend_chunk(
    chunk: Chunk, parts: tuple[Tensor, ...], scale: float, relative_bias: Tensor | None, out: Tensor
) -> None:
    num_seqs, length, head_size = chunk.num_seqs, chunk.length, out.shape[2]
    # [n, H or Hkv, length, K] each, contiguous.
    if len(parts) == 1:
        q4, k4, v4 = _load("qkv", chunk, parts[0]).unbind(0)
    else:
        q4, k4, v4 = (_load(name, chunk, part)[0] for name, part in zip(("q", "k", "v"), parts, strict=True))
    if scale != 1.0:
        q4.mul_(scale)

    if chunk.rows is None:
        rows = out[chunk.start : chunk.end].unflatten(0, (chunk.num_true, chunk.seq_len))
    else:
        rows = _buffer("rows", (num_seqs, length, out.shape[1], head_size), out.dtype)
    target = rows.transpose(1, 2)
    for tile in chunk.tiles or ():
        _attend_tile(tile, q4, k4, v4, relative_bias, target)

    if chunk.is_true is not None:
        flat = rows.view(num_seqs * length, out.shape[1], head_size)
        if chunk.targets is None:
            torch.index_select(flat, 0, chunk.is_true, out=out[chunk.start : chunk.end])
        else:
            out.index_copy_(0, chunk.targets, flat.index_select(0, chunk.is_true))


def _load(name: str, chunk: Chunk, part: Tensor) -> Tensor:
    """[C, n, H, length, K], contiguous: the chunk's rows of `part` [T, C, H, K], padded."""
    num_parts, num_heads, head_size = part.shape[1:]
    loaded = _buffer(name, (num_parts, chunk.num_seqs, num_heads, chunk.length, head_size), part.dtype)
    if chunk.rows is not None:
        rows = part.index_select(0, chunk.rows).unflatten(0, (chunk.num_seqs, chunk.length))
    else:
        rows = part[chunk.start : chunk.end].unflatten(0, (chunk.num_true, chunk.seq_len))
        if chunk.num_true < chunk.num_seqs:
            loaded[:, chunk.num_true :].zero_()
        if chunk.seq_len < chunk.length:
            loaded[..., chunk.seq_len :, :].zero_()
    loaded[:, : rows.shape[0], :, : rows.shape[1]].copy_(rows.permute(2, 0, 3, 1, 4))
    return loaded


def _attend_tile(tile: Tile, q4: Tensor, k4: Tensor, v4: Tensor, relative_bias: Tensor | None, target: Tensor) -> None:
    """Writes the rows of one tile to `target` [n, H, L, K], which may have fewer rows than are computed."""
    num_seqs, num_heads, length, head_size = q4.shape
    num_kv_heads = k4.shape[1]
    group_size = num_heads // num_kv_heads
    (h0, h1), (i0, i1), (j0, j1) = tile.heads, tile.queries, tile.keys
    batch, num_rows, num_columns = num_seqs * (h1 - h0), group_size * (i1 - i0), j1 - j0

    # The query heads that share a key head become rows of one product. All these are views, unless the tile is part
    # of a sequence.
    q3 = q4.view(num_seqs, num_kv_heads, group_size, length, head_size)[:, h0:h1, :, i0:i1].reshape(
        batch, num_rows, head_size
    )
    k3 = k4[:, h0:h1, j0:j1].reshape(batch, num_columns, head_size)
    v3 = v4[:, h0:h1, j0:j1].reshape(batch, num_columns, head_size)
    scores = _buffer("scores", (batch, num_rows, num_columns), q4.dtype)
    bias = None
    if relative_bias is not None:
        bias = relative_bias[h0 * group_size : h1 * group_size, i0:i1, j0:j1]
    _compute_scores(scores, q3, k3, bias, tile, num_seqs)

    num_true, last_row = target.shape[0], min(i1, target.shape[2])
    target = target[:, h0 * group_size : h1 * group_size, i0:last_row]
    rows = _buffer("tile", (batch, num_rows, head_size), q4.dtype)
    rows4 = rows.view(num_seqs, (h1 - h0) * group_size, i1 - i0, head_size)[:num_true, :, : last_row - i0]
    if q4.dtype == torch.bfloat16 or num_columns < MIN_SOFTMAX_COLUMNS:
        scores.exp_()
        sums = _buffer("sums", (batch, num_rows, 1), q4.dtype)
        torch.sum(scores, -1, keepdim=True, out=sums)
        smallest, largest = torch.aminmax(sums)
        if smallest.item() > MIN_SUM and largest.item() < MAX_SUM:
            torch.bmm(scores, v3, out=rows)
            sums4 = sums.view(num_seqs, (h1 - h0) * group_size, i1 - i0, 1)[:num_true, :, : last_row - i0]
            torch.div(rows4, sums4, out=target)
            return
        _compute_scores(scores, q3, k3, bias, tile, num_seqs)
    weights = _buffer("weights", (batch, num_rows, num_columns), q4.dtype)
    torch.softmax(scores, -1, out=weights)
    torch.bmm(weights, v3, out=rows)
    target.copy_(rows4)


def _compute_scores(scores: Tensor, q3: Tensor, k3: Tensor, bias: Tensor | None, tile: Tile, num_seqs: int) -> None:
    torch.bmm(q3, k3.transpose(1, 2), out=scores)
    scores4 = scores.view(num_seqs, -1, tile.queries[1] - tile.queries[0], scores.shape[2])
    if bias is not None:
        # Padding may reach past the bias; what it holds there is hidden or dropped.
        scores4[:, :, : bias.shape[1], : bias.shape[2]].add_(bias)
    if tile.mask is not None:
        scores4.add_(tile.mask)
    for first, last, column in tile.hidden:
        scores4[first:last, :, :, column:].fill_(float("-inf"))


def _buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of this thread for one purpose, kept between calls and grown as needed; holds what the last use left.

    Kept because fresh pages cost more than the arithmetic in them. Made outside inference mode, so that any mode may
    write it.
    """
    size = 1
    for axis in shape:
        size *= axis
    if size > MAX_KEPT_BUFFER:
        return torch.empty(shape, dtype=dtype)
    buffers: dict[tuple[str, torch.dtype], Tensor] = _thread.__dict__.setdefault("buffers", {})
    buffer = buffers.get((name, dtype))
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):
            buffer = torch.empty(size, dtype=dtype)
        buffers[name, dtype] = buffer
    return buffer[:size].view(shape)
