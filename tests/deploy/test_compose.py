"""docker/compose.yaml follows the specification, the Dockerfile and the server's limits; Prometheus has its targets."""

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.server.settings import ServerSettings

yaml = pytest.importorskip("yaml", reason="`make test-deploy` installs PyYAML")

DOCKER = Path(__file__).resolve().parents[2] / "docker"
TEXT = (DOCKER / "compose.yaml").read_text("utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", TEXT))  # without variables
PROMETHEUS: dict[str, Any] = yaml.safe_load((DOCKER / "prometheus.yml").read_text("utf-8"))


def test_compose_file_is_valid() -> None:
    specification = pytest.importorskip("compose_spec", reason="`make test-deploy` installs compose-spec")
    compose = {**COMPOSE, "networks": {"default": None}}  # compose adds it
    specification.PyCompose.from_yaml(yaml.safe_dump(compose)).validate()


def test_named_volumes_are_declared() -> None:
    mounts = [volume for service in COMPOSE["services"].values() for volume in service.get("volumes", ())]
    names = {mount.partition(":")[0] for mount in mounts}
    assert {name for name in names if not name.startswith(".")} == set(COMPOSE["volumes"])


def test_triton_cache_is_a_volume() -> None:
    """The root is read-only. Triton raises if it cannot write its cache."""
    (folder,) = re.findall(r"TRITON_CACHE_DIR=(\S+)", (DOCKER.parent / "Dockerfile").read_text("utf-8"))
    service = COMPOSE["services"]["cuda"]
    assert service["read_only"] is True
    assert f"triton:{folder}" in service["volumes"]
    assert "TRITON_CACHE_DIR" not in service["environment"]


@pytest.mark.parametrize("name", ["cpu", "slim", "cuda"])
def test_requests_end_before_the_container_is_killed(name: str) -> None:
    grace_s = int(COMPOSE["services"][name]["stop_grace_period"].removesuffix("s"))
    assert grace_s >= ServerSettings().drain_timeout_s + 10


def test_cuda_image_has_the_start_time_of_a_pod() -> None:
    stages = (DOCKER.parent / "Dockerfile").read_text("utf-8").split("\nFROM ")
    (cuda,) = [stage for stage in stages if stage.startswith("runtime AS cuda")]
    (seconds,) = re.findall(r"^HEALTHCHECK .*--start-period=(\d+)s", cuda, re.MULTILINE)
    values = yaml.safe_load((DOCKER / "chart" / "values.yaml").read_text("utf-8"))
    assert int(seconds) >= values["defaults"]["startupTimeoutSeconds"]


def test_prometheus_target_is_the_name_of_each_server() -> None:
    (job,) = PROMETHEUS["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    for name in ("cpu", "slim", "cuda"):
        service = COMPOSE["services"][name]
        assert service["networks"]["default"]["aliases"] == [host]
        assert service["ports"][0].endswith(f":{port}")
    assert job.get("metrics_path", "/metrics") == "/metrics"
