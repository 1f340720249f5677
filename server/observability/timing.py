"""What is known of a request when its answer has gone, and who is told of it: metrics, the access log, traces."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.types import Scope

from penstock.engine.protocol.request import Stage, StageTimes

from ..admission import REFUSED_BY
from ..routing import route_of

UNKNOWN_ROUTE: Final = "other"


@dataclass(slots=True, eq=False)
class RequestRecord:
    """A request and its answer.

    Attributes:
        scope: The ASGI scope of the request.
        began_s: Seconds, of time.perf_counter(). When its head was read.
        began_ns: Nanoseconds since 1970 of the same moment.
        stages: Where its time went.
        route: The route of its path, as in the OpenAPI schema. Unknown paths are one, so that they cost no memory.
        is_probe: It is sent every few seconds: neither logged nor traced.
        model: Shown name of the model that it went to; "" where it named none that is served, or came to no model.
        has_begun: Whether there is an answer, or the beginning of one; a refusal may still wait for its turn.
        status: HTTP status; 500 until an answer goes out.
        seconds: Seconds to the end of the answer.
        stage_seconds: Sums of `stages`.
        task: Task of the engine. None: the engine was not called, or it failed.
        num_inputs: Texts, documents or pairs that it ran.
        num_tokens: Their tokens.
        trace_id: Of its span; None without traces.
        refused_by: The limit that refused the request; None where none did.
    """

    scope: Scope
    began_s: float
    began_ns: int
    stages: StageTimes = field(default_factory=StageTimes)
    route: str = UNKNOWN_ROUTE
    is_probe: bool = False
    model: str = ""
    has_begun: bool = False
    status: int = 500
    seconds: float = 0.0
    stage_seconds: Mapping[Stage, float] = field(default_factory=dict)
    task: str | None = None
    num_inputs: int = 0
    num_tokens: int = 0
    trace_id: str | None = None
    refused_by: str | None = None

    @property
    def is_answered(self) -> bool:
        """Whether it was no error."""
        return self.status < 400

    def begin_answer(self, status: int) -> None:
        """Notes that the head of the answer goes out."""
        self.status = status
        if self.is_answered and self.stages.last_s is not None:
            self.stages.add(Stage.ENCODE, self.stages.last_s, time.perf_counter() - self.stages.last_s)
        self.stage_seconds = self.stages.seconds()

    def end(self) -> None:
        """Notes that the answer has gone."""
        self.seconds = time.perf_counter() - self.began_s
        route = route_of(self.scope)
        if route is not None:
            self.route, self.is_probe = route.path, route.is_probe
        self.refused_by = self.scope.get(REFUSED_BY)


Observer = Callable[[RequestRecord], Any]
"""Is told of every request when its answer has gone."""

REQUEST: Final[ContextVar[RequestRecord | None]] = ContextVar("penstock_request", default=None)
"""The request that the current task answers. It belongs to the task, not to this module."""


def server_timing(seconds: Mapping[Stage, float]) -> bytes:
    """Returns the value of the header Server-Timing (W3C), in milliseconds."""
    return ", ".join([f"{stage};dur={1000 * spent:.3f}" for stage, spent in seconds.items()]).encode()
