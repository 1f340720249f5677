"""Who is told of every request, as the settings ask: traces, metrics, the access log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ..settings import ServerSettings, UsageError
from .access_log import log_access
from .metrics import Metrics
from .timing import Observer

if TYPE_CHECKING:
    from .tracing import Tracing


class Observers:
    """The observers of one application.

    Attributes:
        all: In the order in which they are told: the log line holds what the trace left in the record.

    Args:
        settings: What the operator asked for.
        metrics: Of the application.

    Raises:
        UsageError: Traces are asked for, but the extra is missing that sends them.
    """

    def __init__(self, settings: ServerSettings, metrics: Metrics) -> None:
        self._tracing = _tracing_to(settings.otlp_traces_endpoint) if settings.otlp_traces_endpoint else None
        self.all: list[Observer] = [] if self._tracing is None else [self._tracing.observe]
        self.all.append(metrics.observe)
        if settings.access_log:
            self.all.append(log_access)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sends the last traces when it ends."""
        try:
            yield
        finally:
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)


def _tracing_to(endpoint: str) -> Tracing:
    try:
        from .tracing import Tracing  # most servers send no traces and lack the extra
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--otlp-traces-endpoint needs the extra `otel`, of which {error.name} is missing; "
            "run: pip install 'penstock[otel]'"
        ) from error
    return Tracing.to(endpoint)
