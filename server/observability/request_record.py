"""The record of a request: its times, model and status, for the observers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from starlette.types import Scope

from penstock.engine.protocol.stage_times import Stage, StageTimes

from ..request_state import state_of
from ..routing import route_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span

UNKNOWN_ROUTE: Final = "other"
_MAX_PATH_CHARS: Final = 200


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The times, model and status of one HTTP request, for its observers.

    Attributes:
        began_s: time.perf_counter() when its head was read.
        began_ns: Nanoseconds since 1970 at the same moment.
        stages: Times of its stages.
        route: Path of its route in the OpenAPI schema. Unknown paths share one value, to bound memory.
        is_probe: Whether it is a health check, which is neither logged nor traced.
        model: Shown name of its model; "" if it reached no model.
        status: HTTP status; 500 before the response starts.
        seconds: Seconds to the end of the response.
        stage_seconds: Sums of `stages`.
        task: Task of the engine; None if it was not called or failed.
        num_inputs: Texts, documents or pairs.
        span: The span of its trace; None without traces.
        trace_id: Id of its trace; None without traces.
        rejected_by: The limit that rejected the request; None if it was accepted.
    """

    scope: Scope
    began_s: float
    began_ns: int
    stages: StageTimes = field(default_factory=StageTimes)
    route: str = UNKNOWN_ROUTE
    is_probe: bool = False
    model: str = ""
    has_started: bool = False
    status: int = 500
    seconds: float = 0.0
    stage_seconds: Mapping[Stage, float] = field(default_factory=dict)
    task: str | None = None
    num_inputs: int = 0
    num_tokens: int = 0
    num_truncated: int = 0
    span: Span | None = None
    trace_id: str | None = None
    rejected_by: str | None = None

    @property
    def is_success(self) -> bool:
        """Whether the status is not an error."""
        return self.status < 400

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return state_of(self.scope).request_id

    @property
    def ignored_fields(self) -> Sequence[str]:
        """Unknown fields of the body that the server ignored."""
        return state_of(self.scope).ignored_fields

    def find_route(self) -> None:
        """Reads the route from the scope."""
        route = route_of(self.scope)
        if route is not None:
            self.route = route.path
            self.is_probe = route.is_probe

    def begin_response(self, status: int) -> None:
        """Records the start of the response."""
        self.status = status
        if self.is_success and self.stages.last_s is not None:
            self.stages.add(Stage.ENCODE, self.stages.last_s, time.perf_counter() - self.stages.last_s)
        self.stage_seconds = self.stages.seconds()

    def end(self) -> None:
        """Records the end of the response."""
        self.seconds = time.perf_counter() - self.began_s
        self.rejected_by = state_of(self.scope).rejected_by


def server_timing(seconds: Mapping[Stage, float]) -> bytes:
    """Returns the value of the header Server-Timing (W3C), in milliseconds."""
    return ", ".join([f"{stage};dur={1000 * spent:.3f}" for stage, spent in seconds.items()]).encode()


def loggable(path: str) -> str:
    """Returns a path that is safe in a log line: escaped and of bounded length."""
    return path[:_MAX_PATH_CHARS].encode("unicode_escape").decode("ascii")
