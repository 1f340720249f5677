"""Readers of keys and values for the blockwise path: from a packed batch, or from the blocks of a cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._blockwise import ReadKeys
from ._buffers import buffer


def packed_reader(k: Tensor, v: Tensor) -> ReadKeys:
    """Reads from the rows of one sequence, [L, Hkv, K] each."""

    def read(first: int, last: int, num_columns: int) -> tuple[Tensor, Tensor]:
        return _arrange("k", k[first:last], num_columns), _arrange("v", v[first:last], num_columns)

    return read


def paged_reader(k_cache: Tensor, v_cache: Tensor, blocks: Sequence[int]) -> ReadKeys:
    """Reads from the blocks of one sequence, in caches [P, block size, Hkv, K]. Nothing else of them is read."""
    block_size = k_cache.shape[1]
    blocks_M = torch.tensor(blocks, dtype=torch.int64)
    # Blocks up to which each block's run of neighbours reaches.
    run_ends = list(range(1, len(blocks) + 1))
    for m in range(len(blocks) - 2, -1, -1):
        if blocks[m + 1] == blocks[m] + 1:
            run_ends[m] = run_ends[m + 1]

    def read_one(name: str, cache: Tensor, first: int, last: int, num_columns: int) -> Tensor:
        m0, m1 = first // block_size, -(-last // block_size)
        if run_ends[m0] >= m1:
            found = cache[blocks[m0] : blocks[m0] + m1 - m0]
        else:
            found = buffer("blocks_" + name, (m1 - m0, *cache.shape[1:]), cache.dtype)
            torch.index_select(cache, 0, blocks_M[m0:m1], out=found)
        offset = m0 * block_size
        return _arrange(name, found.flatten(0, 1)[first - offset : last - offset], num_columns)

    def read(first: int, last: int, num_columns: int) -> tuple[Tensor, Tensor]:
        return (
            read_one("k", k_cache, first, last, num_columns),
            read_one("v", v_cache, first, last, num_columns),
        )

    return read


def _arrange(name: str, rows: Tensor, num_columns: int) -> Tensor:
    """[Hkv, num_columns, K], contiguous: the rows [n, Hkv, K] by head, and zeros after them."""
    num_rows, num_heads, head_size = rows.shape
    arranged = buffer("tile_" + name, (num_heads, num_columns, head_size), rows.dtype)
    arranged[:, :num_rows].copy_(rows.transpose(0, 1))
    arranged[:, num_rows:].zero_()
    return arranged
