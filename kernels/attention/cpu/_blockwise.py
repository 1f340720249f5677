"""Attention of one long sequence on CPU, block by block: memory grows with its rows, not with rows times keys.

The rows are cut into blocks and the keys into tiles; a tile of scores is computed, turned into weights and multiplied
with its values while it is in cache. Query heads that share a key head are rows of one product. Weights are 2^score
without the usual shift by the row's maximum, so that tiles simply add up; the sums say whether that was allowed, and
where it was not there is a shift after all (README.md).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from ..._scratch import scratch
from .._sdpa import attention_sdpa
from ._scoring import Scoring
from ._tile import Block, add_tile, raise_shift

# (first token, last token, columns) -> k and v as [Hkv, columns, K]; columns past the last token are zeros.
ReadKeys = Callable[[int, int, int], tuple[Tensor, Tensor]]

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
# Tokens from which the blockwise path is faster than SDPA.
MIN_BLOCKWISE_LENGTH = 256


def takes_blockwise(q: Tensor, longest: int, relative_bias: Tensor | None, softcap: float | None) -> bool:
    """Whether a float32 batch is faster here than through SDPA alone, or than by a plan (bias and cap)."""
    is_plain = relative_bias is None and softcap is None
    return q.device.type == "cpu" and q.dtype == torch.float32 and is_plain and longest >= MIN_BLOCKWISE_LENGTH


def attention_blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Sequence[int],
    scale: float,
    reach: tuple[int, int],
    relative_bias: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Same as `attention`, for sequences that share no call: long ones block by block, short ones through SDPA."""
    out = torch.empty(q.shape, dtype=q.dtype)
    scoring = Scoring(scale, reach, relative_bias, softcap, q.dtype)
    start = 0
    with torch.no_grad():
        for length, run in groupby(seq_lens):
            num_seqs = sum(1 for _ in run)
            if length < MIN_BLOCKWISE_LENGTH and softcap is None:
                rows = slice(start, start + num_seqs * length)
                out[rows] = attention_sdpa(q[rows], k[rows], v[rows], [length] * num_seqs, scale, reach, relative_bias)
                start = rows.stop
                continue
            for _ in range(num_seqs):
                rows = slice(start, start + length)
                read = packed_reader(k[rows], v[rows])
                attend_blockwise(q[rows], read, k.shape[1], 0, length, scoring, out[rows])
                start += length
    return out


