"""Assigns the rows of a packed batch to programs on the device, so that the host needs no list of sequences."""

import triton
import triton.language as tl


@triton.jit
def find_tile(cu_seqlens_ptr, tile, num_seqs, SIZE: tl.constexpr, ROWS_PER_TOKEN: tl.constexpr = 1):
    """Returns (sequence n, its first row, first row of the tile, end row of the sequence).

    The tiles of sequence n start at number cu_seqlens[n] * ROWS_PER_TOKEN // SIZE + n. Tile numbers of two sequences
    never overlap, and a grid of T * ROWS_PER_TOKEN // SIZE + N programs covers all tiles. A tile that starts past the
    end of its sequence has no rows.
    """
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_before = tl.load(cu_seqlens_ptr + middle) * ROWS_PER_TOKEN // SIZE + middle <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle - 1)
    start = tl.load(cu_seqlens_ptr + low) * ROWS_PER_TOKEN
    end = tl.load(cu_seqlens_ptr + low + 1) * ROWS_PER_TOKEN
    return low, start, start + (tile - start // SIZE - low) * SIZE, end
