"""The Grafana dashboard and the alert rules use metrics of the server, and compose.yaml mounts existing files."""

import json
import re
from pathlib import Path

import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.client.vector_cache.cache import VectorCache
from penstock.engine.protocol.messages import ChunkMetrics, SequencePoolStats
from penstock.server.http.connection import ConnectionState
from penstock.server.observability.metrics import ConnectionMetrics, VectorCacheMetrics

DOCKER = Path(__file__).resolve().parents[3] / "docker"
DASHBOARD = json.loads((DOCKER / "grafana" / "penstock.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = yaml.safe_load((DOCKER / "chart" / "alerts.yaml").read_text())
SCRAPE_LABELS = {"job", "instance"}  # of Prometheus
METRIC = re.compile(r"\b(?:penstock|process)_\w+")


def expressions() -> list[str]:
    queries = [variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable]
    queries += [target["expr"] for panel in PANELS for target in panel["targets"]]
    return queries + [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]


async def test_dashboard_and_alerts_use_existing_metrics(serving, engine, monkeypatch) -> None:
    stats = engine.stats()
    stats.sequence_pool_stats = SequencePoolStats(usage=0.5, chunks=ChunkMetrics(1, 1))
    monkeypatch.setattr(engine, "stats", lambda: stats)
    async with serving(engine) as client:
        await client.post("/v1/embeddings", json={"input": "a"})
        text = (await client.get("/metrics")).text
    text += generate_latest(VectorCacheMetrics(VectorCache(1 << 20), list)).decode()
    text += generate_latest(ConnectionMetrics(ConnectionState())).decode()
    families = list(text_string_to_metric_families(text))
    names = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    # An empty histogram has no samples.
    names |= {
        f"{family.name}_{part}": {"model", "route", "task", "stage", "le"}
        for family in families
        if family.name == "penstock_stage_duration_seconds"
        for part in ("bucket", "sum", "count")
    }
    wanted = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert len(wanted) > 20
    assert not wanted - set(names)
    for expression in expressions():
        used = {label for group in re.findall(r"\bby \(([\w, ]+)\)", expression) for label in group.split(", ")}
        used |= set(re.findall(r"(\w+)=~", expression))
        for name in METRIC.findall(expression):
            assert used - SCRAPE_LABELS <= names[name], (expression, name)


def test_files_mounted_by_containers_exist() -> None:
    mounted = re.findall(r"- (\./\S+?):/", (DOCKER / "compose.yaml").read_text())
    assert len(mounted) == 5
    assert all((DOCKER / path).is_file() for path in mounted)
