"""How large a forward may be, and what the largest takes: found by running it, before others are given the memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ...memory.memory_meter import MemoryGauge
from ...runner import DeviceMemoryError

logger = logging.getLogger("penstock.engine")

_LEAST: Final = 64
"""Tokens. Where a forward of so many finds no memory, the model cannot be served."""


class LargestBatch(NamedTuple):
    """The largest forward that runs.

    Attributes:
        num_tokens: Its tokens, however they are parted into sequences.
        num_bytes: The most Bytes that one of them takes at once, beside what is there before and after it.
    """

    num_tokens: int
    num_bytes: int


def largest_batch(
    run: Callable[[Sequence[int]], object], gauge: MemoryGauge, *, num_tokens: int, longest: int, max_num_seqs: int
) -> LargestBatch:
    """Runs the largest batches, and smaller ones where there is too little memory for them.

    Args:
        run: Runs a batch of sequences of these lengths, for whatever the model may be asked for.
        gauge: Of the device.
        num_tokens: Tokens that one forward is to have.
        longest: Tokens of the longest sequence.
        max_num_seqs: Sequences that one forward may have.

    Raises:
        DeviceMemoryError: Even a small batch found too little.
    """
    while True:
        try:
            num_bytes = max(
                _taken(run, gauge, lengths) for lengths in largest_shapes(num_tokens, longest, max_num_seqs)
            )
        except DeviceMemoryError:
            if num_tokens <= _LEAST:
                raise
            smaller = max(num_tokens // 2, _LEAST)
            logger.warning("out of memory in a forward of %d tokens; trying %d.", num_tokens, smaller)
            num_tokens = smaller
        else:
            return LargestBatch(num_tokens, num_bytes)


def largest_shapes(num_tokens: int, longest: int, max_num_seqs: int) -> list[list[int]]:
    """Returns lengths that add up to so many tokens: the longest sequences, and as many as there may be."""
    longest = min(longest, num_tokens)
    num_long, rest = divmod(num_tokens, longest)
    num_short = min(num_tokens, max_num_seqs)
    each, more = divmod(num_tokens, num_short)
    many = [min(each + (i < more), longest) for i in range(num_short)]
    return [[longest] * min(num_long, max_num_seqs) + [rest] * (rest > 0 and num_long < max_num_seqs), many]


def _taken(run: Callable[[Sequence[int]], object], gauge: MemoryGauge, lengths: Sequence[int]) -> int:
    gauge.begin()
    run(lengths)
    return gauge.taken() or 0
