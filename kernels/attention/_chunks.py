"""The pieces of a plan: which packed rows are computed together, as blocks of which shape, and what is hidden."""

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

# Scores of one chunk or tile: 4 MiB in bfloat16, which the caches of a few cores hold.
MAX_SCORES = 1 << 21
# Up to this length a mask added to all scores costs less than a fill for each sequence.
MAX_MASKED_LENGTH = 48
# A single sequence up to this length is cheaper in one call of SDPA.
MAX_SDPA_LENGTH = 48

NO_LIMIT = -1


@dataclass(frozen=True, slots=True)
class Tile:
    """A block of scores that is computed at once.

    Attributes:
        heads: Range of key heads; all of them in a chunk of several sequences.
        queries: Range of rows.
        keys: Range of columns; outside it the block's weights are zero.
        mask: Added to the scores, 0 or -inf: [n, 1, queries, keys]. None: nothing is hidden but what `hidden` says.
        hidden: Ranges that no row sees, as (first sequence, last sequence, first column): padding, where there is no
            mask.
    """

    heads: tuple[int, int]
    queries: tuple[int, int]
    keys: tuple[int, int]
    mask: Tensor | None
    hidden: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Sequences that are computed together, each padded to `length` rows.

    Attributes:
        num_seqs: Sequences that are computed. The last `num_seqs - num_true` are fill and belong to nobody.
        num_true: Sequences of the batch.
        length: Rows per sequence, padding included.
        seq_len: True rows per sequence where all are equal and adjacent: the chunk is read through a view. Else 0.
        start: First packed row of the chunk.
        end: Row after its last, where the chunk is contiguous in the packed batch; else 0.
        rows: [num_seqs * length], int64: the packed row that each computed row is read from (padding reads the last
            row of its own sequence, so that nothing foreign enters). None for a view.
        is_true: Int64: the computed rows that are rows of the batch, in its order. None for a view.
        targets: Int64: the packed rows that `is_true` is written to, where the chunk is not contiguous.
        tiles: The blocks of scores. None for a sequence so short that one call of SDPA costs less.
    """

    num_seqs: int
    num_true: int
    length: int
    seq_len: int
    start: int
    end: int
    rows: Tensor | None
    is_true: Tensor | None
    targets: Tensor | None
    tiles: tuple[Tile, ...] | None


def make_chunk(
    members: list[int],
    num_seqs: int,
    length: int,
    seq_lens: tuple[int, ...],
    starts: list[int],
    num_heads: int,
    num_kv_heads: int,
    reach: tuple[int, int],
    dtype: torch.dtype,
) -> Chunk:
    """Computes the indices and masks of one chunk.

    Args:
        members: The chunk's sequences, ascending.
        num_seqs: Sequences to compute, `members` and fill.
        length: Rows to compute per sequence.
        seq_lens: Lengths of all sequences of the batch.
        starts: First packed row of each, and T.
        num_heads: H.
        num_kv_heads: Hkv.
        reach: Window and causal limit.
        dtype: Of the scores.
    """
    lengths = [seq_lens[n] for n in members]
    num_true = len(members)
    start, end = starts[members[0]], starts[members[-1] + 1]
    is_contiguous = end - start == sum(lengths)
    is_view = is_contiguous and min(lengths) == max(lengths)
    if num_true == 1 and length <= MAX_SDPA_LENGTH:
        return Chunk(1, 1, length, lengths[0], start, end, None, None, None, None)
    lengths += lengths[-1:] * (num_seqs - num_true)
    tiles = _tiles(lengths, length, num_heads, num_kv_heads, reach, dtype)
    if is_view:
        return Chunk(num_seqs, num_true, length, lengths[0], start, end, None, None, None, tiles)

    lengths_N1 = torch.tensor(lengths)[:, None]
    starts_N1 = torch.tensor([starts[n] for n in members] + [starts[members[-1]]] * (num_seqs - num_true))[:, None]
    columns_1L = torch.arange(length)[None, :]
    rows_NL = starts_N1 + torch.minimum(columns_1L, lengths_N1 - 1)
    is_true_NL = columns_1L < lengths_N1
    is_true_NL[num_true:] = False
    is_true = is_true_NL.flatten().nonzero()[:, 0]
    targets = None if is_contiguous else rows_NL[is_true_NL]
    return Chunk(
        num_seqs, num_true, length, 0, start, end if is_contiguous else 0, rows_NL.flatten(), is_true, targets, tiles
    )


def _tiles(
    lengths: list[int], length: int, num_heads: int, num_kv_heads: int, reach: tuple[int, int], dtype: torch.dtype
) -> tuple[Tile, ...]:
    is_banded = reach != (NO_LIMIT, NO_LIMIT)
    if len(lengths) > 1:
        whole = (0, length)
        if is_banded or (length <= MAX_MASKED_LENGTH and min(lengths) < length):
            return (Tile((0, num_kv_heads), whole, whole, _mask(lengths, whole, whole, reach, dtype), ()),)
        hidden = []
        first = 0
        for seq_len, run in groupby(lengths):
            last = first + sum(1 for _ in run)
            if seq_len < length:
                hidden.append((first, last, seq_len))
            first = last
        return (Tile((0, num_kv_heads), whole, whole, None, tuple(hidden)),)

    (seq_len,) = lengths
    group_size = num_heads // num_kv_heads
    query_step, key_span = _query_step(length, reach)
    heads_step = max(1, min(num_kv_heads, MAX_SCORES // (group_size * query_step * key_span)))
    while heads_step == 1 and query_step > 64 and group_size * query_step * key_span > 2 * MAX_SCORES:
        query_step //= 2
    left, right = reach
    tiles = []
    for query in range(0, seq_len, query_step):
        queries = (query, min(query + query_step, length))
        keys = (max(0, query - left) if left >= 0 else 0, min(length, queries[1] + right) if right >= 0 else length)
        mask = _mask(lengths, queries, keys, reach, dtype) if is_banded else None
        hidden_from = seq_len - keys[0]
        is_hidden = mask is None and hidden_from < keys[1] - keys[0]
        for head in range(0, num_kv_heads, heads_step):
            heads = (head, min(head + heads_step, num_kv_heads))
            tiles.append(Tile(heads, queries, keys, mask, ((0, 1, hidden_from),) if is_hidden else ()))
    return tuple(tiles)


def _query_step(length: int, reach: tuple[int, int]) -> tuple[int, int]:
    """(Rows per block, columns that it sees): the whole sequence, unless a window or the causal limit hides much."""
    left, right = reach
    if right >= 0 and length >= 256:
        step = 128
        span = length if left < 0 else min(length, left + right + step)
        if left < 0 or 4 * span <= 3 * length:
            return step, span
    return length, length


def _mask(
    lengths: list[int], queries: tuple[int, int], keys: tuple[int, int], reach: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """[n, 1, queries, keys]: 0 where the row sees the column, else -inf.

    A row of padding sees every column, so that no row sees none.

    NOTE: full in its last two axes. Broadcast over rows of a few dozen columns, the addition takes ten times as long.
    """
    lengths_N = torch.tensor(lengths)[:, None, None, None]
    i, j = torch.arange(*queries)[:, None], torch.arange(*keys)
    left, right = reach
    band = torch.ones(len(i), len(j), dtype=torch.bool)
    if left >= 0:
        band &= j >= i - left
    if right >= 0:
        band &= j <= i + right
    seen = (band & (j < lengths_N)) | (i >= lengths_N)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
