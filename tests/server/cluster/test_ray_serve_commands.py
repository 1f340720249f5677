"""Deployed models after failures and signals, over a fake Ray Serve."""

import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine import EngineConfig
from penstock.server.cluster.balancing import BUSY, QUEUE_S
from penstock.server.cluster.ray_replica import applications_of
from penstock.server.cluster.ray_settings import RayServeSettings
from penstock.server.http.http_server import KEEP_ALIVE_S
from penstock.server.settings import CommandError, UsageError, load_settings

from ...waiting import wait_until

PACKAGE = "penstock.server.cluster"
IMPORT_RAY = (f"{PACKAGE}.ray_serve", f"{PACKAGE}.ray_connection")
ADDRESS = {"host": "::1", "port": 81, "ssl_certfile": "/c.pem", "ssl_keyfile": "/k.pem"}
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Deployment:
    """A deployment of Ray Serve: its name and its options."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.settings: dict[str, Any] = {}

    def options(self, **settings: Any) -> "Deployment":
        self.settings = settings
        return self

    def bind(self, build: object) -> "Deployment":
        return self


class Serve:
    """Ray Serve. The application `broken` cannot be deployed."""

    def __init__(self) -> None:
        self.applications: dict[str, SimpleNamespace] = {}
        self.broken = ""
        self.message = "Traceback:\n  first\n\nValueError: no weights\n  note\n\n"
        self.is_running = False
        self.on_delete: Callable[[], object] = lambda: None
        self.http_config: Any = None
        self.deployments: dict[str, Deployment] = {}

    def start(self, *, http_options: Any, proxy_location: str) -> None:
        self.proxy_location = proxy_location
        if not self.is_running:
            self.is_running, self.http_config = True, http_options

    def ingress(self) -> Callable[[type], type]:
        return lambda replica: replica

    def deployment(self, replica: type, *, name: str) -> Deployment:
        return Deployment(name)

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(applications=dict(self.applications))

    def run(self, deployment: Deployment, *, name: str, route_prefix: str) -> None:
        self.deployments[name] = deployment
        deployments = {"model": SimpleNamespace(message=self.message if name == self.broken else "")}
        self.applications[name] = SimpleNamespace(deployments=deployments, route_prefix=route_prefix)
        if name == self.broken:
            raise RuntimeError("DEPLOY_FAILED")

    def delete(self, name: str) -> None:
        self.on_delete()
        self.applications.pop(name, None)

    def shutdown(self) -> None:
        self.is_running = False


@pytest.fixture
def ray_serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    serve = Serve()
    names = ("AutoscalingConfig", "AutoscalingPolicy", "BackpressureConfig", "RequestRouterConfig")
    config = SimpleNamespace(HTTPOptions=lambda **options: SimpleNamespace(**options), **dict.fromkeys(names, dict))
    context = SimpleNamespace(_get_global_client=lambda: SimpleNamespace(http_config=serve.http_config))
    ray = SimpleNamespace(serve=serve, init=lambda *_, **__: None, shutdown=lambda: None)
    modules = {"ray": ray, "ray.serve": serve, "ray.serve.config": config, "ray.serve.context": context}
    modules[f"{PACKAGE}.ray_router"] = SimpleNamespace(LeastTokensRouter=object)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in IMPORT_RAY:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    yield serve
    for name in IMPORT_RAY:
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore the signal handlers. During the test no signal is ignored."""
    before = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is signal.SIG_IGN else handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def serve_models(ray_serve: Serve):
    """Serve models by their names."""
    module = importlib.import_module(f"{PACKAGE}.ray_serve")

    def run(*names: str, **settings: Any) -> None:
        applications = applications_of([(EngineConfig(model=name), (name,), None) for name in names])
        module.serve_on_ray(applications, load_settings(RayServeSettings, settings))

    return run


def signal_soon(number: int, ray_serve: Serve, name: str) -> None:
    """Send a signal to this process after an application is deployed."""

    def send() -> None:
        wait_until(lambda: name in ray_serve.applications)  # the handlers are set before the deployment
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize("detach", [True, False])
def test_failed_start_takes_down_only_new_models(serve_models, ray_serve: Serve, detach: bool) -> None:
    serve_models("a", "b", detach=True)
    assert set(ray_serve.applications) == {"penstock-a", "penstock-b"}
    ray_serve.broken = "penstock-d"
    with pytest.raises(CommandError, match=r"d cannot be served on Ray: ValueError: no weights$"):
        serve_models("a", "c", "d", "e", detach=detach)
    assert set(ray_serve.applications) == {"penstock-a", "penstock-b"}
    assert ray_serve.is_running


