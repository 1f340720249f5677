"""`penstock ray serve`: one Ray Serve application per model, with one engine per replica."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from fastapi import FastAPI
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig, HTTPOptions, RequestRouterConfig
from ray.serve.context import _get_global_client

from ..settings import CommandError, UsageError
from .balancing import QueueAutoscalingPolicy
from .ray_connection import connected
from .ray_replica import RayApplication, RayReplica, build_app
from .ray_router import LeastTokensRouter
from .ray_settings import RayServeSettings

logger = logging.getLogger(__name__)

Build = Callable[[RayServeSettings, RayApplication], FastAPI]

_REPORT_EVERY_S: Final = 1.0
_LOOK_BACK_S: Final = 15.0
"""Seconds over which the autoscaler averages metrics. Replicas report every ten seconds."""
_CLOSE_S: Final = 10.0
"""Seconds for an engine to end after the drain timeout."""
_RETRY_AFTER_S: Final = 1.0
_KEEP_ALIVE_S: Final = 120  # as in `penstock serve`
_SLEEP_S: Final = 1.0
"""Maximum seconds between a signal and its handler, if the signal arrives just before a sleep begins."""
_PROXY_FLAGS: Final = {
    "host": "--host",
    "port": "--port",
    "ssl_certfile": "--ssl-certfile",
    "ssl_keyfile": "--ssl-keyfile",
}
_MAX_STARTS: Final = 3
"""Maximum attempts to start a replica."""


def serve_on_ray(applications: Sequence[RayApplication], settings: RayServeSettings) -> None:
    """Deploys models. Without `--detach`, waits for a signal and then deletes the deployments.

    Other models on the cluster stay. A model with the same name is replaced. A signal also ends the wait for a model
    that does not start.

    Raises:
        CommandError: The cluster does not exist, or a model cannot be served. The message has the reason.
    """
    with connected(settings.address, settings.log_level):
        ours: list[RayApplication] = []
        try:
            _raise_at_signals()
            start_proxies(settings)
            before = set(serve.status().applications)
            for application in applications:
                if application.app not in before:
                    ours.append(application)
                deploy(application, settings)
                logger.info(
                    "%s is served at http://%s:%d%s",
                    application.names[0],
                    settings.host,
                    settings.port,
                    application.prefix,
                )
            if settings.detach:
                ours.clear()
                return
            while True:  # a signal in Event.wait may raise RuntimeError instead of KeyboardInterrupt
                time.sleep(_SLEEP_S)
        except KeyboardInterrupt:
            logger.info("stopping on a signal")
        finally:
            delete_applications(ours)


def _raise_at_signals() -> None:
    """Makes the first stop signal raise KeyboardInterrupt, the only error that Ray's calls do not catch.

    Later signals have no effect, because deletion has its own time limits. Call this after Ray has set its own signal
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
    """Starts Ray Serve with its HTTP proxies, unless it is running.

    Raises:
        UsageError: It is running with another address or certificate.
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
    now = _get_global_client().http_config  # private: no public function returns it; Ray's version is pinned
    for field, flag in _PROXY_FLAGS.items():
        if getattr(now, field) != getattr(options, field):
            raise UsageError(
                f"{flag}: Ray Serve runs on this cluster with another value: {getattr(now, field)}; use that, or stop "
                "it with `serve shutdown`"
            )


def delete_applications(applications: Sequence[RayApplication]) -> None:
    """Deletes the deployments of models after their running requests. Stops Ray Serve if no model is left."""
    for application in applications:
        serve.delete(application.app)
    if applications and not serve.status().applications:
        serve.shutdown()


def deploy(application: RayApplication, settings: RayServeSettings, build: Build = build_app) -> None:
    """Deploys one model and waits until its first replicas serve. Earlier replicas are replaced one by one.

    Raises:
        CommandError: The model cannot be served.
    """
    replica: Any = serve.ingress()(RayReplica)
    deployment = serve.deployment(replica, name="model").options(**deployment_options(settings))
    bound = deployment.bind(partial(build, settings, application))
    try:
        serve.run(bound, name=application.app, route_prefix=application.prefix)
    except RuntimeError as error:
        raise CommandError(f"{application.names[0]} cannot be served on Ray: {_cause(application, error)}") from error


def deployment_options(settings: RayServeSettings) -> dict[str, Any]:
    """Returns the options of a deployment of Ray Serve."""
    return {
        "ray_actor_options": {"num_cpus": settings.replica_cpus, "num_gpus": settings.replica_gpus},
        "max_ongoing_requests": settings.max_ongoing_requests,
        "max_queued_requests": settings.max_queued_requests,
        "backpressure_config": BackpressureConfig(status_code=429, retry_after_s=_RETRY_AFTER_S),
        "autoscaling_config": AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.replica_limit,
            upscale_delay_s=settings.upscale_delay_s,
            downscale_delay_s=settings.downscale_delay_s,
            look_back_period_s=_LOOK_BACK_S,
            policy=AutoscalingPolicy(
                policy_function=QueueAutoscalingPolicy, policy_kwargs={"target_queue_s": settings.target_queue_s}
            ),
        ),
        "request_router_config": RequestRouterConfig(
            request_router_class=LeastTokensRouter, request_routing_stats_period_s=_REPORT_EVERY_S
        ),
        "graceful_shutdown_timeout_s": settings.drain_timeout_s + _CLOSE_S,
        "max_constructor_retry_count": _MAX_STARTS,
    }


def _cause(application: RayApplication, error: RuntimeError) -> str:
    """Returns the last error line of Ray's messages about a deployment, without the traceback."""
    status = serve.status().applications.get(application.app)
    messages = [deployment.message for deployment in status.deployments.values()] if status is not None else []
    lines = [line.strip() for text in messages for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line]
    return str((errors or lines or [error])[-1])
