"""Attention of one long sequence on CPU, block by block: memory grows with its rows, not with rows times keys.

The rows are cut into blocks and the keys into tiles; a tile of scores is computed, turned into weights and multiplied
with its values while it is in cache. Query heads that share a key head are rows of one product.

Weights are 2^score without the usual shift by the row's maximum, so that tiles simply add up. The sums say whether
that was allowed; where it was not, the rows are computed again with the shift (README.md).

Letters beside those of the layer: G query heads of a key head, I rows of a block, R = G * I, J keys of a tile.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ._buffers import buffer
from ._products import heads_of_product, multiply
from ._scoring import Scoring, hide

# (first token, last token, columns) -> k and v as [Hkv, columns, K]; columns past the last token are zeros.
ReadKeys = Callable[[int, int, int], tuple[Tensor, Tensor]]

MIN_SUM, MAX_SUM = 1e-30, 1e30
# Rows of a product, the query heads of a key head together: fewer slow the product, more waste the diagonal.
BLOCK_ROWS = 1024
MIN_BLOCK_TOKENS, MAX_BLOCK_TOKENS = 64, 256
# Scores of a tile: what the cache of a core holds.
TILE_SCORES = 1 << 20
MIN_TILE_KEYS = 512
# Elements of its keys.
MAX_TILE_KEYS = 1 << 20
# Elements of the rows that are under way at once. They share what is read of the keys.
MAX_SPAN = 1 << 21
# Columns of a tile begin and end at multiples of this.
COLUMN_STEP = 64


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that are computed together.

    Attributes:
        first: First row of the slice.
        last: Row after its last.
        position: Position of its first row in the sequence.
        q: [Hkv, G, I, K], scaled; rows past last - first are zeros.
        sums: [Hkv, R, 1], float32: sums of weights.
        rows: [Hkv, R, K], float32: sums of weighted values.
        shift: [Hkv, R, 1]: maxima of the scores.
    """

    first: int
    last: int
    position: int
    q: Tensor
    sums: Tensor
    rows: Tensor
    shift: Tensor


