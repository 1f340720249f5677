"""How a packed batch is cut into batched matrix products on CPU: computed once per batch, read by every layer.

Two costs pull apart. A call costs about as much as a few million multiply-adds, whatever its size, so sequences
should share calls; and sequences of unequal length can share one only when the shorter are padded. A dynamic program
chooses which lengths share. All sizes are rounded up to a few, because oneDNN compiles a kernel for each new shape,
0.3 to 0.9 ms, and keeps a limited number of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby

import torch

from ._groups import MAX_SCORES, NO_LIMIT, Group, make_group

GROUP_SEQS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

# Seconds, measured on 2 Zen 5 cores in bfloat16 with head sizes 32 and 64; only their ratios matter.
CALL_COST_S = 90e-6
ROW_COST_S = 0.2e-6
SCORE_COST_S = 0.5e-9


def reach_of(window: tuple[int, int] | None, is_causal: bool, longest: int) -> tuple[int, int]:
    """(left, right): the window with the causal limit in it; -1 where it hides nothing of a sequence of `longest`."""
    left, right = window or (NO_LIMIT, NO_LIMIT)
    if is_causal:
        right = 0
    return left if 0 <= left < longest - 1 else NO_LIMIT, right if 0 <= right < longest - 1 else NO_LIMIT


def padded_length(length: int) -> int:
    """The length that a length is computed at: few sizes where sequences share calls, close ones where they do not."""
    if length <= 32:
        step = 8
    elif length <= 160:
        step = 16
    elif length <= 512:
        step = 32
    else:
        step = 64
    return -(-length // step) * step


@dataclass(frozen=True)
class AttentionPlan:
    """How one packed batch is attended, for one shape of attention. Immutable; shared by layers, not by batches.

    Attributes:
        key: What the plan was built for: lengths, query heads, key heads, dtype, reach.
    """

    key: tuple[tuple[int, ...], int, int, torch.dtype, tuple[int, int]]

    @classmethod
    def build(
        cls,
        seq_lens: Sequence[int],
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        dtype: torch.dtype = torch.float32,
        is_causal: bool = False,
        window: tuple[int, int] | None = None,
        device: torch.device | str = "cpu",
    ) -> "AttentionPlan":
        """Plans the attention of a packed batch: about 0.2 ms, spent at the first use and only where a plan is used.

        Args:
            seq_lens: N lengths in packed order; 0 is allowed. The plan is fastest where they ascend.
            num_heads: Query heads, H.
            num_kv_heads: Key heads; None means H.
            dtype: Of q, k and v.
            is_causal: As in `attention`.
            window: As in `attention`. Layers that differ in it need a plan each.
            device: Of q, k and v. Only the CPU's backend cuts batches by a plan.

        Returns:
            The plan.
        """
        del device
        reach = reach_of(window, is_causal, max(seq_lens, default=0))
        return cls((tuple(seq_lens), num_heads, num_kv_heads or num_heads, dtype, reach))

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """The lengths that it was built for."""
        return self.key[0]

    @cached_property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.seq_lens)

    @cached_property
    def longest(self) -> int:
        """The longest sequence."""
        return max(self.seq_lens, default=0)

    @property
    def reach(self) -> tuple[int, int]:
        """The window with the causal limit in it, -1 for no limit."""
        return self.key[4]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """What is computed together; in no particular order. Every sequence that is not empty is in one of them."""
        seq_lens, num_heads, _, dtype, reach = self.key
        starts = [0, *accumulate(seq_lens)]
        order = sorted((n for n, length in enumerate(seq_lens) if length), key=lambda n: seq_lens[n])
        lengths = [padded_length(seq_lens[n]) for n in order]
        groups = []
        for first, last in _runs(lengths, num_heads):
            # From the long end, so that the remainder is padded to its own longest.
            while last > first:
                length = lengths[last - 1]
                num_seqs = _group_seqs(last - first, length, num_heads)
                members = sorted(order[max(first, last - num_seqs) : last])
                groups.append(make_group(members, num_seqs, length, seq_lens, starts, num_heads, reach, dtype))
                last -= len(members)
        return tuple(groups)


def _seq_cost_s(length: int, num_heads: int) -> float:
    return length * ROW_COST_S + num_heads * length * length * SCORE_COST_S


def _group_seqs(count: int, length: int, num_heads: int) -> int:
    """How many sequences the next group computes, of `count` that are left: one of `GROUP_SEQS`.

    More than are left, where the fill costs less than another call.
    """
    limit = min(max(1, MAX_SCORES // (num_heads * length * length)), GROUP_SEQS[-1])
    fitting = [size for size in GROUP_SEQS if size <= limit]
    below = max(size for size in fitting if size <= count)
    above = min((size for size in fitting if size >= count), default=below)
    return above if (above - count) * _seq_cost_s(length, num_heads) < CALL_COST_S else below


def _runs(lengths: list[int], num_heads: int) -> list[tuple[int, int]]:
    """Cuts ascending padded lengths into ranges that share a size, at least total cost, by dynamic programming."""
    bounds = [0]
    for _, equal in groupby(lengths):
        bounds.append(bounds[-1] + sum(1 for _ in equal))
    # Per bound: the least cost up to it, and the bound before it.
    best: list[tuple[float, int]] = [(0.0, 0)]
    for last in range(1, len(bounds)):
        length = lengths[bounds[last] - 1]
        options = [
            (best[first][0] + _range_cost_s(bounds[last] - bounds[first], length, num_heads), first)
            for first in range(last)
        ]
        best.append(min(options))
    runs = []
    last = len(bounds) - 1
    while last:
        first = best[last][1]
        runs.append((bounds[first], bounds[last]))
        last = first
    return runs


@lru_cache(maxsize=4096)
def _range_cost_s(count: int, length: int, num_heads: int) -> float:
    """Seconds for `count` sequences of `length`."""
    cost_s = 0.0
    while count > 0:
        num_seqs = _group_seqs(count, length, num_heads)
        cost_s += CALL_COST_S + num_seqs * _seq_cost_s(length, num_heads)
        count -= num_seqs
    return cost_s
