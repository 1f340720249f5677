"""How much of what a client sends is read before its turn.

uvicorn makes a request of every head that has come, and reads on whenever an application asks for a body: a client that
sends thousands of requests at once has them all held, with their bodies. Here they wait as bytes, and not many.
"""

from __future__ import annotations

from typing import Final

from uvicorn.protocols.http.flow_control import FlowControl

MAX_AHEAD_BYTES: Final = 64 * 1024
"""Of later requests; then nothing is read until the one under way has been answered. One piece more may have come."""
PIECE_BYTES: Final = 2048
"""What is parsed at once, but for a body whose length is known: a hundred requests at most are found in it."""


class ReadAhead(FlowControl):
    """What has been read of requests whose turn has not come; while that is much, nothing more is read."""

    def __init__(self, transport: object) -> None:
        super().__init__(transport)  # type: ignore[arg-type]
        self._ahead = bytearray()

    def __bool__(self) -> bool:
        return bool(self._ahead)

    @property
    def num_bytes(self) -> int:
        """How much waits."""
        return len(self._ahead)

    def put(self, data: bytes) -> None:
        """Adds what has come."""
        self._ahead += data
        if self._is_full:
            self.pause_reading()

    def take(self, num_bytes: int) -> bytes:
        """Returns the next piece."""
        was_full = self._is_full
        with memoryview(self._ahead) as view:
            piece = bytes(view[:num_bytes])
        del self._ahead[:num_bytes]
        if was_full:
            self.resume_reading()
        return piece

    def resume_reading(self) -> None:
        """Reads on, unless much waits."""
        if self.read_paused and not self._is_full:
            super().resume_reading()

    @property
    def _is_full(self) -> bool:
        return len(self._ahead) > MAX_AHEAD_BYTES
