"""The state of an application, and the deadlines and hang-ups of its requests."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, NamedTuple

from fastapi import HTTPException, Request

from penstock.engine.protocol.errors import (
    DeadlineExceededError,
    EngineError,
    OwnDeadlineExceededError,
    RequestCancelledError,
)

from ..admission import AdmissionController
from ..http.image_fetcher import ImageFetcher
from ..http.json_responses import wait_for_disconnect
from ..http.request_head import is_from_other_origin
from ..models.table import ModelTable
from ..models.weight_files import WeightHeaderCache
from ..observability.metrics import Metrics
from ..request_state import RequestState, state_of
from ..routing import runs_model
from ..settings import ServerSettings


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The state of one application, stored in `app.state.context`.

    Attributes:
        models: Served names to engines.
        started_s: Unix time of the start.
        fetcher: Fetches images from URLs; None: URLs are rejected.
    """

    settings: ServerSettings
    metrics: Metrics
    models: ModelTable
    started_s: int
    admission: AdmissionController
    fetcher: ImageFetcher | None = None
    weight_headers: WeightHeaderCache = field(default_factory=WeightHeaderCache)

    def deadline(self, state: RequestState) -> Deadline:
        """Returns the earlier of the request's own deadline and the server's."""
        longest_s = self.settings.request_timeout_s or math.inf
        own_s = math.inf if state.timeout_s is None else state.timeout_s
        return Deadline(min(own_s, longest_s), is_own=own_s < longest_s)


def context_of(request: Request) -> ServerContext:
    """Returns the state of the application that serves `request`."""
    context: ServerContext = request.app.state.context
    return context


def reject_other_origins(request: Request) -> None:
    """Protects a route without a JSON body, which a browser calls without a CORS preflight.

    Raises:
        HTTPException: 403 if a web page of an origin that is not allowed sent the request without an API key.
    """
    origins = context_of(request).settings.cors_origins
    if not state_of(request.scope).owner and is_from_other_origin(request.scope["headers"], origins):
        raise HTTPException(403, "A web page of another origin may not send this request; see --cors-origins.")


class Deadline(NamedTuple):
    """The time limit of a request.

    Attributes:
        timeout_s: Seconds after the arrival of the request; infinity: no deadline.
        is_own: True if a header of the request has set it.
    """

    timeout_s: float
    is_own: bool

    def remaining_s(self, state: RequestState) -> float:
        """Returns the remaining seconds of a request; negative after the deadline."""
        record = state.record
        return self.timeout_s if record is None else self.timeout_s - (time.perf_counter() - record.began_s)

    def error(self) -> DeadlineExceededError:
        """Returns the error for an expired request."""
        message = f"The deadline of {self.timeout_s:g} s passed before the result."
        return OwnDeadlineExceededError(message) if self.is_own else DeadlineExceededError(message)


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
        state = state_of(self._request.scope)
        known = state.connection_lost
        self._lost = lost = loop.create_task(wait_for_disconnect(self._request.receive)) if known is None else known
        lost.add_done_callback(self._hang_up)
        if runs_model(self._request.scope):
            deadline = self._deadline()
            if (remaining_s := deadline.remaining_s(state)) < math.inf:
                self._timer = loop.call_later(max(remaining_s, 0.0), self._end, deadline.error())

    def _hang_up(self, _: asyncio.Future[None]) -> None:
        self._end(RequestCancelledError("The client has hung up."))

    def _end(self, error: EngineError) -> None:
        if self._error is None and not self._is_over:
            self._error = error
            self._task.cancel()

    def _deadline(self) -> Deadline:
        return context_of(self._request).deadline(state_of(self._request.scope))
