"""The vector cache: a tier in memory, and a tier on disk that processes share."""

from __future__ import annotations

import logging
import math
import secrets
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ...private_files import SECRET_BYTES
from ...protocol.batch_outputs import Arrays

if TYPE_CHECKING:  # lmdb is an extra
    from .disk import SharedTier


logger = logging.getLogger("penstock.engine")

ENTRY_BYTES: Final = 300
"""Bytes of an entry in addition to its row: its key, two objects and a slot of the table."""
_ALIGNMENT: Final = 4


class MemoryTier:
    """The most recently used rows by key, up to a limit in bytes. Belongs to one event loop.

    Args:
        max_bytes: Limit of the bytes of all entries.

    Attributes:
        num_bytes: Bytes of all entries.
        num_evicted: Number of evicted entries.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self.num_evicted = 0
        self._max_bytes = max_bytes
        self._rows: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: bytes) -> bytes | None:
        """Returns a row and marks it as used; None if the tier does not have it."""
        row = self._rows.get(key)
        if row is not None:
            self._rows.move_to_end(key)
        return row

    def put(self, key: bytes, row: bytes) -> None:
        """Stores a row, unless it is larger than the whole tier."""
        if ENTRY_BYTES + len(row) > self._max_bytes:
            return
        old = self._rows.pop(key, None)
        if old is not None:
            self.num_bytes -= ENTRY_BYTES + len(old)
        self._rows[key] = row
        self.num_bytes += ENTRY_BYTES + len(row)
        while self.num_bytes > self._max_bytes:
            _, evicted = self._rows.popitem(last=False)
            self.num_bytes -= ENTRY_BYTES + len(evicted)
            self.num_evicted += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Size and evictions of a tier.

    Attributes:
        name: "memory" or "disk".
        num_bytes: Bytes of its rows.
        num_evicted: Rows that this process has evicted.
        num_dropped: Rows that were not stored because the disk was full or too slow.
        num_damaged: Damaged rows that were found.
        is_working: Whether the tier stores rows.
    """

    name: str
    num_bytes: int
    num_evicted: int
    num_dropped: int = 0
    num_damaged: int = 0
    is_working: bool = True


class CacheHits(NamedTuple):
    """The found outputs by key, and the number of keys that were found in memory."""

    arrays: dict[bytes, Arrays]
    num_in_memory: int


class VectorCache:
    """Outputs of models by key (keys.py). Belongs to one event loop; the engines of a process share it.

    If the folder cannot be used, logs an error and uses only memory.

    Args:
        max_bytes: Bytes of rows in memory; 0 stores none.
        folder: Folder of the rows on disk (disk.py), which need the package lmdb; None stores none on disk.
        disk_bytes: Size of a new file in the folder.

    Attributes:
        secret: Secret of the key hashes, the same in all processes that share a folder.
    """

    def __init__(self, max_bytes: int, folder: Path | None = None, disk_bytes: int = 0) -> None:
        self._memory = MemoryTier(max_bytes)
        self._has_folder = folder is not None
        self._shared = None if folder is None else _open(folder, disk_bytes)
        self.secret = secrets.token_bytes(SECRET_BYTES) if self._shared is None else self._shared.tier.secret

    @property
    def shared_secret(self) -> bytes | None:
        """The secret if other processes share it through the folder; None without a folder."""
        return None if self._shared is None else self.secret

    async def find(self, keys: Sequence[bytes]) -> CacheHits:
        """Returns the outputs of the keys that are in memory or on disk."""
        found = ((key, self._memory.get(key)) for key in keys)
        rows = {key: row for key, row in found if row is not None}
        num_in_memory = len(rows)
        if self._shared is not None and num_in_memory < len(keys):
            others = [key for key in keys if key not in rows]
            for key, row in zip(others, await self._shared.find(others), strict=True):
                if row is not None:
                    rows[key] = row
                    self._memory.put(key, row)
        return CacheHits({key: unpack(row) for key, row in rows.items()}, num_in_memory)

    def store(self, key: bytes, arrays: Arrays) -> None:
        """Stores the outputs of one input if all values are finite."""
        row = pack(arrays)
        if row is None:
            return
        self._memory.put(key, row)
        if self._shared is not None:
            self._shared.put(key, row)

    def stats(self) -> list[TierStats]:
        """Returns the size and evictions of each configured tier."""
        memory = self._memory
        tiers = [TierStats(name="memory", num_bytes=memory.num_bytes, num_evicted=memory.num_evicted)]
        if self._shared is not None:
            tier = self._shared.tier
            tiers.append(
                TierStats(
                    name="disk",
                    num_bytes=self._shared.num_bytes(),
                    num_evicted=tier.num_evicted,
                    num_dropped=self._shared.num_dropped,
                    num_damaged=tier.num_damaged,
                    is_working=self._shared.is_working,
                )
            )
        elif self._has_folder:
            tiers.append(TierStats(name="disk", num_bytes=0, num_evicted=0, is_working=False))
        return tiers

    def close(self) -> None:
        """Writes the waiting rows and closes the folder."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None


def _open(folder: Path, disk_bytes: int) -> SharedTier | None:
    """Opens the rows on disk. Logs an error and returns None if they cannot be used."""
    from .disk import DiskError, SharedTier  # lmdb is an extra

    try:
        return SharedTier(folder, disk_bytes)
    except DiskError as error:
        logger.error("--cache-dir: %s; the server continues without the folder", error)
        return None


def pack(arrays: Arrays) -> bytes | None:
    """Returns arrays as bytes; None if a value is not finite.

    Format: count; for each array the length of its name, name, number of axes, axes; zeros up to a multiple of 4; the
    values as float32.
    """
    head = [bytes([len(arrays)])]
    for name, array in arrays.items():
        head.append(struct.pack(f"<B{len(name)}sB{array.ndim}I", len(name), name.encode(), array.ndim, *array.shape))
        if not np.isfinite(array).all():
            return None
    packed = b"".join(head)
    padding = bytes(-len(packed) % _ALIGNMENT)
    return b"".join(
        (packed, padding, *(np.ascontiguousarray(array, np.float32).tobytes() for array in arrays.values()))
    )


def unpack(packed: bytes) -> Arrays:
    """Returns the arrays of a packed row as read-only views."""
    shapes: dict[str, tuple[int, ...]] = {}
    offset = 1
    for _ in range(packed[0]):
        end = offset + 1 + packed[offset]
        name = packed[offset + 1 : end].decode()
        num_axes = packed[end]
        shapes[name] = struct.unpack_from(f"<{num_axes}I", packed, end + 1)
        offset = end + 1 + 4 * num_axes
    values = np.frombuffer(packed, np.float32, offset=offset + -offset % _ALIGNMENT)
    arrays: Arrays = {}
    first = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        arrays[name] = values[first : first + size].reshape(shape)
        first += size
    return arrays