def attend_blockwise(
    q: Tensor, read: ReadKeys, num_kv_heads: int, context_len: int, total: int, scoring: Scoring, out: Tensor
) -> None:
    """Writes the attention of one sequence, or of its slice from `context_len` on, to `out`.

    Args:
        q: [L, H, K]: the rows.
        read: Gives the keys and values of a range of tokens, contiguous. The next call may overwrite them.
        num_kv_heads: Hkv.
        context_len: Position of the first row.
        total: Keys of the sequence.
        scoring: Scale, limits, bias and cap of the scores.
        out: [L, H, K].
    """
    length, num_heads, head_size = q.shape
    group_size = num_heads // num_kv_heads
    tokens = min(MAX_BLOCK_TOKENS, max(MIN_BLOCK_TOKENS, BLOCK_ROWS // group_size))
    left, right = scoring.reach
    if left >= 0 and right >= 0:
        # A block as wide as its window: it computes twice the scores that it sees, in products of a fair size.
        tokens = min(tokens, max(MIN_BLOCK_TOKENS, round_up(left + right, MIN_BLOCK_TOKENS)))
    span = max(tokens, MAX_SPAN // (num_heads * head_size) // tokens * tokens)
    # Half floats have no range to spare.
    has_shift = q.dtype == torch.float16
    for first in range(0, length, span):
        last = min(first + span, length)
        bounds = [(i, min(i + tokens, last)) for i in range(first, last, tokens)]
        blocks = _load(q, bounds, num_kv_heads, context_len, scoring)
        if not has_shift:
            _add_keys(blocks, read, total, scoring, "weights")
            has_shift = not _are_in_range(blocks)
        if has_shift:
            # The scores of this sequence are large: from here on without trying.
            _add_keys(blocks, read, total, scoring, "maxima")
            _add_keys(blocks, read, total, scoring, "shifted")
        for block in blocks:
            num_rows = block.last - block.first
            rows_GIK = block.rows.div_(block.sums).view(num_heads, -1, head_size)[:, :num_rows]
            out[block.first : block.last].copy_(rows_GIK.transpose(0, 1))


def _load(
    q: Tensor, bounds: list[tuple[int, int]], num_kv_heads: int, context_len: int, scoring: Scoring
) -> list[Block]:
    num_heads, head_size = q.shape[1:]
    group_size = num_heads // num_kv_heads
    sizes = [padded_rows(last - first) for first, last in bounds]
    total = sum(sizes)
    q_all = buffer("block_q", (total * num_heads, head_size), q.dtype)
    rows_all = buffer("block_rows", (total * num_heads, head_size), torch.float32)
    sums_all = buffer("block_sums", (total * num_heads, 1), torch.float32)
    shift_all = buffer("block_shift", (total * num_heads, 1), q.dtype)
    blocks = []
    start = 0
    for (first, last), size in zip(bounds, sizes, strict=True):
        end = start + num_heads * size
        q4 = q_all[start:end].view(num_kv_heads, group_size, size, head_size)
        torch.mul(
            q[first:last].unflatten(1, (num_kv_heads, group_size)).permute(1, 2, 0, 3),
            scoring.factor,
            out=q4[:, :, : last - first],
        )
        q4[:, :, last - first :].zero_()
        shape = (num_kv_heads, group_size * size, -1)
        blocks.append(
            Block(
                first,
                last,
                context_len + first,
                q4,
                sums_all[start:end].view(shape),
                rows_all[start:end].view(shape),
                shift_all[start:end].view(shape),
            )
        )
        start = end
    return blocks


def _add_keys(blocks: list[Block], read: ReadKeys, total: int, scoring: Scoring, what: str) -> None:
    """Passes over the keys that the blocks see, and adds them to `sums` and `rows`, or to `shift` for "maxima"."""
    left, right = scoring.reach
    for block in blocks:
        if what == "maxima":
            block.shift.fill_(float("-inf"))
        else:
            block.sums.zero_()
            block.rows.zero_()
    begin = max(0, blocks[0].position - left) if left >= 0 else 0
    end = min(total, blocks[-1].position + blocks[-1].last - blocks[-1].first + right) if right >= 0 else total
    num_kv_heads, num_rows, head_size = blocks[0].rows.shape
    step = min(TILE_SCORES // num_rows, MAX_TILE_KEYS // (num_kv_heads * head_size))
    step = max(MIN_TILE_KEYS, step // COLUMN_STEP * COLUMN_STEP)
    for j0 in range(begin, end, step):
        j1 = min(j0 + step, end)
        k3, v3 = read(j0, j1, padded_columns(j1 - j0))
        for block in blocks:
            # The columns that some row of the block sees.
            seen_from = block.position - left - j0 if left >= 0 else 0
            seen_to = block.position + block.last - block.first + right - j0 if right >= 0 else j1 - j0
            c0 = max(0, seen_from) // COLUMN_STEP * COLUMN_STEP
            c1 = min(k3.shape[1], padded_columns(seen_to))
            if c0 < min(c1, j1 - j0):
                _add_tile(block, k3[:, c0:c1], v3[:, c0:c1], j0 + c0, j1, scoring, what)


def _add_tile(block: Block, k3: Tensor, v3: Tensor, j0: int, j1: int, scoring: Scoring, what: str) -> None:
    num_kv_heads, num_columns, _ = k3.shape
    j1 = min(j1, j0 + num_columns)
    group_size, num_rows = block.q.shape[1:3]
    step = heads_of_product(k3.dtype, num_kv_heads, group_size * num_rows * num_columns)
    for h in range(0, num_kv_heads, step):
        heads = slice(h, h + step)
        scores = multiply("scores", block.q[heads].flatten(1, 2), k3[heads].transpose(1, 2))
        scores4 = scores.view(-1, num_rows, num_columns)
        scoring.apply(
            scores4,
            (h * group_size, (h + len(scores4) // group_size) * group_size),
            (block.first, block.last),
            (j0, j1),
        )
        if what == "maxima":
            hide(scores4, block.position - j0, j1 - j0, scoring.reach, float("-inf"))
            torch.maximum(block.shift[heads], scores.amax(-1, keepdim=True), out=block.shift[heads])
            continue
        if what == "shifted":
            scores.sub_(block.shift[heads])
        scores.exp2_()
        hide(scores4, block.position - j0, j1 - j0, scoring.reach, 0.0)
        block.sums[heads].add_(scores.sum(-1, keepdim=True))
        block.rows[heads].add_(multiply("values", scores, v3[heads]))


def _are_in_range(blocks: list[Block]) -> bool:
    """Whether no sum of weights overflowed or vanished; False where one is NaN."""
    for block in blocks:
        smallest, largest = torch.aminmax(block.sums.view(*block.q.shape[:3])[..., : block.last - block.first])
        if not (smallest.item() > MIN_SUM and largest.item() < MAX_SUM):
            return False
    return True


def padded_rows(num_rows: int) -> int:
    """Rows that a block of this many is computed with."""
    return round_up(num_rows, 8 if num_rows <= 32 else 32)


def padded_columns(num_keys: int) -> int:
    """Columns that this many keys are computed with: few sizes, since oneDNN compiles a kernel for each."""
    return round_up(num_keys, max(COLUMN_STEP, 1 << max(0, num_keys.bit_length() - 4)))


def round_up(number: int, step: int) -> int:
    """The least multiple of `step` that is not smaller."""
    return -(-number // step) * step
