"""The paged KV cache of decoders, and the blocks of one batch.

Shape letters: T packed tokens, N sequences, L layers, P blocks, B blocks of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _abi
from .library import Array, address_of


class PagedKvCache:
    """KV cache that the library reads and writes in place.

    Args:
        keys: L arrays [P, block size, key heads, head size], contiguous, float32 or a 2-byte dtype for bfloat16.
        values: As `keys`.

    Raises:
        ValueError: The arrays differ in shape or dtype, or are not contiguous.
    """

    def __init__(self, keys: Sequence[Array], values: Sequence[Array]) -> None:
        arrays = [*keys, *values]
        first = arrays[0]
        if len(keys) != len(values) or not all(
            a.shape == first.shape and a.dtype == first.dtype and a.flags.c_contiguous and a.ndim == 4 for a in arrays
        ):
            raise ValueError("keys and values must be contiguous arrays of one shape and dtype, one per layer")
        self._arrays = arrays
        self.num_layers = len(keys)
        self.num_blocks, self.block_size, self.num_kv_heads, self.head_size = first.shape
        self.itemsize = first.itemsize
        self.keys, self.values = (np.array([address_of(a) for a in part], np.uintp) for part in (keys, values))

    @classmethod
    def allocate(cls, num_layers: int, shape: tuple[int, int, int, int], itemsize: int) -> PagedKvCache:
        """Allocates blocks for every layer. Physical memory is used only for blocks that have been written.

        Args:
            num_layers: L.
            shape: [P, block size, key heads, head size].
            itemsize: 4 for float32, 2 for bfloat16.
        """
        dtype = np.float32 if itemsize == 4 else np.uint16
        keys, values = ([np.empty(shape, dtype) for _ in range(num_layers)] for _ in range(2))
        return cls(keys, values)


@dataclass(frozen=True, slots=True, eq=False)
class BatchBlocks:
    """Blocks of the KV cache that the chunks of a batch read and write.

    Attributes:
        cache: The KV cache.
        context_lens: [N] int32, tokens of each sequence before its chunk.
        block_tables: [N, B] int32, blocks of the earlier tokens; further entries are ignored.
        slot_mapping: [T] int64, block * block size + row for the keys and values of each token; -1: not stored.
    """

    cache: PagedKvCache
    context_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]

    def check(self, num_seqs: int, num_tokens: int) -> None:
        """Raises ValueError for values that would make the library access invalid memory."""
        cache, context_lens_N, tables_NB = self.cache, self.context_lens, self.block_tables
        if context_lens_N.shape != (num_seqs,) or (context_lens_N < 0).any():
            raise ValueError(f"context_lens must be {num_seqs} numbers of at least 0")
        counts_N = -(-context_lens_N // cache.block_size)
        if tables_NB.ndim != 2 or len(tables_NB) != num_seqs or int(counts_N.max()) > tables_NB.shape[1]:
            raise ValueError(f"block_tables must hold the blocks of {num_seqs} sequences")
        is_used_NB = np.arange(tables_NB.shape[1]) < counts_N[:, None]
        if ((tables_NB < 0) | (tables_NB >= cache.num_blocks))[is_used_NB].any():
            raise ValueError(f"block_tables must contain blocks from 0 to {cache.num_blocks - 1}")
        num_slots = cache.num_blocks * cache.block_size
        if (
            self.slot_mapping.shape != (num_tokens,)
            or (self.slot_mapping < -1).any()
            or (self.slot_mapping >= num_slots).any()
        ):
            raise ValueError(f"slot_mapping must be {num_tokens} numbers from -1 to {num_slots - 1}")

    def struct(self) -> tuple[_abi.KvBlocks, tuple[NDArray[Any], ...]]:
        """Returns the C struct and the arrays that it points to."""
        arrays = (
            np.ascontiguousarray(self.context_lens, np.int32),
            np.ascontiguousarray(self.block_tables, np.int32),
            np.ascontiguousarray(self.slot_mapping, np.int64),
        )
        cache = self.cache
        struct = _abi.KvBlocks(
            keys=address_of(cache.keys),
            values=address_of(cache.values),
            block_size=cache.block_size,
            context_lens=address_of(arrays[0]),
            tables=address_of(arrays[1]),
            table_width=arrays[1].shape[1],
            slots=address_of(arrays[2]),
        )
        return struct, arrays
