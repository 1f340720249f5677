"""The tier in memory: rows of this process, those that were not asked for longest leave first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

ENTRY_BYTES: Final = 300
"""What an entry takes beside its row: its key, two objects and a place in the table."""


class MemoryTier:
    """Rows by key, up to so many bytes. Belongs to one event loop.

    Args:
        max_bytes: Bytes of all entries.

    Attributes:
        num_bytes: Bytes of the entries that are held.
        num_evicted: Entries that have left because room was needed.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self.num_evicted = 0
        self._max_bytes = max_bytes
        self._rows: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._rows)

    def get(self, key: bytes) -> bytes | None:
        """Returns a row, which then counts as asked for; None where it is not held."""
        row = self._rows.get(key)
        if row is not None:
            self._rows.move_to_end(key)
        return row

    def put(self, key: bytes, row: bytes) -> None:
        """Holds a row. One that takes more than there is at all is left out."""
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
