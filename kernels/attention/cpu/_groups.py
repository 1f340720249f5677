"""The pieces of a plan: which packed rows are computed together, as blocks of which shape, and what is hidden."""

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from .._reference import visible

# Scores of one group: 4 MiB in bfloat16, which the caches of a few cores hold.
MAX_SCORES = 1 << 21
# Up to this length a mask added to all scores costs less than a fill for each sequence.
MAX_MASKED_LENGTH = 48
# A single sequence up to this length is cheaper in one call of SDPA.
MAX_SDPA_LENGTH = 48
# Tokens from which tiles of a single sequence cost less than its whole square: in float32, or where much is hidden.
MIN_ALONE_LENGTH = 256

NO_LIMIT = -1


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that are computed together, each padded to `length` rows.

    Attributes:
        num_seqs: Sequences that are computed. The last `num_seqs - num_true` are fill and belong to nobody.
        num_true: Sequences of the batch.
        length: Rows per sequence, padding included.
        seq_len: True rows per sequence where all are equal and adjacent: the group is read through a view. Else 0.
        start: First packed row of the group.
        end: Row after its last, where the group is contiguous in the packed batch; else 0.
        rows: [num_seqs * length], int64: the packed row that each computed row is read from (padding reads the last
            row of its own sequence, so that nothing foreign enters). None for a view.
        is_true: Int64: the computed rows that are rows of the batch, in its order. None for a view.
        targets: Int64: the packed rows that `is_true` is written to, where the group is not contiguous.
        mask: Added to the scores, 0 or -inf: [n, 1, length, length]. None: nothing is hidden but what `hidden` says.
        hidden: Columns that no row sees, as (first sequence, last sequence, first column): padding, where there is no
            mask.
        is_alone: A sequence that is computed by itself, without padding: one so short that a call of SDPA costs less,
            or so long that its scores must be cut into tiles.
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
    mask: Tensor | None
    hidden: tuple[tuple[int, int, int], ...]
    is_alone: bool


def make_group(
    members: list[int],
    num_seqs: int,
    length: int,
    seq_lens: tuple[int, ...],
    starts: list[int],
    num_heads: int,
    reach: tuple[int, int],
    dtype: torch.dtype,
) -> Group:
    """Computes the indices and masks of one group.

    Args:
        members: The group's sequences, ascending.
        num_seqs: Sequences to compute, `members` and fill.
        length: Rows to compute per sequence.
        seq_lens: Lengths of all sequences of the batch.
        starts: First packed row of each, and T.
        num_heads: H.
        reach: Window and causal limit.
        dtype: Of the scores.
    """
    lengths = [seq_lens[n] for n in members]
    num_true = len(members)
    start, end = starts[members[0]], starts[members[-1] + 1]
    is_contiguous = end - start == sum(lengths)
    is_view = is_contiguous and min(lengths) == max(lengths)
    if num_true == 1 and _is_alone(length, num_heads, reach, dtype):
        return Group(1, 1, length, lengths[0], start, end, None, None, None, None, (), is_alone=True)
    lengths += lengths[-1:] * (num_seqs - num_true)
    mask, hidden = _hide(lengths, length, reach, dtype)
    if is_view:
        return Group(num_seqs, num_true, length, lengths[0], start, end, None, None, None, mask, hidden, is_alone=False)

    lengths_N1 = torch.tensor(lengths)[:, None]
    starts_N1 = torch.tensor([starts[n] for n in members] + [starts[members[-1]]] * (num_seqs - num_true))[:, None]
    columns_1L = torch.arange(length)[None, :]
    rows_NL = starts_N1 + torch.minimum(columns_1L, lengths_N1 - 1)
    is_true_NL = columns_1L < lengths_N1
    is_true_NL[num_true:] = False
    is_true = is_true_NL.flatten().nonzero()[:, 0]
    targets = None if is_contiguous else rows_NL[is_true_NL]
    rows, end = rows_NL.flatten(), end if is_contiguous else 0
    return Group(num_seqs, num_true, length, 0, start, end, rows, is_true, targets, mask, hidden, is_alone=False)


def _is_alone(length: int, num_heads: int, reach: tuple[int, int], dtype: torch.dtype) -> bool:
    if length <= MAX_SDPA_LENGTH or num_heads * length * length > MAX_SCORES:
        return True
    return length >= MIN_ALONE_LENGTH and (dtype == torch.float32 or reach != (NO_LIMIT, NO_LIMIT))


def _hide(
    lengths: list[int], length: int, reach: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor | None, tuple[tuple[int, int, int], ...]]:
    """(mask, hidden ranges) of a group."""
    is_banded = reach != (NO_LIMIT, NO_LIMIT)
    if is_banded or (length <= MAX_MASKED_LENGTH and min(lengths) < length):
        return _mask(lengths, length, reach, dtype), ()
    hidden = []
    first = 0
    for seq_len, run in groupby(lengths):
        last = first + sum(1 for _ in run)
        if seq_len < length:
            hidden.append((first, last, seq_len))
        first = last
    return None, tuple(hidden)


def _mask(lengths: list[int], length: int, reach: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """[n, 1, length, length]: 0 where the row sees the column, else -inf.

    A row of padding sees every column, so that no row sees none.

    NOTE: full in its last two axes. Broadcast over rows of a few dozen columns, the addition takes ten times as long.
    """
    lengths_N = torch.tensor(lengths)[:, None, None, None]
    i, j = torch.arange(length)[:, None], torch.arange(length)
    seen = (visible(length, length, reach) & (j < lengths_N)) | (i >= lengths_N)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
