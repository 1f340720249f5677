"""`penstock ray serve`: one Ray Serve application per model. Its replicas are engines."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from fastapi import FastAPI
from ray import serve
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingPolicy,
    BackpressureConfig,
    HTTPOptions,
    RequestRouterConfig,
)
from ray.serve.context import _get_global_client  # the version is pinned: there is no public way to the HTTP options

from ..settings import CommandError, UsageError
from .balancing import QueuePolicy
from .ray_connection import connected
from .ray_replica import Mount, RayReplica, build_app
from .ray_router import LeastTokensRouter
from .ray_settings import RayServeSettings

logger = logging.getLogger(__name__)

Build = Callable[[RayServeSettings, Mount], FastAPI]

_REPORT_EVERY_S: Final = 1.0
_LOOK_BACK_S: Final = 15.0
"""Seconds over which the autoscaler takes the mean; replicas report every ten seconds."""
_CLOSE_S: Final = 10.0
"""Seconds that a drained engine gets to end, after those for draining."""
_RETRY_AFTER_S: Final = 1.0
_KEEP_ALIVE_S: Final = 120  # as `penstock serve`
_PROXY_FLAGS: Final = {
    "host": "--host",
    "port": "--port",
    "ssl_certfile": "--ssl-certfile",
    "ssl_keyfile": "--ssl-keyfile",
}
_MOST_STARTS: Final = 3
"""Attempts to start a replica."""


def serve_on_ray(mounts: Sequence[Mount], settings: RayServeSettings) -> None:
    """Deploys models. Then waits for a signal and takes them down again, except with `--detach`.

    Other models on the cluster stay; a model of the same name is replaced. A signal also ends the wait for a model that
    does not start.

    Raises:
        CommandError: There is no such cluster, or a model cannot be served; the message says why.
    """
    with connected(settings.address, settings.log_level):
        ours: list[Mount] = []
        try:
            _raise_at_signals()
            start_proxies(settings)
            before = set(serve.status().applications)
            for mount in mounts:
                if mount.app not in before:
                    ours.append(mount)
                deploy(mount, settings)
                logger.info(
                    "%s is served at http://%s:%d%s", mount.names[0], settings.host, settings.port, mount.prefix
                )
            if settings.detach:
                ours.clear()
                return
            threading.Event().wait()
        except KeyboardInterrupt:
            logger.info("stopping on a signal")
        finally:
            take_down(ours)


def _raise_at_signals() -> None:
    """Makes the first stop signal raise KeyboardInterrupt, the one error that Ray's calls do not catch.

    Later signals have no effect: taking models down has time limits of its own. Call this after Ray has set its own
    handlers, which abort.
    """
    stops = [
        number
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]

    def stop(*_: object) -> None:
        for number in stops:
            signal.signal(number, lambda *_: None)
        raise KeyboardInterrupt

    for number in stops:
        signal.signal(number, stop)


def start_proxies(settings: RayServeSettings) -> None:
    """Starts Ray Serve with its HTTP proxies, if it does not run yet.

    Raises:
        UsageError: It runs with another address or certificate.
    """
    certificate = settings.ssl_certfile and str(settings.ssl_certfile.resolve())
    key = settings.ssl_keyfile and str(settings.ssl_keyfile.resolve())
    options = HTTPOptions(
        host=settings.host,
        port=settings.port,
        keep_alive_timeout_s=_KEEP_ALIVE_S,
        ssl_certfile=certificate,
        ssl_keyfile=key or certificate,
    )
    serve.start(proxy_location=settings.proxy_location, http_options=options)
    now = _get_global_client().http_config
    for field, flag in _PROXY_FLAGS.items():
        if getattr(now, field) != getattr(options, field):
            raise UsageError(
                f"{flag}: Ray Serve runs on this cluster with another: {getattr(now, field)}; give that, or end it by "
                "`serve shutdown`"
            )


def take_down(mounts: Sequence[Mount]) -> None:
    """Takes models down, each when its requests are answered; if no model is left, Ray Serve too."""
    for mount in mounts:
        serve.delete(mount.app)
    if mounts and not serve.status().applications:
        serve.shutdown()


def deploy(mount: Mount, settings: RayServeSettings, build: Build = build_app) -> None:
    """Deploys one model and waits until its first replicas serve. Replicas of an earlier one are replaced one by one.

    Raises:
        CommandError: It cannot be served.
    """
    replica: Any = serve.ingress()(RayReplica)
    deployment = serve.deployment(replica, name="model").options(**deployment_options(settings))
    application = deployment.bind(partial(build, settings, mount))
    try:
        serve.run(application, name=mount.app, route_prefix=mount.prefix)
    except RuntimeError as error:
        raise CommandError(f"{mount.names[0]} cannot be served on Ray: {_cause(mount, error)}") from error


def deployment_options(settings: RayServeSettings) -> dict[str, Any]:
    """Returns the options of a deployment of Ray Serve."""
    return {
        "ray_actor_options": {"num_cpus": settings.replica_cpus, "num_gpus": settings.replica_gpus},
        "max_ongoing_requests": settings.max_ongoing_requests,
        "max_queued_requests": settings.max_queued_requests,
        "backpressure_config": BackpressureConfig(status_code=429, retry_after_s=_RETRY_AFTER_S),
        "autoscaling_config": AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.most_replicas,
            upscale_delay_s=settings.upscale_delay_s,
            downscale_delay_s=settings.downscale_delay_s,
            look_back_period_s=_LOOK_BACK_S,
            policy=AutoscalingPolicy(
                policy_function=QueuePolicy, policy_kwargs={"target_queue_s": settings.target_queue_s}
            ),
        ),
        "request_router_config": RequestRouterConfig(
            request_router_class=LeastTokensRouter, request_routing_stats_period_s=_REPORT_EVERY_S
        ),
        "graceful_shutdown_timeout_s": settings.drain_timeout_s + _CLOSE_S,
        "max_constructor_retry_count": _MOST_STARTS,
    }


def _cause(mount: Mount, error: RuntimeError) -> str:
    """Returns the last error line of the messages that Ray has for a deployment, without the traceback before it."""
    status = serve.status().applications.get(mount.app)
    messages = [each.message for each in status.deployments.values()] if status is not None else []
    lines = [line.strip() for text in messages for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line]
    return str((errors or lines or [error])[-1])
