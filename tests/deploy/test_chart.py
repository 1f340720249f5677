"""The chart in docker/chart, rendered by Helm and validated by the schemas of Kubernetes and the server's settings."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from penstock.server.app import create_app
from penstock.server.routing import Access
from penstock.server.settings import ServerSettings, declared_settings, environment_variable, load_settings

from ..tables import cases, table

helm = pytest.importorskip("helm_python", reason="`make test-deploy` installs Helm")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="`make test-deploy` installs its schemas")
yaml = pytest.importorskip("yaml", reason="`make test-deploy` installs PyYAML")

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "docker" / "chart"
VERSIONS = ("1.25", "1.30", kubernetes_validate.latest_version())
CACHES = ("HF_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR")
IMAGE_VARIABLES = dict(re.findall(r"^(?:ENV|   ) (\w+)=(\S+)", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE))
SETTINGS = {environment_variable(name) for name in declared_settings(ServerSettings)}
EVERYTHING = yaml.safe_load(Path(__file__).with_name("everything.yaml").read_text("utf-8"))


Rendered = dict[tuple[str, str], dict[str, Any]]
Render = Callable[..., Rendered]


@pytest.fixture(scope="module")
def render() -> Iterator[Render]:
    """Render the chart with values as the release `r`. Returns documents by kind and name."""
    with helm.Chart.load(str(CHART)) as chart:

        def rendered(values: dict[str, Any] | None = None) -> Rendered:
            texts = chart.render(values or {}, name="r", namespace="search")
            files = [text for path, text in texts.items() if path.endswith(".yaml")]
            documents = [document for text in files for document in yaml.safe_load_all(text) if document]
            found = {(document["kind"], document["metadata"]["name"]): document for document in documents}
            assert len(found) == len(documents)
            return found

        yield rendered


def pod_of(rendered: Rendered, model: str) -> dict[str, Any]:
    pod: dict[str, Any] = rendered["Deployment", f"r-{model}"]["spec"]["template"]["spec"]
    return pod


def variables_of(pod: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in pod["containers"][0]["env"]}


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_documents_match_their_schemas(render: Render, values: dict[str, Any]) -> None:
    for document in render(values).values():
        for version in VERSIONS:
            if document["kind"] not in ("HTTPRoute", "PrometheusRule", "ScaledObject", "ServiceMonitor"):
                kubernetes_validate.validate(document, version, strict=True)


def test_documents_follow_the_values(render: Render) -> None:
    minilm = {("Deployment", "r-minilm"), ("Service", "r-minilm")}
    assert set(render()) == minilm | {("PodDisruptionBudget", "r-minilm"), ("Pod", "r-test")}
    kinds = ("Deployment", "PodDisruptionBudget", "ScaledObject", "Service")
    shared = {("Ingress", "r"), ("PersistentVolumeClaim", "r-hub"), ("PrometheusRule", "r"), ("ServiceMonitor", "r")}
    shared |= {("HTTPRoute", "r-minilm"), ("NetworkPolicy", "r"), ("Pod", "r-test")}
    secrets = {("Secret", "r-admin-keys"), ("Secret", "r-api-keys")}
    assert set(render(EVERYTHING)) == minilm | {(kind, "r-reranker") for kind in kinds} | shared | secrets
    rendered = render({"hubCache": {"enabled": True, "existingClaim": "weights"}})
    assert "PersistentVolumeClaim" not in {kind for kind, _ in rendered}
    claim = {"name": "hub", "persistentVolumeClaim": {"claimName": "weights"}}
    assert claim in pod_of(rendered, "minilm")["volumes"]


def test_values_are_settings_of_the_server(render: Render, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = render(EVERYTHING)
    for name, value in variables_of(pod_of(rendered, "reranker")).items():
        monkeypatch.setenv(name, value)
    for model in ("minilm", "reranker"):
        names = variables_of(pod_of(rendered, model))
        assert {name for name in names if name.startswith("PENSTOCK_")} <= SETTINGS
    settings = load_settings(ServerSettings, {})
    assert settings.model == "BAAI/bge-reranker-v2-m3"
    assert settings.engine.scheduler.max_queued_tokens == 64_000_000
    assert settings.access_log is True
    assert settings.engine.pooler_config.normalize is False
    assert settings.drain_timeout_s == 60
    assert str(settings.api_key_file) == "/etc/penstock/api-keys"
    assert str(settings.admin_key_file) == "/etc/penstock-admin/admin-keys"


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_pod_is_confined(render: Render, values: dict[str, Any]) -> None:
    pod = pod_of(render(values), "minilm")
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert not pod["automountServiceAccountToken"]
    # Kubernetes would set PENSTOCK_PORT=tcp://... beside a service named penstock.
    assert pod["enableServiceLinks"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts) >= {"/tmp", "/home/penstock/.cache/huggingface", "/home/penstock/.cache/triton"}
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}


def test_caches_are_in_mounted_folders(render: Render) -> None:
    """The root is read-only. Triton raises if it cannot write its cache."""
    pod = pod_of(render(), "minilm")
    mounts = {PurePosixPath(each["mountPath"]): each["name"] for each in pod["containers"][0]["volumeMounts"]}
    for variable in CACHES:
        folder = PurePosixPath(variables_of(pod)[variable])
        assert folder == PurePosixPath(IMAGE_VARIABLES[variable])
        (name,) = [mounts[parent] for parent in (folder, *folder.parents) if parent in mounts]
        assert {"name": name, "emptyDir": {}} in pod["volumes"]


@pytest.mark.parametrize("place", ["models", "defaults"])
@cases(__file__, "values", "message")
def test_secret_in_plain_text_is_rejected(render: Render, values: dict[str, Any], message: str, place: str) -> None:
    given = {"models": [{"name": "a", **values}]} if place == "models" else {"defaults": values}
    with pytest.raises(helm.HelmError, match=message) as caught:
        render(given)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "path"),
    [("api-keys", "one\ntwo", "/etc/penstock"), ("admin-keys", "admin", "/etc/penstock-admin")],
)
def test_keys_are_a_mounted_secret(render: Render, name: str, text: str, path: str) -> None:
    rendered = render(EVERYTHING)
    assert rendered["Secret", f"r-{name}"]["stringData"] == {name: text}
    assert not {"admin", "one", "one,two"} & set(variables_of(pod_of(rendered, "minilm")).values())
    value = "apiKeys" if name == "api-keys" else "adminKeys"
    rendered = render({value: {"existingSecret": "mine"}})
    assert "Secret" not in {kind for kind, _ in rendered}
    pod = pod_of(rendered, "minilm")
    assert {"name": name, "secret": {"secretName": "mine"}} in pod["volumes"]
    assert {"name": name, "mountPath": path, "readOnly": True} in pod["containers"][0]["volumeMounts"]
    assert not [name for name in variables_of(pod_of(render(), "minilm")) if name.endswith("KEY_FILE")]


@pytest.mark.parametrize(("model", "seconds"), [("minilm", 0 + 30), ("reranker", 5 + 60)])
def test_requests_end_before_the_pod(render: Render, model: str, seconds: int) -> None:
    pod = pod_of(render(EVERYTHING), model)
    (container,) = pod["containers"]
    pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pause_s + int(variables_of(pod)["PENSTOCK_DRAIN_TIMEOUT_S"]) == seconds
    assert pod["terminationGracePeriodSeconds"] > seconds


def test_probes_use_open_routes(render: Render) -> None:
    (container,) = pod_of(render(), "minilm")["containers"]
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/health/ready", "readiness": "/health/ready", "liveness": "/health/live"}
    routes = create_app([], ServerSettings()).state.routes.routes
    open_paths = {route.path for route in routes if route.access is Access.OPEN}
    assert {*paths.values(), "/metrics"} <= open_paths
    startup = container["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= 600


def test_selectors_match_the_pods_of_one_model(render: Render) -> None:
    rendered = render(EVERYTHING)
    labels = {
        model: rendered["Deployment", f"r-{model}"]["spec"]["template"]["metadata"]["labels"]
        for model in ("minilm", "reranker")
    }

    def chosen(selector: dict[str, str]) -> list[str]:
        return [model for model, has in labels.items() if selector.items() <= has.items()]

    for model in labels:
        assert chosen(rendered["Deployment", f"r-{model}"]["spec"]["selector"]["matchLabels"]) == [model]
        assert chosen(rendered["Service", f"r-{model}"]["spec"]["selector"]) == [model]
    assert chosen(rendered["PodDisruptionBudget", "r-reranker"]["spec"]["selector"]["matchLabels"]) == ["reranker"]
    monitor = rendered["ServiceMonitor", "r"]["spec"]
    assert [(each["port"], each["path"]) for each in monitor["endpoints"]] == [("metrics", "/metrics")]
    default = render({"serviceMonitor": {"enabled": True}})["ServiceMonitor", "r"]["spec"]
    assert [each["port"] for each in default["endpoints"]] == ["http"]
    monitored = monitor["selector"]["matchLabels"].items()
    assert all(monitored <= rendered["Service", f"r-{model}"]["metadata"]["labels"].items() for model in labels)
    (rule,) = rendered["Ingress", "r"]["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"]["name"] == "r-reranker"


def test_autoscaling_uses_metrics_of_the_server(render: Render) -> None:
    rendered = render(EVERYTHING)
    assert "replicas" not in rendered["Deployment", "r-reranker"]["spec"]
    spec = rendered["ScaledObject", "r-reranker"]["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (1, 6)
    assert spec["scaleTargetRef"] == {"name": "r-reranker"}
    assert {(trigger["type"], trigger["metricType"]) for trigger in spec["triggers"]} == {
        ("prometheus", "AverageValue")
    }
    assert all(float(trigger["metadata"]["threshold"]) > 0 for trigger in spec["triggers"])
    queries = [trigger["metadata"]["query"] for trigger in spec["triggers"]]
    assert all('{namespace="search",service="r-reranker"' in query for query in queries)
    wanted = {name.removesuffix("_total") for query in queries for name in re.findall(r"penstock_\w+", query)}
    metrics = (ROOT / "server" / "observability" / "metrics.py").read_text("utf-8")
    assert wanted == {"penstock_engine_queue_seconds", "penstock_rejected_requests"}
    assert wanted <= set(re.findall(r'"(penstock_\w+)"', metrics))


def test_data_folder_has_one_pod_at_a_time(render: Render) -> None:
    batches = {"name": "batches", "settings": {"data_dir": "/data"}}
    rendered = render({"models": [batches, {"name": "other", "replicas": 2}]})
    assert rendered["Deployment", "r-batches"]["spec"]["strategy"] == {"type": "Recreate"}
    assert rendered["Deployment", "r-other"]["spec"]["strategy"]["type"] == "RollingUpdate"
    assert render({"models": [batches | {"strategy": {"type": "Recreate"}}]})["Deployment", "r-batches"]
    for values, word in (
        ({"replicas": 2}, "replicas"),
        ({"autoscaling": {"enabled": True}}, "autoscaling"),
        ({"strategy": {"type": "RollingUpdate"}}, "Recreate"),
    ):
        with pytest.raises(helm.HelmError, match=rf"batches: settings\.data_dir has one server.*{word}"):
            render({"models": [batches | values]})
    with pytest.raises(helm.HelmError, match=r"settings\.data_dir has one server"):
        render({"models": [batches], "defaults": {"replicas": 2}})


@pytest.mark.parametrize("values", table(__file__, "test_unknown_values_are_rejected"), ids=str)
def test_unknown_values_are_rejected(render: Render, values: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError):
        render(values)


DIGEST = "sha256:" + "0123456789abcdef" * 4


def test_digest_replaces_the_tag_of_the_same_image(render: Render) -> None:
    models = [{"name": "a"}, {"name": "b", "image": {"tag": "cuda"}}, {"name": "c", "image": {"digest": DIGEST}}]

    def images(image: dict[str, str]) -> list[str]:
        rendered = render({"image": image, "models": models})
        return [pod_of(rendered, name)["containers"][0]["image"] for name in "abc"]

    pinned, other = f"penstock@{DIGEST}", "penstock:cuda"
    assert images({"tag": "1"}) == ["penstock:1", other, pinned]
    assert images({"tag": "1", "digest": DIGEST}) == [pinned, other, pinned]


def test_metrics_port_is_in_pod_service_and_settings(render: Render) -> None:
    rendered = render({"metricsPort": 9090})
    pod = pod_of(rendered, "minilm")
    assert variables_of(pod)["PENSTOCK_METRICS_PORT"] == "9090"
    assert {"name": "metrics", "containerPort": 9090} in pod["containers"][0]["ports"]
    ports = {port["name"]: port["targetPort"] for port in rendered["Service", "r-minilm"]["spec"]["ports"]}
    assert ports == {"http": "http", "metrics": "metrics"}
    assert len(pod_of(render(), "minilm")["containers"][0]["ports"]) == 1


def test_http_route_leads_to_the_service_of_its_model(render: Render) -> None:
    spec = render(EVERYTHING)["HTTPRoute", "r-minilm"]["spec"]
    assert spec["parentRefs"] == [{"name": "public", "namespace": "gateways"}]
    assert spec["hostnames"] == ["embed.example.com"]
    (rule,) = spec["rules"]
    assert rule["backendRefs"] == [{"name": "r-minilm", "port": 8000}]
    assert rule["timeouts"] == {"request": f"{ServerSettings().request_timeout_s:g}s"}


def test_network_policy_selects_the_servers_and_admits_the_test(render: Render) -> None:
    rendered = render(EVERYTHING)
    spec = rendered["NetworkPolicy", "r"]["spec"]
    selected, test = spec["podSelector"]["matchLabels"], rendered["Pod", "r-test"]["metadata"]["labels"]
    for model in ("minilm", "reranker"):
        labels = rendered["Deployment", f"r-{model}"]["spec"]["template"]["metadata"]["labels"]
        assert selected.items() <= labels.items()
    assert not selected.items() <= test.items()
    http, metrics = spec["ingress"]
    assert (http["ports"], metrics["ports"]) == ([{"port": "http"}], [{"port": "metrics"}])
    assert http["from"] == [{"podSelector": {"matchLabels": test}}, *EVERYTHING["networkPolicy"]["from"]]
    assert metrics["from"] == EVERYTHING["networkPolicy"]["metricsFrom"]
    dns, *others = spec["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    assert others == EVERYTHING["networkPolicy"]["egress"]
    open_spec = render({"networkPolicy": {"enabled": True}})["NetworkPolicy", "r"]["spec"]
    assert (open_spec["policyTypes"], open_spec["ingress"]) == (["Ingress"], [{"ports": [{"port": "http"}]}])


def test_helm_test_calls_every_model_with_the_keys(render: Render) -> None:
    pod = render(EVERYTHING)["Pod", "r-test"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    assert container["command"][2] == (CHART / "check_release.py").read_text("utf-8")
    assert container["command"][3:] == ["http://r-minilm:8000", "http://r-reranker:8000"]
    assert container["volumeMounts"] == [{"name": "api-keys", "mountPath": "/etc/penstock", "readOnly": True}]
    assert "volumes" not in render()["Pod", "r-test"]["spec"]
