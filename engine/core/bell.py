"""A bell: one thread sleeps until another rings, or until a socket has something to say."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable
from typing import Final, Protocol

_MOST: Final = 1 << 16
"""Bytes of a pipe."""


class HasDescriptor(Protocol):
    """A file, a socket, a connection."""

    def fileno(self) -> int:
        """Returns its descriptor."""
        ...


class Bell:
    """Rings are kept until somebody waits, and many count as one. Code outside of Python rings by writing to `fd`.

    All but `ring` belongs to the thread that waits.

    Attributes:
        fd: Descriptor to write to; it never blocks.
    """

    def __init__(self) -> None:
        self._fds: tuple[int, ...] = ()
        self._fds = self._waiting_fd, self.fd = os.pipe()
        os.set_blocking(self.fd, False)
        self._selector = selectors.DefaultSelector()
        self._paused: list[tuple[float, HasDescriptor, Callable[[], None]]] = []
        self._selector.register(self._waiting_fd, selectors.EVENT_READ)

    def __del__(self) -> None:
        for fd in self._fds:
            os.close(fd)
        if self._fds:
            self._selector.close()

    def ring(self) -> None:
        """Wakes whoever waits, or will."""
        with contextlib.suppress(BlockingIOError):  # it has rung as often as a pipe can keep
            os.write(self.fd, b"\0")

    def watch(self, file: HasDescriptor, hear: Callable[[], None]) -> None:
        """Lets whatever there is to read wake who waits, too; `hear` reads it."""
        self._selector.register(file, selectors.EVENT_READ, hear)

    def ignore(self, file: HasDescriptor) -> None:
        """Ends `watch`, before the file is closed."""
        self._selector.unregister(file)

    def pause(self, file: HasDescriptor, seconds: float) -> None:
        """Ignores a watched file for some seconds. `wait` may return nothing when they are over."""
        key = self._selector.unregister(file)
        self._paused.append((time.monotonic() + seconds, file, key.data))

    def wait(self) -> list[Callable[[], None]]:
        """Sleeps until it has rung since the last call, or a file that it watches can be read.

        Returns:
            What reads the files that can be read: for the caller to call.
        """
        return self._heard(None)

    def look(self) -> list[Callable[[], None]]:
        """Does not sleep, else as `wait`."""
        return self._heard(0)

    def _heard(self, timeout_s: float | None) -> list[Callable[[], None]]:
        heard = []
        if self._paused:
            pause_s = self._resume()
            timeout_s = pause_s if timeout_s is None else timeout_s
        for key, _ in self._selector.select(timeout_s):
            if key.fd == self._waiting_fd:
                os.read(self._waiting_fd, _MOST)
            else:
                heard.append(key.data)
        return heard

    def _resume(self) -> float | None:
        """Watches files again whose pause is over. Returns the seconds until the next pause ends; None for none."""
        now_s, paused = time.monotonic(), self._paused
        self._paused = [entry for entry in paused if entry[0] > now_s]
        for until_s, file, hear in paused:
            if until_s <= now_s:
                self.watch(file, hear)
        return min((until_s - now_s for until_s, _, _ in self._paused), default=None)
