"""The memory that answers share from before the forward that makes them until their clients have read them.

Every answer that grows with its request goes through here: what it will hold is taken before the model runs, or as soon
as it is known, and so is the choice whether it is written at once or piece by piece. One client may hold half of the
memory, so that a client that reads slowly leaves the other half to others.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from fastapi import Request, Response
from starlette.types import Scope

from penstock.engine.protocol.errors import EngineOverloadedError, InvalidRequestError

from ..wire.json_pieces import json_response
from ..wire.limit_errors import ServerRefusalReason
from ..wire.request_limits import client_of
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
        max_bytes: Bytes of all answers. A single answer may have more while nothing else is held, and more than the
            half of one client while the client holds nothing else.

    Attributes:
        num_bytes: Bytes that are held.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._by_client: Counter[str] = Counter()  # bytes

    def take(self, scope: Scope, size: AnswerSize, *, param: str, way_out: str) -> None:
        """Holds room for the answer to a request, or for a further part of it.

        Args:
            scope: Of the request.
            size: About how large it will be.
            param: The request field that makes it large.
            way_out: What its client can do about that.

        Raises:
            InvalidRequestError: It would be larger than any answer may be.
            EngineOverloadedError: There is not enough room now, or the client's other answers hold its half of it.
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
        client, held = client_of(scope), scope.get(_HELD, 0)
        num_others, num_own = self.num_bytes - held, self._by_client[client] - held
        if num_others and num_others + total.held > self._max_bytes:
            raise EngineOverloadedError(
                f"The response memory is full: other responses hold {num_others} bytes, the limit is {self._max_bytes} "
                f"(--answer-memory), and this one takes {total.held}. Please try again later. {way_out}",
                retry_after_s=RETRY_AFTER_S,
                reason=ServerRefusalReason.RESPONSE_MEMORY,
            )
        if num_own and num_own + total.held > self._max_bytes // 2:
            raise EngineOverloadedError(
                f"Your other responses hold {num_own} bytes, and this one takes {total.held}; one client may hold "
                f"{self._max_bytes // 2} bytes, half of --answer-memory. Read them, then try again. {way_out}",
                retry_after_s=RETRY_AFTER_S,
                reason=ServerRefusalReason.RESPONSE_MEMORY_SHARE,
            )
        self._hold(scope, client, total.held - held)

    def leave(self, scope: Scope) -> None:
        """Gives back what a request holds, if it holds any."""
        if held := scope.get(_HELD, 0):
            self._hold(scope, client_of(scope), -held)
            del scope[_HELD]

    def _hold(self, scope: Scope, client: str, num_more: int) -> None:
        scope[_HELD] = scope.get(_HELD, 0) + num_more
        self.num_bytes += num_more
        self._by_client[client] += num_more
        if not self._by_client[client]:
            del self._by_client[client]


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