def attend_blockwise(
    q: Tensor, read: ReadKeys, num_kv_heads: int, context_len: int, total: int, scoring: Scoring, out: Tensor
) -> None:
    """Writes the attention of one sequence, or of its chunk from `context_len` on, to `out`.

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
    tokens = _block_tokens(num_heads // num_kv_heads, scoring.reach)
    span = max(tokens, MAX_SPAN // (num_heads * head_size) // tokens * tokens)
    expects_shift = False
    for first in range(0, length, span):
        last = min(first + span, length)
        bounds = [(i, min(i + tokens, last)) for i in range(first, last, tokens)]
        blocks = _load(q, bounds, num_kv_heads, context_len, scoring)
        # Half floats have no range to spare.
        needs_maxima = q.dtype == torch.float16
        if not needs_maxima:
            expects_shift = _add_keys(blocks, read, total, scoring, expects_shift=expects_shift)
            needs_maxima = not all(block.is_in_range() for block in blocks)
        if needs_maxima:
            for block in blocks:
                block.shift.fill_(float("-inf"))
                block.is_shifted = block.is_settled = True
            for block, k3, _, keys in _tiles(blocks, read, total, scoring.reach):
                raise_shift(block, k3, keys, scoring)
            _add_keys(blocks, read, total, scoring)
        for block in blocks:
            num_rows = block.last - block.first
            rows_HIK = block.rows.div_(block.sums).view(num_heads, -1, head_size)[:, :num_rows]
            out[block.first : block.last].copy_(rows_HIK.transpose(0, 1))


def _block_tokens(group_size: int, reach: tuple[int, int]) -> int:
    tokens = min(MAX_BLOCK_TOKENS, max(MIN_BLOCK_TOKENS, BLOCK_ROWS // group_size))
    left, right = reach
    if left >= 0 and right >= 0:
        # A block as wide as its window: it computes twice the scores that it sees, in products of a fair size.
        tokens = min(tokens, max(MIN_BLOCK_TOKENS, _round_up(left + right, MIN_BLOCK_TOKENS)))
    return tokens


def _load(
    q: Tensor, bounds: list[tuple[int, int]], num_kv_heads: int, context_len: int, scoring: Scoring
) -> list[Block]:
    num_heads, head_size = q.shape[1:]
    group_size = num_heads // num_kv_heads
    sizes = [padded_rows(last - first) for first, last in bounds]
    total = sum(sizes) * num_heads
    q_all = scratch("attention.block_q", (total, head_size), q.dtype)
    rows_all = scratch("attention.block_rows", (total, head_size), torch.float32)
    sums_all = scratch("attention.block_sums", (total, 1), torch.float32)
    shift_all = scratch("attention.block_shift", (total, 1), q.dtype).zero_()
    blocks = []
    start = 0
    for (first, last), size in zip(bounds, sizes, strict=True):
        end = start + num_heads * size
        q4 = q_all[start:end].view(num_kv_heads, group_size, size, head_size)
        rows4 = q[first:last].unflatten(1, (num_kv_heads, group_size)).permute(1, 2, 0, 3)
        torch.mul(rows4, scoring.factor, out=q4[:, :, : last - first])
        q4[:, :, last - first :].zero_()
        sums, rows, shift = (
            x[start:end].view(num_kv_heads, group_size * size, -1) for x in (sums_all, rows_all, shift_all)
        )
        blocks.append(Block(first, last, context_len + first, q4, sums, rows, shift))
        start = end
    return blocks


def _add_keys(
    blocks: list[Block], read: ReadKeys, total: int, scoring: Scoring, *, expects_shift: bool = False
) -> bool:
    """Computes sums and rows of the blocks. Returns whether one took a shift: then those that follow will need one."""
    for block in blocks:
        block.sums.zero_()
        block.rows.zero_()
    for block, k3, v3, keys in _tiles(blocks, read, total, scoring.reach):
        add_tile(block, k3, v3, keys, scoring, expects_shift=expects_shift)
        expects_shift |= block.is_shifted
    return expects_shift


def _tiles(
    blocks: list[Block], read: ReadKeys, total: int, reach: tuple[int, int]
) -> Iterator[tuple[Block, Tensor, Tensor, tuple[int, int]]]:
    """Every block with every part of a tile that it sees; each tile is read once."""
    left, right = reach
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
            c1 = min(k3.shape[1], padded_columns(max(0, seen_to)))
            if c0 < min(c1, j1 - j0):
                yield block, k3[:, c0:c1], v3[:, c0:c1], (j0 + c0, min(j1, j0 + c1))


def padded_rows(num_rows: int) -> int:
    """Rows that a block of this many is computed with."""
    return _round_up(num_rows, 8 if num_rows <= 32 else 32)


def padded_columns(num_keys: int) -> int:
    """Columns that this many keys are computed with: few sizes, since oneDNN compiles a kernel for each."""
    return _round_up(num_keys, max(COLUMN_STEP, 1 << max(0, num_keys.bit_length() - 4)))


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def packed_reader(k: Tensor, v: Tensor) -> ReadKeys:
    """Reads from the rows of one sequence, [L, Hkv, K] each."""

    def read(first: int, last: int, num_columns: int) -> tuple[Tensor, Tensor]:
        return _arrange("k", k[first:last], num_columns), _arrange("v", v[first:last], num_columns)

    return read


def paged_reader(k_cache: Tensor, v_cache: Tensor, blocks_M: Tensor) -> ReadKeys:
    """Reads from the blocks of one sequence, [M] int64, in caches [P, block size, Hkv, K]; nothing else of them."""
    block_size = k_cache.shape[1]
    blocks = blocks_M.tolist()
    # Neighbours are read through a view: blocks m0 to m1 are neighbours if no jump lies between.
    jumps = [0, *(blocks_M.diff() != 1).cumsum(0).tolist()]

    def read_one(name: str, cache: Tensor, first: int, last: int, num_columns: int) -> Tensor:
        m0, m1 = first // block_size, -(-last // block_size)
        if jumps[m1 - 1] == jumps[m0]:
            found = cache[blocks[m0] : blocks[m0] + m1 - m0]
        else:
            found = scratch("attention.blocks_" + name, (m1 - m0, *cache.shape[1:]), cache.dtype)
            torch.index_select(cache, 0, blocks_M[m0:m1], out=found)
        offset = m0 * block_size
        return _arrange(name, found.flatten(0, 1)[first - offset : last - offset], num_columns)

    def read(first: int, last: int, num_columns: int) -> tuple[Tensor, Tensor]:
        return read_one("k", k_cache, first, last, num_columns), read_one("v", v_cache, first, last, num_columns)

    return read


def _arrange(name: str, rows: Tensor, num_columns: int) -> Tensor:
    """[Hkv, num_columns, K], contiguous: the rows [n, Hkv, K] by head, and zeros after them."""
    num_rows, num_heads, head_size = rows.shape
    arranged = scratch("attention.tile_" + name, (num_heads, num_columns, head_size), rows.dtype)
    arranged[:, :num_rows].copy_(rows.transpose(0, 1))
    arranged[:, num_rows:].zero_()
    return arranged
