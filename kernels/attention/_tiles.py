"""Tiles of the triton attention: a table instead of trials in traffic. Unmeasured: no GPU has run them yet.

A warp group of Hopper (4 warps) multiplies 64 rows at once, so 64 rows want 4 warps and 128 rows 8. Larger tiles read
keys and values less often and need more registers: none is known to spill for the shapes of models on sm_80 and sm_90;
test_attention_compiled.py lists a spread of it.
"""

from typing import NamedTuple

import torch

SHORT_ROWS = 64


class Tile(NamedTuple):
    """Rows of queries and keys that a program holds at once, its warps, and how many tiles of keys are under way.

    Also the registers of a thread: None leaves them to ptxas.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


# By the width of a head, a power of two. Without tensor cores; ptxas spills to get by with 72 or 80 registers, if let:
_EXACT = {
    16: Tile(32, 32, 4, 2, 128),
    32: Tile(32, 32, 4, 2, 128),
    64: Tile(32, 32, 8, 2),
    128: Tile(16, 16, 4, 2, 128),
    256: Tile(16, 16, 4, 2),
}
# 16 bits, and 16 bits with the shared memory of Hopper:
_HALF = {
    16: Tile(128, 32, 8, 2),
    32: Tile(128, 32, 8, 2),
    64: Tile(128, 64, 8, 2),
    128: Tile(128, 32, 8, 2),
    256: Tile(64, 32, 8, 2),
}
_HALF_ON_HOPPER = {
    16: Tile(128, 64, 8, 3),
    32: Tile(128, 64, 8, 3),
    64: Tile(128, 64, 8, 3),
    128: Tile(128, 64, 8, 3),
    256: Tile(128, 32, 8, 2),
}
# Where the tile of a bias, or the tanh of a cap, takes registers too:
_LOADED = _HALF | {64: Tile(128, 32, 8, 2), 128: Tile(64, 64, 8, 2)}
_LOADED_ON_HOPPER = _HALF | {64: Tile(128, 32, 8, 2)}
MAX_HEAD_SIZE = max(_HALF)


def padded_head(head_size: int) -> int:
    """The width that a head is computed at: a power of two from 16."""
    return max(16, 1 << (head_size - 1).bit_length())


def tile_of(
    dtype: torch.dtype, head_size: int, capability: tuple[int, int], *, num_rows: int, is_loaded: bool = False
) -> Tile:
    """Returns the tile for a call.

    Args:
        dtype: Of q, k and v.
        head_size: K, at most MAX_HEAD_SIZE.
        capability: Of the device.
        num_rows: Tokens of the longest sequence times the query heads of a key head.
        is_loaded: Whether the scores get a bias or a cap.
    """
    width = padded_head(head_size)
    if dtype == torch.float32:
        return _EXACT[width]
    # From 12.0 on there are devices with as little shared memory as 8.6 has.
    if (9, 0) <= capability < (12, 0):
        tile = (_LOADED_ON_HOPPER if is_loaded else _HALF_ON_HOPPER)[width]
    else:
        tile = (_LOADED if is_loaded else _HALF)[width]
    if num_rows > SHORT_ROWS:
        return tile
    if width == MAX_HEAD_SIZE:
        return _HALF[width]
    block_n = 32 if is_loaded else tile.block_n
    # At 128 ptxas spills on sm_80 to get by with 168 registers, if let.
    return Tile(SHORT_ROWS, block_n, 4, tile.num_stages, 255 if width == 128 else None)
