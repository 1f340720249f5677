"""Readers of keys and values for the blockwise path: from a packed batch, or from the blocks of a cache."""

import torch
from torch import Tensor

from ..._scratch import scratch
from ._blockwise import ReadKeys


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
