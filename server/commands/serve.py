"""`penstock serve`: runs a server from its settings until it is stopped."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final

import uvloop

from penstock.engine import EngineConfig
from penstock.engine.client.engine_process import EngineProcess
from penstock.engine.client.vector_cache.cache import VectorCache
from penstock.engine.logs import configure_logging
from penstock.engine.protocol.errors import ModelLoadError

from ..admission import ServerRefusalReason
from ..app import create_app
from ..middleware.auth import ApiKeys
from ..models.served_model import ModelEntry, ServedModel
from ..settings import EmbedSettings, ServerSettings, UsageError, exit_code_of, unknown_variables
from ..transport.connection_limits import TransferLimits, raise_file_limit
from ..transport.http_server import HttpServer, freeze, uvicorn_config
from .announcement import announcement, exposure
from .model_plans import ModelPlan
from .served_models import kept_config, served_models

logger = logging.getLogger(__name__)

START_FAILED: Final = 3


def serve(settings: ServerSettings, plans: Sequence[ModelPlan], process: EngineProcess | None = None) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, then lets running requests finish.

    Args:
        settings: Of the server.
        plans: The models.
        process: Engine process of the first model, if it has been started already.

    Raises:
        UsageError: The address cannot be bound, or a model's files, the certificate or the keys cannot be used. Raised
            before a model is loaded.
        SystemExit: SIGTERM or SIGHUP came (0), or the model cannot be loaded (not 0); the log says why.
    """
    configure_logging(settings.log_level, settings.log_format)
    for variable in unknown_variables((ServerSettings, EmbedSettings)):
        logger.warning("the environment variable %s is not known and has no effect", variable)
    num_engines = min(len(plans), settings.max_loaded_models or len(plans))
    cache = open_cache(settings)
    models = served_models(plans, settings, num_engines, process, cache)
    check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    if settings.api_workers > 1:
        check_workers(settings, plans)
        configs = [kept_config(plan, num_engines) for plan in plans]
        listener = bound_socket(settings.host, settings.port)
        _serve_by_workers(settings, plans, list(zip(models, configs, strict=True)), listener, process)
        return
    failures: list[Exception] = []

    def give_up(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    def announce() -> None:
        freeze()
        _announce(app.state.context.models.entries, settings, listener)

    raise_file_limit()
    app = create_app(models, settings, cache=cache, on_ready=announce, on_failure=give_up)
    listener = bound_socket(settings.host, settings.port)
    on_slow = partial(app.state.context.metrics.count_refusal, ServerRefusalReason.SLOW_TRANSFER)
    server = HttpServer(uvicorn_config(app, settings), TransferLimits.of(settings), on_slow=on_slow)
    # uvicorn raises the signal again when it has shut down; a stop on request is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _stop_on_hangup(server)
    with contextlib.closing(cache) if cache is not None else contextlib.nullcontext():
        server.run(sockets=[listener])
    for error in failures:  # logged last: people read the end of a log first
        _tell(error)
    if failures or not server.started:
        raise SystemExit(_exit_code(failures, plans))


def _serve_by_workers(
    settings: ServerSettings,
    plans: Sequence[ModelPlan],
    models: Sequence[tuple[ServedModel, EngineConfig]],
    listener: socket.socket,
    process: EngineProcess | None,
) -> None:
    """Serves by several HTTP processes; ends as `serve` does."""
    from ..workers.supervisor import NothingServedError, WorkerSupervisor

    async def supervise() -> WorkerSupervisor:
        supervisor = WorkerSupervisor(settings, models, process, lambda entries: _announce(entries, settings, listener))
        await supervisor.run(listener)
        return supervisor

    raise_file_limit()
    ApiKeys(settings.api_key, settings.api_key_file)  # refused now, and not by each process
    supervisor = uvloop.run(supervise())
    for error in supervisor.failures:
        if isinstance(error, NothingServedError):
            logger.error("no HTTP process can serve")
        else:
            _tell(error)
    if supervisor.failures:
        raise SystemExit(_exit_code(supervisor.failures, plans))
    if supervisor.signals[:1] == [signal.SIGINT]:
        raise KeyboardInterrupt


def check_workers(settings: ServerSettings, plans: Sequence[ModelPlan]) -> None:
    """Raises UsageError for what several HTTP processes cannot do."""
    for plan in plans:
        if (plan.config.data_parallel or len(plan.config.devices)) > 1:
            raise UsageError("--api-workers: with more than one, a model has one replica; leave --data-parallel out")
        if plan.config.in_process:
            raise UsageError("--api-workers: several processes cannot ask an engine that is --in-process")
        if not plan.is_preloaded or plan.ttl_s < math.inf:
            raise UsageError(
                f"--api-workers: with more than one, every model is loaded at the start; {plan.names[0]}"
                " is to come and go"
            )
    for flag, value in (
        ("--admin-key", settings.admin_key),
        ("--admin-key-file", settings.admin_key_file),
        ("--model-memory", settings.model_memory),
    ):
        if value:
            raise UsageError(f"--api-workers: with more than one, models do not come and go; leave {flag} out")
    if settings.data_dir is not None:
        raise UsageError("--api-workers: with more than one, nobody runs batches; leave --data-dir out")


def _announce(entries: Sequence[ModelEntry], settings: ServerSettings, listener: socket.socket) -> None:
    logger.info("%s", announcement(entries, settings, listener.getsockname()[1]))
    if (warning := exposure(settings)) is not None:
        logger.warning("%s", warning)


def _exit_code(failures: Sequence[Exception], plans: Sequence[ModelPlan]) -> int:
    """Returns the exit code of a start that failed: the first failure is that of the first model."""
    config = plans[0].config
    return exit_code_of(failures[0], config.model, config.revision, START_FAILED) if failures else START_FAILED


def _tell(failure: Exception) -> None:
    """Logs why the engine could not be started."""
    if isinstance(failure, ModelLoadError):
        logger.error("%s", failure.message)
    elif isinstance(failure, OSError):
        logger.error("the engine could not be started: %s", failure)
    else:
        logger.error("the engine could not be started", exc_info=failure)


def _stop_on_hangup(server: HttpServer) -> None:
    """Treats a closed terminal as SIGTERM. A server that was started with nohup ignores it."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return

    def stop(_: int, frame: FrameType | None) -> None:
        if not server.should_exit:
            logger.warning("SIGHUP: the terminal was closed; the server finishes what it runs and stops")
        server.handle_exit(signal.SIGTERM, frame)

    signal.signal(signal.SIGHUP, stop)


def open_cache(settings: ServerSettings) -> VectorCache | None:
    """Opens the cache of embeddings; returns None if it is off.

    Raises:
        UsageError: An extra is missing, or there are several HTTP processes.
    """
    if settings.api_workers > 1 and (settings.cache is not None or settings.cache_dir is not None):
        raise UsageError("--api-workers: with more than one, nothing is cached; leave --cache and --cache-dir out")
    if settings.cache_dir is not None and importlib.util.find_spec("lmdb") is None:
        raise UsageError("--cache-dir: needs lmdb; install the extra: pip install 'penstock[cache]'")
    if settings.cache is None and settings.cache_dir is None:
        return None
    return VectorCache(int(settings.cache or 0), settings.cache_dir, int(settings.cache_dir_size))


def check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raises UsageError if the server could not speak TLS with these files."""
    if certificate is None:
        if key is not None:
            raise UsageError("--ssl-keyfile: needs --ssl-certfile beside it")
        return
    for flag, file in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        if file is not None and not os.access(file, os.R_OK):
            raise UsageError(f"{flag}: {file} cannot be read")
    try:
        # The empty password keeps OpenSSL from asking the terminal for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:  # ssl.SSLError is one
        files = certificate if key is None else f"{certificate} and {key}"
        raise UsageError(
            f"--ssl-certfile, --ssl-keyfile: {files} are no PEM certificate with its key, unencrypted: {error}"
        ) from error


def bound_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound but does not listen yet.

    Raises:
        UsageError: The address is in use or is none of this machine's.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(f"--host, --port: cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
