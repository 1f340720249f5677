"""Metrics, stage times, access log and traces of requests; rejections by their limit."""

import asyncio
import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import orjson
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.client.stats import DispatcherStats
from penstock.engine.logs import JsonFormatter
from penstock.engine.protocol.errors import EngineOverloadedError, EngineUnavailableError, RejectionReason
from penstock.engine.protocol.messages import ChunkMetrics, SequencePoolStats
from penstock.engine.protocol.stage_times import STAGE_TIMES, Stage
from penstock.server import penstock_version
from penstock.server.admission import REJECTION_REASONS
from penstock.server.app import create_app
from penstock.server.observability import observers, tracing as tracing_module
from penstock.server.observability.metrics import ConnectionMetrics, Metrics
from penstock.server.observability.observers import log_access
from penstock.server.observability.request_record import RequestRecord
from penstock.server.observability.tracing import Tracing
from penstock.server.settings import ServerSettings, UsageError

from ...clock import Clock
from ...tables import table
from ...waiting import until
from ..fake_engine import FakeEngine
from ..http.sockets import exchange, served

STAGES = {Stage.TOKENIZATION: 0.25012345, Stage.QUEUE: 0.5, Stage.INFERENCE: 2.0}
SECRET = "holds back the water"
COLLECTOR = "http://collector.test:4318"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def engine(make_engine):
    """Returns an engine that reports fixed stage times."""

    class TimedEngine(make_engine):
        async def _enter(self, name: str, *arguments: object) -> None:
            times = STAGE_TIMES.get()
            assert times is not None
            began_s = time.perf_counter()
            for stage, seconds in STAGES.items():
                times.add(stage, began_s, seconds)
            times.last_s = time.perf_counter()
            await super()._enter(name, *arguments)

    return TimedEngine()


def samples(text: str, name: str) -> dict[tuple[str, ...], float]:
    """Values of one metric by its labels, without `le`."""
    return {
        tuple(
            value for label, value in s.labels.items() if label != "model" or name.startswith("penstock_engine")
        ): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name == name
    }


async def test_stages_are_in_metrics_by_route_and_task(client: httpx.AsyncClient) -> None:
    for _ in range(2):
        assert (await client.post("/v1/embeddings", json={"input": ["a b", "c"]})).status_code == 200
    assert (await client.post("/v1/score", json={"text_1": "a", "text_2": "b"})).status_code == 200
    assert (await client.get("/version")).status_code == 200, "it runs no model"
    text = (await client.get("/metrics")).text
    sums = samples(text, "penstock_stage_duration_seconds_sum")
    for stage, seconds in STAGES.items():
        assert sums["/v1/embeddings", stage, "embed"] == pytest.approx(2 * seconds)
        assert sums["/v1/score", stage, "score"] == pytest.approx(seconds)
    assert 0 < sums["/v1/embeddings", "encode", "embed"] < 1
    assert len(sums) == 8