def test_failed_first_start_leaves_nothing(serve_models, ray_serve: Serve) -> None:
    ray_serve.broken = "penstock-b"
    for ray_serve.message, cause in (("", "DEPLOY_FAILED"), ("a\nlast\n\n", "last")):
        with pytest.raises(CommandError, match=f"b cannot be served on Ray: {cause}$"):
            serve_models("a", "b", detach=True)
    assert not ray_serve.applications
    assert not ray_serve.is_running


@pytest.mark.parametrize("number", STOPS)
def test_signal_takes_down_the_models_of_the_command(serve_models, ray_serve: Serve, number: int, caplog) -> None:
    serve_models("a", "x", detach=True)
    signal_soon(number, ray_serve, "penstock-b")
    ray_serve.on_delete = lambda: signal.raise_signal(number)  # a second signal has no effect
    caplog.set_level("INFO")
    serve_models("a", "b")
    assert caplog.messages[-1] == "stopping on a signal"
    assert set(ray_serve.applications) == {"penstock-a", "penstock-x"}


def test_settings_reach_the_deployment(serve_models, ray_serve: Serve) -> None:
    scaling = {"min_replicas": 2, "max_replicas": 4, "upscale_delay_s": 7.0, "downscale_delay_s": 8.0}
    limits = {"max_ongoing_requests": 5, "max_queued_requests": 6}
    serve_models("a", detach=True, replica_cpus=3, replica_gpus=0.5, drain_timeout_s=9.0, **limits, **scaling)
    deployment = ray_serve.deployments["penstock-a"]
    del deployment.settings["autoscaling_config"]["policy"]
    router = {"request_router_class": object, "request_routing_stats_period_s": 1.0}  # the router of the fixture
    assert deployment.name == "model"
    assert deployment.settings == {
        **limits,
        "ray_actor_options": {"num_cpus": 3, "num_gpus": 0.5},
        "backpressure_config": {"status_code": 429, "retry_after_s": 1.0},
        "autoscaling_config": {**scaling, "look_back_period_s": 15.0},
        "request_router_config": router,
        "graceful_shutdown_timeout_s": 19.0,
        "max_constructor_retry_count": 3,
    }


def test_replicas_follow_the_queued_seconds_of_the_settings(serve_models, ray_serve: Serve) -> None:
    serve_models("a", detach=True, target_queue_s=0.5)
    policy = ray_serve.deployments["penstock-a"].settings["autoscaling_config"]["policy"]
    metrics = {QUEUE_S: {"replica": 1.0}, BUSY: {"replica": 0.0}}
    context = SimpleNamespace(target_num_replicas=1, policy_state={}, aggregated_metrics=metrics)
    assert policy["policy_function"](**policy["policy_kwargs"])(context) == (2, {})


def test_proxies_get_the_address_and_the_certificate(serve_models, ray_serve: Serve) -> None:
    serve_models("a", detach=True, **ADDRESS)
    assert vars(ray_serve.http_config) == {**ADDRESS, "keep_alive_timeout_s": KEEP_ALIVE_S}
    assert (ray_serve.proxy_location, os.environ["RAY_USAGE_STATS_ENABLED"]) == ("EveryNode", "0")
    assert logging.getLogger("ray").level == logging.INFO


@pytest.mark.parametrize(
    ("name", "value"), [("host", "::"), ("port", 82), ("ssl_certfile", "/d.pem"), ("ssl_keyfile", "/d.pem")]
)
def test_proxies_with_another_address_are_rejected(serve_models, ray_serve: Serve, name: str, value: object) -> None:
    serve_models("a", detach=True, **ADDRESS)
    setattr(ray_serve.http_config, name, value)
    flag = "--" + name.replace("_", "-")
    with pytest.raises(UsageError, match=f"^{flag}: Ray Serve runs on this cluster with another value: {value}"):
        serve_models("b", detach=True, **ADDRESS)
