"""The memory that answers share from before the forward that makes them until their clients have read them.

Every answer that grows with its request goes through here: what it will hold is taken before the model runs, or as soon
as it is known, and so is the choice whether it is written at once or piece by piece.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import Request, Response
from starlette.types import Scope

from penstock.engine.protocol.errors import EngineOverloadedError, InvalidRequestError

from ..wire.json_route import json_response
from .sizes import NOTHING, AnswerSize

MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024
"""JSON of one answer: about 22 million numbers."""
SMALL_BYTES: Final = 1024 * 1024
"""Answers that are not counted: connections are bounded, too."""
RETRY_AFTER_S: Final = 2.0
_SIZE: Final = "penstock.answer_size"
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

    def take(self, scope: Scope, size: AnswerSize, *, param: str, way_out: str) -> None:
        """Holds room for the answer to a request, or for a further part of it.

        Args:
            scope: Of the request.
            size: About how large it will be.
            param: The request field that makes it large.
            way_out: What its client can do about that.

        Raises:
            InvalidRequestError: It would be larger than any answer may be.
            EngineOverloadedError: There is not enough room now.
        """
        before = scope.get(_SIZE)
        scope[_SIZE] = total = size if before is None else size.plus(before)
        if total.written > MAX_ANSWER_BYTES:
            raise InvalidRequestError(
                f"The answer would have about {total.written} bytes; the limit is {MAX_ANSWER_BYTES}. {way_out}",
                param=param,
            )
        if total.written <= SMALL_BYTES:
            return
        num_others = self.num_bytes - scope.get(_HELD, 0)
        if num_others and num_others + total.held > self._max_bytes:
            raise EngineOverloadedError(
                f"Answers that clients are reading, or wait for, hold {num_others} bytes of the {self._max_bytes} "
                f"that there are for them, and this one takes {total.held}. Please try again later. {way_out}",
                retry_after_s=RETRY_AFTER_S,
            )
        self.num_bytes = num_others + total.held
        scope[_HELD] = total.held

    def leave(self, scope: Scope) -> None:
        """Gives back what a request holds, if it holds any."""
        self.num_bytes -= scope.pop(_HELD, 0)


def is_large(request: Request) -> bool:
    """Returns whether the answer to a request is written piece by piece."""
    size: AnswerSize = request.scope.get(_SIZE, NOTHING)
    return size.is_large


def json_answer(request: Request, content: Any) -> Response:
    """Returns the JSON of an answer for which room has been taken.

    Args:
        request: That is answered.
        content: What `json_pieces` takes.
    """
    return json_response(content, in_pieces=is_large(request))
