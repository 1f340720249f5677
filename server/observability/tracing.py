"""OpenTelemetry traces: a span per request with its stages as children, sent by OTLP over HTTP.

Needs the extra `otel`, and is imported only if an endpoint is configured. The parent comes from the headers
traceparent and tracestate (W3C). The spans of the stages are created at the end of the response from recorded times, so
that requests that are not sampled cost almost nothing. The OTEL_ variables of the SDK apply, such as OTEL_SERVICE_NAME
and OTEL_TRACES_SAMPLER.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .. import penstock_version
from ..request_state import state_of
from .request_record import UNKNOWN_ROUTE, RequestRecord, loggable

_PARENT_HEADERS: Final = (b"traceparent", b"tracestate")
_TRACES_PATH: Final = "/v1/traces"


class Tracing:
    """Sends a trace of every sampled request."""

    def __init__(self, processor: SpanProcessor) -> None:
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("penstock", penstock_version())
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> Tracing:
        """Returns a Tracing that sends to an OTLP collector, such as http://localhost:4318, in a background thread."""
        if urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + _TRACES_PATH
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint)))

    def begin(self, record: RequestRecord) -> None:
        """Starts the span of a request, unless it is a probe."""
        if record.is_probe:
            return
        scope = record.scope
        carrier = {
            name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _PARENT_HEADERS
        }
        is_known = record.route != UNKNOWN_ROUTE
        record.span = self._tracer.start_span(
            f"{scope['method']} {record.route}" if is_known else scope["method"],
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            start_time=record.began_ns,
        )
        record.trace_id = format_trace_id(record.span.get_span_context().trace_id)

    def observe(self, record: RequestRecord) -> None:
        """Ends the span of a request and adds the spans of its stages."""
        scope = record.scope
        span = record.span
        if span is None or not span.is_recording():
            return
        span.set_attributes(
            {
                "http.request.method": scope["method"],
                "http.response.status_code": record.status,
                "url.scheme": scope["scheme"],
                "url.path": loggable(scope["path"]),
                "penstock.request_id": state_of(scope).request_id,
            }
        )
        if record.route != UNKNOWN_ROUTE:
            span.set_attribute("http.route", record.route)
        if record.task is not None:
            span.set_attribute("penstock.task", record.task)
            span.set_attribute("penstock.num_inputs", record.num_inputs)
            span.set_attribute("gen_ai.usage.input_tokens", record.num_tokens)
        if record.status >= 500:
            span.set_attribute("error.type", str(record.status))
            span.set_status(Status(StatusCode.ERROR))
        parent = set_span_in_context(span)
        for stage, began_s, seconds in record.stages.entries:
            began_ns = record.began_ns + int(1e9 * (began_s - record.began_s))
            child = self._tracer.start_span(stage.value, parent, start_time=began_ns)
            child.end(began_ns + int(1e9 * seconds))
        span.end(record.began_ns + int(1e9 * record.seconds))

    def close(self) -> None:
        """Sends pending spans and ends the thread. Blocks while it sends."""
        self._provider.shutdown()


def _resource() -> Resource:
    resource = Resource.create({"service.version": penstock_version()})
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        return resource.merge(Resource({"service.name": "penstock"}))
    return resource
