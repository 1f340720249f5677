"""Cancels a request whose client hangs up or whose deadline passes."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType
from typing import Final

from fastapi import Request

from penstock.engine.protocol.errors import DeadlineExceededError, EngineError, RequestCancelledError

from ..http.json_responses import wait_for_disconnect
from ..request_state import state_of
from ..routing import runs_model
from .context import Deadline, context_of

WATCH_AFTER_S: Final = 0.02
"""Seconds. Requests that finish sooner are not watched."""


class DisconnectMonitor:
    """Cancels the work inside if the client hangs up or the deadline passes: `with DisconnectMonitor(request): ...`.

    Requests to routes that run no model have no deadline. The connection sets a future when its client disconnects, so
    a request costs one callback. Behind another ASGI server a task waits for the message http.disconnect.

    Args:
        request: The HTTP request.

    Raises:
        RequestCancelledError: The client has hung up.
        DeadlineExceededError: The deadline of the server, or the one that the request's header set, has passed.
    """

    __slots__ = ("_error", "_is_over", "_lost", "_request", "_task", "_timer")

    def __init__(self, request: Request) -> None:
        self._request = request
        self._is_over = False
        self._lost: asyncio.Future[None] | None = None
        self._error: EngineError | None = None

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer = task.get_loop().call_later(WATCH_AFTER_S, self._watch)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over = True  # a callback that is already scheduled cannot be cancelled
        self._timer.cancel()
        if self._lost is not None:
            self._lost.remove_done_callback(self._hang_up)
            if isinstance(self._lost, asyncio.Task):
                self._lost.cancel()
        reason, self._error = self._error, None  # the traceback of a raised error refers to this frame and the watch
        if reason is not None and kind is asyncio.CancelledError:
            self._task.uncancel()
            try:
                raise reason from None
            finally:
                del reason
        if kind is DeadlineExceededError and runs_model(self._request.scope):
            raise self._deadline().error() from error

    def _watch(self) -> None:
        loop = self._task.get_loop()
        known = state_of(self._request.scope).connection_lost
        self._lost = lost = loop.create_task(wait_for_disconnect(self._request.receive)) if known is None else known
        lost.add_done_callback(self._hang_up)
        if runs_model(self._request.scope) and (remaining_s := (deadline := self._deadline()).remaining_s()) < math.inf:
            self._timer = loop.call_later(max(remaining_s, 0.0), self._end, deadline.error())

    def _hang_up(self, _: asyncio.Future[None]) -> None:
        self._end(RequestCancelledError("The client has hung up."))

    def _end(self, error: EngineError) -> None:
        if self._error is None and not self._is_over:
            self._error = error
            self._task.cancel()

    def _deadline(self) -> Deadline:
        return context_of(self._request).deadline(state_of(self._request.scope))