async def test_requests_are_counted_by_model_route_and_status(client: httpx.AsyncClient, engine) -> None:
    await client.post("/v1/embeddings", json={"input": "a", "model": "alias"})
    await client.post("/rerank", json={"query": "a", "documents": ["b", "c"]})
    await client.post("/rerank", json={"query": "a", "texts": ["b"]})
    await client.post("/v1/embeddings", json={"input": "a", "model": "unknown"})
    await client.get("/nowhere")
    text = (await client.get("/metrics")).text
    families = [f for f in text_string_to_metric_families(text) if f.name.startswith("penstock_")]
    other = re.compile(r"penstock_(rejected_requests|build_info|(body|response)_memory_(limit_)?bytes)")
    named = [family for family in families if not other.fullmatch(family.name)]
    assert all("model" in s.labels for family in named for s in family.samples)
    assert "_created" not in text
    assert f'penstock_build_info{{version="{penstock_version()}"}} 1.0' in text
    counted = {
        tuple(s.labels.values()): s.value for f in families for s in f.samples if s.name == "penstock_inputs_total"
    }
    assert counted == {("fake-model", "embed"): 1, ("fake-model", "rerank"): 3}
    assert samples(text, "penstock_tokens_total") == {("embed",): 3, ("rerank",): 9}
    assert samples(text, "penstock_http_request_duration_seconds_count")["/rerank",] == 2
    for name, value in (("queued_tokens", 42), ("requests", 3), ("ready", 1)):
        assert samples(text, f"penstock_engine_{name}") == {("fake-model",): value}
    answers = {
        (s.labels["model"], s.labels["route"], s.labels["status"]): s.value
        for family in families
        for s in family.samples
        if s.name == "penstock_http_requests_total"
    }
    assert answers == {
        ("fake-model", "/v1/embeddings", "200"): 1,
        ("fake-model", "/rerank", "200"): 2,
        ("", "/v1/embeddings", "404"): 1,
        ("", "other", "404"): 1,
    }
    assert samples(text, "penstock_engine_queue_seconds") == {("fake-model",): 2.5}


async def test_stage_times_are_in_headers(client: httpx.AsyncClient) -> None:
    headers = (await client.post("/embed", json={"inputs": "one two"})).headers
    times = [headers[f"x-{name}-time"] for name in ("tokenization", "queue", "inference")]
    assert times == ["250", "500", "2000"]
    expected = "tokenization;dur=250.123, queue;dur=500.000, inference;dur=2000.000, encode;dur="
    assert headers["server-timing"].startswith(expected)
    assert "server-timing" not in (await client.get("/version")).headers


