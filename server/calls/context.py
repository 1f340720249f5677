"""The state of an application, and the deadlines of its requests."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from fastapi import HTTPException, Request

from penstock.engine.protocol.errors import DeadlineExceededError, OwnDeadlineExceededError

from ..admission import AdmissionController
from ..http.image_fetcher import ImageFetcher
from ..http.request_head import is_from_other_origin
from ..models.table import ModelTable
from ..models.weight_files import WeightHeaderCache
from ..observability.metrics import Metrics
from ..observability.request_record import CURRENT_RECORD
from ..request_state import RequestState, state_of
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

    def remaining_s(self) -> float:
        """Returns the remaining seconds of the request of the current task."""
        record = CURRENT_RECORD.get()
        return self.timeout_s if record is None else self.timeout_s - (time.perf_counter() - record.began_s)

    def error(self) -> DeadlineExceededError:
        """Returns the error for an expired request."""
        message = f"The deadline of {self.timeout_s:g} s passed before the result."
        return OwnDeadlineExceededError(message) if self.is_own else DeadlineExceededError(message)
