"""What a server does with the tier on disk: reads it where that takes microseconds, writes it from a thread of its own.

Nothing that happens to the disk reaches a request. A full one is left alone for a while; a damaged file for good.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from .disk import DiskError, DiskTier, NoRoomError

logger = logging.getLogger("penstock.engine")

_AT_ONCE: Final = 128
"""Rows that are read in the turn of the event loop that asks for them, about 0.5 ms; more are read in a thread."""
_MAX_WAITING_BYTES: Final = 64 * 2**20
"""Bytes of rows that wait to be written; further rows are not written."""
_PAUSE_S: Final = 30.0
"""Seconds for which nothing is written to a full disk."""
_GATHER_S: Final = 0.05
"""Seconds in which rows come together before they are written: each time costs the disk a flush."""
_CLOSE_S: Final = 10.0


class SharedTier:
    """The rows that processes share. `find`, `num_bytes`, `put` and `close` belong to one event loop.

    Args:
        folder: See DiskTier.
        max_bytes: See DiskTier.
        clock_s: Monotonic time.

    Attributes:
        tier: Tier to read and write.
        is_working: Rows are read, and written.
        num_dropped: Rows that were not written: no room on the disk, or more than it takes in.

    Raises:
        DiskError: See DiskTier.
    """

    def __init__(self, folder: Path, max_bytes: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.tier = DiskTier(folder, max_bytes)
        self.is_working = True
        self.num_dropped = 0
        self._num_bytes = 0
        self._clock_s = clock_s
        self._is_damaged = False
        self._resumes_s = 0.0
        self._waiting: dict[bytes, bytes] = {}
        self._num_waiting_bytes = 0
        self._is_ending = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._write, name="penstock-cache", daemon=True)
        self._thread.start()

    async def find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Returns the row of each key; None where there is none."""
        if self._is_damaged or not keys:
            return [None] * len(keys)
        try:
            if len(keys) <= _AT_ONCE:
                return self.tier.read(keys)
            return await asyncio.to_thread(self.tier.read, keys)
        except DiskError as error:
            self._note(error)
            return [None] * len(keys)

    def num_bytes(self) -> int:
        """Returns the Bytes that the rows of all processes take now; as before while the disk cannot be read."""
        if not self._is_damaged:
            try:
                self._num_bytes = self.tier.num_bytes()
            except DiskError as error:
                self._note(error)
        return self._num_bytes

    def put(self, key: bytes, row: bytes) -> None:
        """Has a row written soon, if it can be."""
        with self._wake:
            is_much = self._num_waiting_bytes + len(row) > _MAX_WAITING_BYTES
            if self._is_damaged or is_much:
                self.num_dropped += 1
                return
            if not self._waiting:
                self._wake.notify()
            self._num_waiting_bytes += len(row)
            self._waiting[key] = row

    def close(self) -> None:
        """Writes the waiting rows and closes the files."""
        with self._wake:
            self._is_ending = True
            self._wake.notify()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():  # else another process has stopped while it writes: the files stay open
            self.tier.close()

    def _write(self) -> None:
        """Writes waiting rows until the end. Runs on the thread."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._is_ending)
                if not self._waiting:
                    return
                self._wake.wait_for(lambda: self._is_ending, _GATHER_S)
                waiting, self._waiting, self._num_waiting_bytes = self._waiting, {}, 0
            self._write_rows(list(waiting.items()))

    def _write_rows(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        if self._is_damaged or self._clock_s() < self._resumes_s:
            self.num_dropped += len(rows)
            return
        try:
            self.tier.write(rows)
        except DiskError as error:
            self.num_dropped += len(rows)
            self._note(error)
        else:
            if not self.is_working:
                logger.info("--cache-dir: vectors are written again")
            self.is_working = True

    def _note(self, error: DiskError) -> None:
        """Logs the fault once and stops using the disk."""
        is_new = self.is_working or (not isinstance(error, NoRoomError) and not self._is_damaged)
        self.is_working = False
        if isinstance(error, NoRoomError):
            self._resumes_s = self._clock_s() + _PAUSE_S
            outcome = "what is there is read, and nothing new is written until there is room"
        else:
            self._is_damaged = True
            outcome = "the server goes on without it; remove the folder and start again to have it back"
        if is_new:
            logger.error("--cache-dir: %s; %s", error, outcome)