async def test_failing_observer_does_not_skip_the_next(serving, engine, caplog, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("made up")

    monkeypatch.setattr(Metrics, "observe", fail)
    caplog.set_level("INFO", "penstock.access")
    async with serving(engine, access_log=True) as client:
        assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200
    names = [record.name for record in caplog.records]
    assert names[-2:] == ["penstock.server.observability.observers", "penstock.access"]
    assert "KeyError: 'made up'" in caplog.text


async def test_access_log_has_stage_times_without_texts_or_keys(serving, engine, caplog) -> None:
    caplog.set_level(logging.INFO, "penstock.access")
    async with serving(engine, access_log=True, api_key=["very-secret"]) as client:
        headers = {"authorization": "Bearer very-secret", "x-request-id": "abc"}
        await client.post("/v1/embeddings?key=very-secret", json={"input": [SECRET, "b"]}, headers=headers)
        for probe in ("/health", "/health/live", "/health/ready", "/metrics"):
            await client.get(probe)
        await client.get("/no%0aINFO%20forged" + "x" * 300)
    good, unknown = [record for record in caplog.records if record.name == "penstock.access"]
    key_id = sha256(b"very-secret").hexdigest()[:8]
    assert re.fullmatch(
        rf"POST /v1/embeddings 200 in \d+\.\d ms; key {key_id}; embed 2 inputs, 9 tokens; "
        r"tokenization 250\.1 ms; queue 500\.0 ms; inference 2000\.0 ms; encode \d+\.\d ms \(abc\)",
        good.getMessage(),
    )
    line = orjson.loads(JsonFormatter().format(good))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", line["time"])
    expected = {"logger": "penstock.access", "request_id": "abc", "method": "POST", "status": 200, "task": "embed"}
    expected |= {"path": "/v1/embeddings", "route": "/v1/embeddings", "inputs": 2, "tokens": 9, "queue_ms": 500.0}
    expected |= {"key_id": key_id, "client": "127.0.0.1", "tokenization_ms": 250.123, "inference_ms": 2000.0}
    assert expected.items() <= line.items()
    assert 0 < line["encode_ms"] < line["duration_ms"] == round(line["duration_ms"], 3) < 60_000
    assert SECRET not in str(line)
    assert "very-secret" not in str(line)
    assert "\n" not in unknown.getMessage()
    assert f" /no%0AINFO%20forged{'x' * 181} 401 " in unknown.getMessage(), "200 characters of the path"


def test_ignored_fields_are_logged_once_a_minute(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    clock, log = Clock(), observers.IgnoredFieldsLog()
    monkeypatch.setattr(observers, "time", SimpleNamespace(perf_counter=clock))
    record = Mock(ignored_fields=["a", "b"], request_id="r1", route="/embed")
    for clock.now_s in (0.0, 1.0, 59.9, 60.0, 61.0):
        log.observe(Mock(ignored_fields=[]))
        log.observe(record)
    texts = [message.partition(";")[0] for message in caplog.messages]
    start = "request r1 to /embed has unknown fields, which were ignored: a, b"
    assert texts == [f"{start} ({number} such requests were not logged)" for number in (0, 2)]


def test_access_log_of_a_request_without_client_and_model(caplog) -> None:
    caplog.set_level(logging.INFO, "penstock.access")
    scope = {"type": "http", "method": "GET", "path": "/version"}
    record = RequestRecord(scope, 0.0, 0, seconds=1.23456789)
    record.begin_response(200)
    record.stages.last_s = 0.0  # an engine has answered
    log_access(record)
    assert caplog.messages == ["GET /version 200 in 1234.6 ms ()"]
    fields = {"request_id": "", "method": "GET", "path": "/version", "route": "other", "status": 200}
    assert caplog.records[0].fields == {**fields, "client": None, "duration_ms": 1234.568}
    for status, is_success in ((399, True), (400, False)):
        record.begin_response(status)
        assert (record.is_success, len(record.stages.entries)) == (is_success, 1), "errors are not encoded"


class Collected:
    """Collects spans."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.endpoints: list[str] = []

    def to(self, endpoint: str) -> Tracing:
        self.endpoints.append(endpoint)
        return Tracing(SimpleSpanProcessor(self.exporter))

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collected]:
    collected = Collected()
    monkeypatch.setattr(Tracing, "to", collected.to)
    yield collected
    assert collected.endpoints == [COLLECTOR]
    assert collected.exporter.export([]) is SpanExportResult.FAILURE, "it is shut down with the server"


async def test_trace_continues_the_trace_of_the_client(serving, engine, collected: Collected, caplog) -> None:
    caplog.set_level(logging.INFO, "penstock.access")
    async with serving(engine, otlp_traces_endpoint=COLLECTOR, access_log=True) as client:
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}
        await client.post("/v1/embeddings", json={"input": [SECRET]}, headers=headers)
    logged = caplog.records[-1].fields
    assert logged["trace_id"] == TRACE_ID
    spans = collected.spans
    assert list(spans) == [*STAGES, "encode", "POST /v1/embeddings"]
    request = spans["POST /v1/embeddings"]
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == PARENT_ID
    assert request.kind is SpanKind.SERVER
    for span in spans.values():
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        assert span.context.trace_state.get("vendor") == "1"
        assert SECRET not in span.to_json()
    for stage, seconds in STAGES.items():
        span = spans[stage]
        assert span.parent == request.context
        assert span.end_time - span.start_time == pytest.approx(seconds * 1e9)
        assert request.start_time <= span.start_time <= request.end_time
    assert request.attributes is not None
    expected = table(__file__, "test_trace_continues_the_trace_of_the_client") | {
        "penstock.request_id": logged["request_id"]
    }
    assert request.attributes == expected
    assert request.end_time - request.start_time == pytest.approx(1e6 * logged["duration_ms"], abs=1e3)
    assert request.resource.attributes["service.name"] == "penstock"
    assert (request.instrumentation_scope.name, request.instrumentation_scope.version) == (
        "penstock",
        penstock_version(),
    )


@pytest.mark.parametrize(("variables", "name"), [({}, "penstock"), ({"OTEL_SERVICE_NAME": "mine"}, "mine")])
def test_operator_may_name_the_service(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    tracing = Tracing.to(COLLECTOR)
    assert tracing._provider.resource.attributes["service.name"] == name
    assert tracing._provider.resource.attributes["service.version"] == penstock_version()
    tracing.close()


def test_path_of_the_collector_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, sent_to in (("", "/v1/traces"), ("/", "/v1/traces"), ("/own", "/own")):
        monkeypatch.setattr(tracing_module, "OTLPSpanExporter", exporter := Mock())
        Tracing.to(COLLECTOR + path).close()
        exporter.assert_called_once_with(COLLECTOR + sent_to)


def test_traces_without_the_extra_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.server.observability.tracing", None)
    with pytest.raises(UsageError, match=r"^--otlp-traces-endpoint .* pip install 'penstock\[otel\]'"):
        create_app([], ServerSettings(otlp_traces_endpoint=COLLECTOR))


@pytest.mark.parametrize(
    ("failure", "expected"), [(RuntimeError("broken"), ("500", StatusCode.ERROR)), (None, (None, StatusCode.UNSET))]
)
async def test_span_and_log_of_a_server_error(serving, engine, collected, caplog, failure, expected) -> None:
    engine.failure = failure
    async with serving(engine, otlp_traces_endpoint=COLLECTOR) as client:
        response = await client.post("/v1/embeddings", json={"input": "a"})
    span = collected.spans["POST /v1/embeddings"]
    assert (span.attributes.get("error.type"), span.status.status_code) == expected
    errors = [record.fields for record in caplog.records if record.levelname == "ERROR"]
    fields = {"request_id": response.headers["x-request-id"], "trace_id": f"{span.context.trace_id:032x}"}
    assert errors == ([fields] if failure else [])


@pytest.mark.parametrize(
    ("traceparent", "num_spans"),
    [(f"00-{TRACE_ID}-{PARENT_ID}-00", 0), (f"00-{'0' * 32}-{PARENT_ID}-01", 5), ("nonsense\xff", 5), ("", 5)],
)
async def test_invalid_traceparent_starts_a_new_trace(serving, engine, collected, traceparent, num_spans: int) -> None:
    async with serving(engine, otlp_traces_endpoint=COLLECTOR) as client:
        headers = {"traceparent": traceparent.encode("latin-1")}
        response = await client.post("/v1/embeddings", json={"input": "a"}, headers=headers)
        assert response.status_code == 200
        await client.get("/health")
    spans = collected.spans
    assert len(spans) == num_spans
    if spans:
        assert spans["POST /v1/embeddings"].parent is None


async def test_statistics_of_the_engine_are_in_metrics(client: httpx.AsyncClient, engine, monkeypatch) -> None:
    assert "penstock_engine_cache_usage_ratio{" not in (await client.get("/metrics")).text
    chunks = ChunkMetrics(preemptions=2, completed_chunks=31, completed_tokens=900, num_running_sequences=3, run_s=1.5)
    use = SequencePoolStats(
        usage=0.25,
        prefix_queried_tokens_total=400,
        prefix_hit_tokens_total=96,
        num_evicted_blocks_total=7,
        memory_pressure=0.5,
        chunk_tokens=128,
        chunks=chunks,
    )
    stats = DispatcherStats(num_requests=5, sequence_pool_stats=use)
    stats.num_waiting, stats.num_waiting_tokens, stats.token_budget = 7, 300, 2048
    for num_tokens in (8, 1000, 2000):
        stats.step_tokens.observe(num_tokens)
        stats.step_fill.observe(num_tokens / 2048)
    monkeypatch.setattr(engine, "stats", lambda: stats)
    monkeypatch.setattr(engine, "host_bytes", lambda: 3 << 20)
    text = (await client.get("/metrics")).text
    for name, value in table(__file__, "test_statistics_of_the_engine_are_in_metrics").items():
        assert samples(text, f"penstock_engine_{name}") == {("fake-model",): value}, name
    buckets = samples(text, "penstock_engine_batch_tokens_bucket")
    assert {("8.0", "fake-model"): 1, ("1024.0", "fake-model"): 2, ("+Inf", "fake-model"): 3}.items() <= buckets.items()


async def test_buckets_of_histograms_are_stable(client: httpx.AsyncClient) -> None:
    """Dashboards and recording rules of operators name them."""
    assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200
    text = (await client.get("/metrics")).text
    steps = [float(f"{digit}e{exponent}") for exponent in range(-4, 1) for digit in (1, 2, 5)]
    for name, bounds in {
        "http_request_duration_seconds": [*steps[4:], 10, 30, 60],
        "stage_duration_seconds": [*steps, 10, 30, 60],
        "engine_step_duration_seconds": steps[3:],
        "engine_batch_tokens": [8, 32, *(2**exponent for exponent in range(7, 16))],
        "engine_batch_inputs": [2**exponent for exponent in range(10)],
        "engine_batch_fill_ratio": [0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0],
    }.items():
        found = re.findall(rf'^penstock_{name}_bucket{{.*le="([^"+]+)"', text, re.MULTILINE)
        assert list(map(float, found))[: len(bounds)] == bounds, name
        assert len(found) % len(bounds) == 0, name


async def rejected(client: httpx.AsyncClient) -> dict[str, float]:
    """Returns the counts above 0. Every reason has a count."""
    text = (await client.get("/metrics")).text
    (family,) = [f for f in text_string_to_metric_families(text) if f.name == "penstock_rejected_requests"]
    counts = {sample.labels["reason"]: sample.value for sample in family.samples}
    assert set(counts) == set(REJECTION_REASONS)
    return {reason: count for reason, count in counts.items() if count}


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        *((EngineOverloadedError("full", retry_after_s=1.0, reason=r), 429, r) for r in RejectionReason if "q" in r),
        (EngineUnavailableError("It is down."), 503, RejectionReason.ENGINE_NOT_READY),
        (EngineUnavailableError("It ends.", reason=RejectionReason.DRAINING), 503, RejectionReason.DRAINING),
    ],
)
async def test_engine_rejections_are_counted(client, engine, error: Exception, status: int, reason: str) -> None:
    assert await rejected(client) == {}
    engine.failure = error
    bodies = table(__file__, "test_engine_rejections_are_counted")
    for path, body in bodies.items():
        assert (await client.post(path, json=body)).status_code == status, path
    assert await rejected(client) == {reason: len(bodies)}


@pytest.mark.parametrize(
    ("settings", "content", "reason"),
    [
        ({"max_body_bytes": 100}, {"input": "a" * 200}, "body_bytes"),
        ({"max_json_values": 100}, {"input": ["a"] * 2_000}, "json_values"),
    ],
)
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_body_rejections_are_counted(serving, engine, settings, content: object, reason: str, is_chunked) -> None:
    async def pieces():
        yield json.dumps(content).encode()

    async with serving(engine, **settings) as client:
        body = pieces() if is_chunked else json.dumps(content).encode()
        response = await client.post("/v1/embeddings", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200
        assert (await client.post("/nowhere", json={})).status_code == 404
        assert await rejected(client) == {reason: 1}


async def test_open_and_closed_connections_are_counted() -> None:
    metrics = Metrics(list)
    async with served(FakeEngine()) as (server, port):
        metrics.register(ConnectionMetrics(server.server_state))
        assert (await exchange(port, b"no HTTP\r\n\r\n")).startswith(b"HTTP/1.1 400")
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: len(server.server_state.connections) == 1)
        text = (await metrics.scrape()).decode()
        writer.close()
    assert samples(text, "penstock_http_connections") == {(): 1}
    closed = {"incomplete_head": 0, "head_too_large": 0, "invalid_http": 1, "slow_response": 0}
    assert samples(text, "penstock_http_closed_connections_total") == {(name,): n for name, n in closed.items()}
