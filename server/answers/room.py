"""The memory that answers share from before the forward that makes them until their clients have read them."""

from __future__ import annotations

from typing import Final

from starlette.types import Scope

from penstock.engine.protocol.errors import EngineOverloadedError

SMALL_BYTES: Final = 1024 * 1024
"""Answers that are not counted: connections are bounded, too."""
RETRY_AFTER_S: Final = 2.0
_HELD: Final = "penstock.answer_bytes"


class AnswerRoom:
    """Counts the bytes of answers under way. Belongs to one event loop.

    Args:
        max_bytes: Bytes of them all; a single answer may have more, when nothing else is held.

    Attributes:
        num_bytes: Bytes that are held.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes

    def take(self, scope: Scope, num_bytes: int) -> None:
        """Holds room for the answer to a request, besides what it holds already.

        Raises:
            EngineOverloadedError: There is not enough now.
        """
        if num_bytes <= SMALL_BYTES:
            return
        if self.num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise EngineOverloadedError(
                f"Answers that clients are reading, or wait for, hold {self.num_bytes} bytes of the {self._max_bytes} "
                f"that there are for them, and this one takes {num_bytes}. Please try again later, or ask for less.",
                retry_after_s=RETRY_AFTER_S,
            )
        self.num_bytes += num_bytes
        scope[_HELD] = scope.get(_HELD, 0) + num_bytes

    def leave(self, scope: Scope) -> None:
        """Gives back what a request holds, if it holds any."""
        self.num_bytes -= scope.pop(_HELD, 0)
