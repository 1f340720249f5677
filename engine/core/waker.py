"""Wakes the engine thread: from another thread, from C code, or when a socket becomes readable."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from _typeshed import HasFileno

_PIPE_BYTES: Final = 1 << 16


class Waker:
    """Lets one thread sleep until another thread wakes it or a watched file is readable.

    Wake-ups are level-triggered: several wake-ups before a wait count as one. C code wakes the thread by writing to
    `fd`. All methods but `wake` belong to the waiting thread.

    Attributes:
        fd: Non-blocking descriptor to write to.
    """

    def __init__(self) -> None:
        self._fds: tuple[int, ...] = ()
        self._fds = self._waiting_fd, self.fd = os.pipe()
        os.set_blocking(self.fd, False)
        self._selector = selectors.DefaultSelector()
        self._paused: list[tuple[float, HasFileno, Callable[[], None]]] = []
        self._selector.register(self._waiting_fd, selectors.EVENT_READ)

    def __del__(self) -> None:
        for fd in self._fds:
            os.close(fd)
        if self._fds:
            self._selector.close()

    def wake(self) -> None:
        """Ends the current call of `wait`, or the next one."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups
            os.write(self.fd, b"\0")

    def watch(self, file: HasFileno, on_readable: Callable[[], None]) -> None:
        """Also wakes the thread when `file` is readable; `wait` then returns `on_readable`."""
        self._selector.register(file, selectors.EVENT_READ, on_readable)

    def unwatch(self, file: HasFileno) -> None:
        """Ends `watch`. Call it before the file is closed."""
        self._selector.unregister(file)

    def pause(self, file: HasFileno, seconds: float) -> None:
        """Ignores a watched file for some seconds. `wait` may return an empty list at the end of the pause."""
        key = self._selector.unregister(file)
        self._paused.append((time.monotonic() + seconds, file, key.data))

    def wait(self) -> list[Callable[[], None]]:
        """Sleeps until the next wake-up, or until a watched file is readable.

        Returns:
            The `on_readable` callbacks of the readable files. The caller calls them.
        """
        return self._select(None)

    def poll(self) -> list[Callable[[], None]]:
        """Like `wait`, but does not sleep."""
        return self._select(0)

    def _select(self, timeout_s: float | None) -> list[Callable[[], None]]:
        callbacks = []
        if self._paused:
            pause_s = self._resume()
            timeout_s = pause_s if timeout_s is None else timeout_s
        for key, _ in self._selector.select(timeout_s):
            if key.fd == self._waiting_fd:
                os.read(self._waiting_fd, _PIPE_BYTES)
            else:
                callbacks.append(key.data)
        return callbacks

    def _resume(self) -> float | None:
        """Watches paused files again after their pause. Returns the seconds until the next pause ends, or None."""
        now_s = time.monotonic()
        paused = self._paused
        self._paused = [entry for entry in paused if entry[0] > now_s]
        for until_s, file, on_readable in paused:
            if until_s <= now_s:
                self.watch(file, on_readable)
        return min((until_s - now_s for until_s, _, _ in self._paused), default=None)
