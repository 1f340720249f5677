"""Which rows make a chunk, and which chunks are computed together. Depends on the lengths alone.

Chunks begin at their sequence's first row, and their sizes depend on its length alone, so that what a sequence gives
does not depend on its neighbours.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

MIN_SIZE = 16
# Weights of a block: 1 MiB in float32.
MAX_WEIGHTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one sequence.

    Attributes:
        sequence: Its number in the batch.
        start: First packed row.
        length: Rows, at most the size of its block.
        is_first: Whether it begins its sequence.
        is_last: Whether it ends its sequence.
    """

    sequence: int
    start: int
    length: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class Block:
    """Chunks that are computed together, each padded to `size` rows.

    Attributes:
        size: Rows of a chunk, padding included.
        chunks: Those of one sequence are in their order.
        start: First packed row of a block without padding.
        end: Row after its last.
        rows: [chunks * size], int64, on the host: the packed row that each row is read from; padding reads the last row
            of its own sequence. None where the block is rows `start` to `end`.
        is_padding: [chunks, size], bool, on the host. None likewise.
    """

    size: int
    chunks: tuple[Chunk, ...]
    start: int
    end: int
    rows: Tensor | None
    is_padding: Tensor | None

    @property
    def num_chunks(self) -> int:
        """Z."""
        return len(self.chunks)


def make_blocks(seq_lens: Sequence[int], chunk_size: int, num_heads: int) -> Iterator[Block]:
    """Yields the blocks of a batch, those of a sequence in order and with none of another between.

    Sequences of a single chunk share blocks with others of their size.
    """
    short: dict[int, list[Chunk]] = defaultdict(list)
    for n, (start, length) in enumerate(zip(accumulate(seq_lens, initial=0), seq_lens, strict=False)):
        if length == 0:
            continue
        if length <= chunk_size:
            short[size_of(length, chunk_size)].append(Chunk(n, start, length, True, True))
            continue
        end = start + length
        chunks = [
            Chunk(n, row, min(chunk_size, end - row), row == start, row + chunk_size >= end)
            for row in range(start, end, chunk_size)
        ]
        num_whole = length // chunk_size
        yield from _split(chunks[:num_whole], chunk_size, num_heads)
        for chunk in chunks[num_whole:]:
            yield _make_block([chunk], size_of(chunk.length, chunk_size))
    for size, chunks in short.items():
        yield from _split(chunks, size, num_heads)


def size_of(length: int, chunk_size: int) -> int:
    """Rows to compute for a chunk of `length` rows: a power of two."""
    return min(chunk_size, max(MIN_SIZE, 1 << (length - 1).bit_length()))


def _split(chunks: list[Chunk], size: int, num_heads: int) -> Iterator[Block]:
    """Blocks of a power of two of chunks.

    NOTE: oneDNN compiles a product for each new number of matrices, and keeps a limited number.
    """
    most = 1 << max(0, (MAX_WEIGHTS // (num_heads * size * size)).bit_length() - 1)
    first = 0
    while first < len(chunks):
        count = min(most, 1 << ((len(chunks) - first).bit_length() - 1))
        yield _make_block(chunks[first : first + count], size)
        first += count


def _make_block(chunks: list[Chunk], size: int) -> Block:
    start = chunks[0].start
    end = chunks[-1].start + chunks[-1].length
    if all(chunk.length == size and chunk.start == start + z * size for z, chunk in enumerate(chunks)):
        return Block(size, tuple(chunks), start, end, None, None)
    starts_Z1 = torch.tensor([chunk.start for chunk in chunks])[:, None]
    lengths_Z1 = torch.tensor([chunk.length for chunk in chunks])[:, None]
    offsets_1Q = torch.arange(size)
    rows_ZQ = starts_Z1 + torch.minimum(offsets_1Q, lengths_Z1 - 1)
    return Block(size, tuple(chunks), start, end, rows_ZQ.flatten(), offsets_1Q >= lengths_Z1)
