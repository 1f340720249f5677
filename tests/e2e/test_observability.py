"""One request in the log, the metrics, the traces and the headers of a server."""

import gzip
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STAGES = ["tokenization", "queue", "inference", "encode"]
TEXT = "What holds back the water?"


class Collector(HTTPServer):
    """Receives the spans of an OTLP exporter."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    yield collector
    collector.shutdown()
    thread.join()
    collector.server_close()


def test_log_metrics_traces_and_headers_agree(launch, default_model: Path, collector: Collector) -> None:
    endpoint = f"http://127.0.0.1:{collector.server_port}"
    server = launch("--access-log", "--log-format", "json", "--otlp-traces-endpoint", endpoint)
    with httpx.Client(base_url=server.url, timeout=60) as http:
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        response = http.post("/embed", json={"inputs": TEXT}, headers=headers)
        metrics = http.get("/metrics").text
    assert response.status_code == 200
    assert server.stop() == 0  # it sends the remaining spans
    timing = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    assert list(timing) == STAGES
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    (line,) = [line for line in lines if line["logger"] == "penstock.access"]
    assert (line["path"], line["task"], line["inputs"], line["trace_id"]) == ("/embed", "embed", 1, TRACE_ID)
    assert {stage: f"{line[f'{stage}_ms']:.3f}" for stage in STAGES} == timing
    assert sum(map(float, timing.values())) <= line["duration_ms"]
    assert TEXT not in server.log.read_text()
    assert abs(int(response.headers["x-inference-time"]) - line["inference_ms"]) <= 1
    for stage in STAGES:
        labels = f'route="/embed",stage="{stage}",task="embed"'
        assert re.search(rf'penstock_stage_duration_seconds_count{{model="[^"]+",{labels}}} 1\.0', metrics)
    assert [span.name for span in collector.spans] == [*STAGES, "POST /embed"]
    *stages, request = collector.spans
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    for span in stages:
        assert span.parent_span_id == request.span_id
        assert request.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= request.end_time_unix_nano
