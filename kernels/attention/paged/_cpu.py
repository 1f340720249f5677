"""Paged attention on CPU: each chunk block by block, its keys read from the cache tile by tile."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cpu._blockwise import attend_blockwise, paged_reader
from ..cpu._scoring import Scoring


def attention_paged_cpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
    left: int,
    softcap: float | None,
) -> Tensor:
    """Same as `attention_paged`; `left` is the reach of the window, negative for no limit."""
    block_size, num_kv_heads = k_cache.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype)
    scoring = Scoring(scale, (left, 0), None, softcap, q.dtype)
    tables_NM = block_tables.long()
    start = 0
    with torch.no_grad():
        for blocks_M, length, context_len in zip(tables_NM.unbind(0), seq_lens, context_lens, strict=True):
            if length == 0:
                continue
            rows = slice(start, start + length)
            total = context_len + length
            read = paged_reader(k_cache, v_cache, blocks_M[: -(-total // block_size)])
            attend_blockwise(q[rows], read, num_kv_heads, context_len, total, scoring, out[rows])
            start += length
    return out
