"""Sequences that share no call with others, on CPU: long ones block by block, short ones through SDPA."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from .._sdpa import attention_sdpa
from ._blockwise import attend_blockwise
from ._keys import packed_reader
from ._scoring import Scoring

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
    """Same as `attention`."""
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
