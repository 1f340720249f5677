"""Sizes at which forwards are recorded, and the one that a batch takes. Plain Python.

A recorded forward has as many rows as its bucket, and attention has programs for as many sequences of the bucket's
longest: what a batch does not fill is work for nothing. Rows past the last token are less than half of all, but for
the smallest bucket, and for many short texts: the buckets of as few tokens have too few sequences for them, and they
take one of the next two sizes. Programs of sequences that are not there end at once, yet many of them take time: the
more sequences a bucket has, the shorter its longest.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, NamedTuple

_TOKENS: Final = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_SEQS: Final = (8, 32, 128, 512)
_LEAST_MEAN: Final = 4
"""Tokens. A bucket is not for more sequences than have so many on average."""
_SPREAD: Final = 16
"""The longest sequence of a bucket has so many times the tokens of the average one."""
_LEAST_LONGEST: Final = 128
"""Tokens: a tile of attention, below which nothing is saved."""
_SIZES_TRIED: Final = 3
"""The smallest that has the tokens of a batch, and those above it that may have the sequences, too."""


class Bucket(NamedTuple):
    """A size of recorded forwards.

    Attributes:
        num_tokens: Rows.
        num_seqs: Sequences, empty ones included.
        max_seqlen: Tokens of the longest sequence that fits.
    """

    num_tokens: int
    num_seqs: int
    max_seqlen: int

    def seq_lens(self) -> tuple[int, ...]:
        """Returns lengths that fill it, the longest among them."""
        lengths, left = [], self.num_tokens
        for _ in range(self.num_seqs):
            lengths.append(min(self.max_seqlen, left))
            left -= lengths[-1]
        return tuple(lengths)


class Buckets:
    """The buckets of one model.

    Args:
        max_tokens: Tokens of the largest.
        max_model_len: Tokens of the longest sequence.
        max_num_seqs: Sequences of the largest batch.
    """

    def __init__(self, max_tokens: int, max_model_len: int, max_num_seqs: int) -> None:
        self._sizes = [size for size in _TOKENS if size <= max_tokens]
        self._of_size = {size: _of_size(size, max_model_len, max_num_seqs) for size in self._sizes}

    def all(self) -> list[Bucket]:
        """Returns them, the largest first."""
        return [bucket for size in reversed(self._sizes) for bucket in reversed(self._of_size[size])]

    def find(self, num_tokens: int, num_seqs: int, max_seqlen: int) -> Bucket | None:
        """Returns the smallest that a batch fits in; None where there is none, or all have far more tokens."""
        place = bisect_left(self._sizes, num_tokens)
        for size in self._sizes[place : place + _SIZES_TRIED]:
            for bucket in self._of_size[size]:
                if num_seqs <= bucket.num_seqs:
                    return bucket if max_seqlen <= bucket.max_seqlen else None
        return None


def _of_size(num_tokens: int, max_model_len: int, max_num_seqs: int) -> list[Bucket]:
    """The buckets of so many tokens, those of few sequences first. All of the tokens find a place in each."""
    found = []
    for place, num_seqs in enumerate(_SEQS):
        if place and (num_seqs * _LEAST_MEAN > num_tokens or _SEQS[place - 1] >= max_num_seqs):
            break
        longest = max(_SPREAD * num_tokens // num_seqs, _LEAST_LONGEST)
        bucket = Bucket(num_tokens, num_seqs, min(longest, num_tokens, max_model_len))
        if num_seqs * bucket.max_seqlen >= num_tokens:
            found.append(bucket)
    return found
