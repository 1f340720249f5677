"""One tile of keys in flash attention: its scores, and their share of the running softmax of a tile of rows."""

import triton
import triton.language as tl


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
    bias_rows,
    position,
    j0,
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
    """Adds the keys from j0 on to (maximum, total, rows) of the softmax; without IS_BORDER every row sees them all."""
    j = j0 + tl.arange(0, BLOCK_N)
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
    if IS_BORDER:
        mask = is_key[:, None] & (d < HEAD_SIZE)[None, :]
        k = tl.load(k_addresses, mask=mask, other=0.0)
    elif HEAD_SIZE == BLOCK_K:
        k = tl.load(k_addresses)
    else:
        k = tl.load(k_addresses, mask=(d < HEAD_SIZE)[None, :], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    # With a cap or a bias the scores are made here; else the scale is part of the exponent.
    factor = scale
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); scores arrive divided by the cap, times 2 log2(e).
        scores = cap - 2.0 * cap / (tl.exp2(scores * scale) + 1.0)
        factor = 1.0
    if HAS_BIAS:
        if IS_BORDER:
            bias = tl.load(bias_rows[:, None] + j[None, :], mask=is_key[None, :], other=0.0)
        else:
            bias = tl.load(bias_rows[:, None] + j[None, :])
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
        # A row that has seen nothing yet must not subtract infinities.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores * factor - shift[:, None])
    shrink = tl.exp2(maximum - shift)
    total = total * shrink + tl.sum(weights, 1)
    if IS_BORDER:
        v = tl.load(v_addresses, mask=is_key[:, None] & (d < HEAD_SIZE)[None, :], other=0.0)
    elif HEAD_SIZE == BLOCK_K:
        v = tl.load(v_addresses)
    else:
        v = tl.load(v_addresses, mask=(d < HEAD_SIZE)[None, :], other=0.0)
    rows = tl.dot(weights.to(v.dtype), v, rows * shrink[:, None], input_precision="ieee")
    return new_maximum, total, rows
