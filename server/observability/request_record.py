"""The record of a request, and its observers after the response: traces, metrics and access log.

The record has the times, model and status of the request. CURRENT_RECORD holds the record of the current task.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from starlette.types import Scope

from penstock.engine.protocol.stage_times import Stage, StageTimes

from ..errors import request_fields
from ..request_state import state_of
from ..routing import route_of
from ..settings import ServerSettings, UsageError

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from .metrics import Metrics
    from .tracing import Tracing

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("penstock.access")

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


Observer = Callable[[RequestRecord], Any]
"""Called with every request at the end of its response."""

CURRENT_RECORD: Final[ContextVar[RequestRecord | None]] = ContextVar("penstock_request", default=None)
"""The request that the current task serves."""


def server_timing(seconds: Mapping[Stage, float]) -> bytes:
    """Returns the value of the header Server-Timing (W3C), in milliseconds."""
    return ", ".join([f"{stage};dur={1000 * spent:.3f}" for stage, spent in seconds.items()]).encode()


def loggable(path: str) -> str:
    """Returns a path that is safe in a log line: escaped and of bounded length."""
    return path[:_MAX_PATH_CHARS].encode("unicode_escape").decode("ascii")


class ObserverGroup:
    """The observers of one application.

    Raises:
        UsageError: Traces are configured, but the extra `otel` is missing.
    """

    def __init__(self, settings: ServerSettings, metrics: Metrics) -> None:
        self._tracing = _tracing_to(settings.otlp_traces_endpoint) if settings.otlp_traces_endpoint else None
        # In order of call. Tracing precedes the access log, which contains the trace id.
        self._observers: list[Observer] = [] if self._tracing is None else [self._tracing.observe]
        self._observers += [metrics.observe, IgnoredFieldsLog().observe]
        if settings.access_log:
            self._observers.append(log_access)

    def begin(self, record: RequestRecord) -> None:
        """Starts the trace of a request if traces are configured."""
        if self._tracing is None:
            return
        try:
            self._tracing.begin(record)
        except Exception:  # a request must not fail because of its trace
            logger.exception("no trace of request %s", record.request_id)

    def observe(self, record: RequestRecord) -> None:
        """Calls every observer. Logs the error of one and calls the others, because the response has been sent."""
        for observe in self._observers:
            try:
                observe(record)
            except Exception:  # the other observers must see the request
                request_id = record.request_id
                extra = request_fields(request_id, record.trace_id)
                logger.exception("%s failed for request %s", observe, request_id, extra=extra)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sends the last traces at the end."""
        try:
            yield
        finally:
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)


def _tracing_to(endpoint: str) -> Tracing:
    try:
        from .tracing import Tracing  # imported only if traces are configured, because it needs the extra
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--otlp-traces-endpoint needs the extra `otel`; {error.name} is missing; run: pip install 'penstock[otel]'"
        ) from error
    return Tracing.to(endpoint)


class IgnoredFieldsLog:
    """Logs the ignored fields of a request, once in INTERVAL_S: a client usually sends the same fields every time."""

    INTERVAL_S: Final = 60.0

    def __init__(self) -> None:
        self._next_s = -math.inf
        self._num_skipped = 0

    def observe(self, record: RequestRecord) -> None:
        """Logs the fields of a request, or counts the request for the next line."""
        if not record.ignored_fields:
            return
        now = time.perf_counter()
        if now < self._next_s:
            self._num_skipped += 1
            return
        logger.warning(
            "request %s to %s has unknown fields, which were ignored: %s (%d such requests were not logged); "
            "--unknown-fields reject rejects them, ignore ends this warning",
            record.request_id,
            record.route,
            ", ".join(record.ignored_fields),
            self._num_skipped,
        )
        self._next_s = now + self.INTERVAL_S
        self._num_skipped = 0


def log_access(record: RequestRecord) -> None:
    """Logs one line per request except probes, never its content. JSON logs have the values as fields."""
    if record.is_probe:
        return
    scope = record.scope
    path = loggable(scope["path"])
    stages_ms = {stage: round(1000 * seconds, 3) for stage, seconds in record.stage_seconds.items()}
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "method": scope["method"],
        "path": path,
        "route": record.route,
        "status": record.status,
        "client": scope["client"][0] if scope.get("client") else None,
        "duration_ms": round(1000 * record.seconds, 3),
        **{f"{stage}_ms": spent for stage, spent in stages_ms.items()},
    }
    if (key_id := state_of(scope).key_id) is not None:
        fields["key_id"] = key_id
    if record.task is not None:
        fields |= {"task": record.task, "inputs": record.num_inputs, "tokens": record.num_tokens}
    if record.trace_id is not None:
        fields["trace_id"] = record.trace_id
    details = [] if key_id is None else [f"key {key_id}"]
    details += [] if record.task is None else [f"{record.task} {record.num_inputs} inputs, {record.num_tokens} tokens"]
    details += [f"{stage} {spent:.1f} ms" for stage, spent in stages_ms.items()]
    access_logger.info(
        "%s %s %d in %.1f ms%s (%s)",
        scope["method"],
        path,
        record.status,
        1000 * record.seconds,
        "".join(f"; {detail}" for detail in details),
        record.request_id,
        extra={"fields": fields},
    )
