"""The observers of requests: traces, metrics, the access log, and the log of ignored fields."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Final

from ..errors import request_fields
from ..request_state import state_of
from ..settings import ServerSettings, UsageError
from .metrics import Metrics
from .request_record import RequestRecord, loggable

if TYPE_CHECKING:
    from .tracing import Tracing

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("penstock.access")

Observer = Callable[[RequestRecord], Any]
"""Called with every request at the end of its response."""


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
                extra = request_fields(state_of(record.scope))
                logger.exception("%s failed for request %s", observe, record.request_id, extra=extra)

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
