"""Which rows a program owns, where sequences lie end to end: found on the device, so that the host need not know."""

import triton
import triton.language as tl


@triton.jit
def find_tile(cu_seqlens_ptr, tile, num_seqs, SIZE: tl.constexpr, ROWS_PER_TOKEN: tl.constexpr = 1):
    """(Sequence n, its first row, first row of the tile, row after the sequence's last).

    The tiles of sequence n begin at number cu_seqlens[n] * ROWS_PER_TOKEN // SIZE + n. No two sequences share a number,
    and T * ROWS_PER_TOKEN // SIZE + N numbers are enough, so that the host need not know where sequences lie; a tile
    that begins past its sequence's end has no rows.
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
