"""A bell between threads: one sleeps until somebody rings."""

from __future__ import annotations

import contextlib
import os
from typing import Final

_MOST: Final = 1 << 16
"""Bytes of a pipe."""


class Bell:
    """Rings are kept until somebody waits, and many count as one. Code outside of Python rings by writing to `fd`.

    Attributes:
        fd: Descriptor to write to; it never blocks.
    """

    def __init__(self) -> None:
        self._fds: tuple[int, ...] = ()
        self._fds = self._waiting_fd, self.fd = os.pipe()
        os.set_blocking(self.fd, False)

    def __del__(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def ring(self) -> None:
        """Wakes whoever waits, or will."""
        with contextlib.suppress(BlockingIOError):  # it has rung as often as a pipe can keep
            os.write(self.fd, b"\0")

    def wait(self) -> None:
        """Sleeps until it has rung since the last call."""
        os.read(self._waiting_fd, _MOST)
