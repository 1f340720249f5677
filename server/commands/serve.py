"""`penstock serve`: runs a server from its settings until it is stopped, and logs what it serves."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import uvloop

from penstock.engine import EngineConfig, ModelInfo
from penstock.engine.client.engine_process import EngineProcess
from penstock.engine.client.vector_cache.cache import VectorCache
from penstock.engine.logs import configure_logging
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.protocol.setting import short_count

from ..admission import ServerRejectionReason
from ..app import create_app
from ..http.certificate import load_certificate
from ..http.connection_limits import TransferLimits
from ..http.http_server import RELOAD_MESSAGE, HttpServer, uvicorn_config
from ..http.process_setup import freeze_gc, raise_file_limit
from ..middleware.auth import ApiKeyStore
from ..models.model_entry import ModelEntry
from ..models.served_model import ServedModel, exit_code_of
from ..models.weight_files import WeightSummary
from ..observability.metrics import ConnectionMetrics
from ..settings import (
    BenchSettings,
    EmbedSettings,
    EvalSettings,
    ServerSettings,
    UsageError,
    unknown_variables,
)
from .model_start import served_models, single_core_config

logger = logging.getLogger(__name__)

START_FAILED: Final = 3


def serve(
    settings: ServerSettings, configured_models: Sequence[ServedModel], process: EngineProcess | None = None
) -> None:
    """Serves until SIGTERM or SIGINT, then lets running requests finish. SIGHUP reads keys and certificate again.

    Args:
        settings: Settings of the server.
        configured_models: One for each model to serve.
        process: Engine process of the first model, if it is already started.

    Raises:
        UsageError: The address cannot be bound, or a model's files, the certificate or the keys cannot be used. Raised
            before a model is loaded.
        SystemExit: With code 0 after SIGTERM, with another code if the model cannot be loaded (see the log).
    """
    configure_logging(settings.log_level, settings.log_format)
    for note in settings.env_notes:
        logger.info("%s", note)
    for variable in unknown_variables((ServerSettings, EmbedSettings, EvalSettings, BenchSettings)):
        logger.warning("the environment variable %s is not known and has no effect", variable)
    num_engines = min(len(configured_models), settings.max_loaded_models or len(configured_models))
    cache = open_cache(settings)
    models = served_models(configured_models, settings, num_engines, process, cache)
    check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    if settings.api_workers > 1:
        check_workers(settings, configured_models)
        configs = [single_core_config(model, num_engines) for model in configured_models]
        models = [replace(model, config=config) for model, config in zip(models, configs, strict=True)]
        listeners = bound_sockets(settings)
        _serve_by_workers(settings, configured_models, models, listeners, process)
        return
    failures: list[Exception] = []

    def give_up(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    def announce() -> None:
        freeze_gc()
        _announce(app.state.context.models.entries, settings, listeners)

    raise_file_limit()
    app = create_app(models, settings, cache=cache, on_ready=announce, on_failure=give_up)
    listeners = bound_sockets(settings)
    on_slow = partial(app.state.context.metrics.count_rejection, ServerRejectionReason.SLOW_TRANSFER)
    config = uvicorn_config(app, settings)
    limits = TransferLimits.of(settings)
    server = HttpServer(config, limits, on_slow=on_slow, metrics_app=app.metrics_app, on_reload=app.reload_keys)
    app.state.context.metrics.register(ConnectionMetrics(server.server_state))
    # uvicorn raises the signal again after its shutdown; a requested stop is not a failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGHUP, lambda *_: _reload(server))
    with contextlib.closing(cache) if cache is not None else contextlib.nullcontext():
        server.run(sockets=listeners)
    for error in failures:  # logged last, because users read the end of a log first
        _log_failure(error)
    if failures or not server.started:
        raise SystemExit(_exit_code(failures, configured_models))


def _serve_by_workers(
    settings: ServerSettings,
    configured_models: Sequence[ServedModel],
    models: Sequence[ServedModel],
    listeners: Sequence[socket.socket],
    process: EngineProcess | None,
) -> None:
    """Serves with several HTTP processes. Raises the same errors as `serve`."""
    from ..workers.supervisor import NothingServedError, WorkerSupervisor

    async def supervise() -> WorkerSupervisor:
        supervisor = WorkerSupervisor(
            settings, models, process, lambda entries: _announce(entries, settings, listeners)
        )
        await supervisor.run(*listeners)
        return supervisor

    raise_file_limit()
    ApiKeyStore(settings.api_key, settings.api_key_file)  # raises an error now instead of in each process
    supervisor = uvloop.run(supervise())
    for error in supervisor.failures:
        if isinstance(error, NothingServedError):
            logger.error("no HTTP process can serve")
        else:
            _log_failure(error)
    if supervisor.failures:
        raise SystemExit(_exit_code(supervisor.failures, configured_models))
    if supervisor.signals[:1] == [signal.SIGINT]:
        raise KeyboardInterrupt


def check_workers(settings: ServerSettings, configured_models: Sequence[ServedModel]) -> None:
    """Raises UsageError for settings that several HTTP processes do not support."""
    for model in configured_models:
        if (model.config.data_parallel or len(model.config.devices)) > 1:
            raise UsageError(
                "--api-workers: with more than one, each model has only one replica; leave --data-parallel out"
            )
        if model.config.in_process:
            raise UsageError(
                "--api-workers: several processes cannot share an engine with --in-process; leave --in-process out"
            )
        if not model.is_preloaded or model.ttl_s < math.inf:
            raise UsageError(
                f"--api-workers: with more than one, every model is loaded at the start and never unloaded; "
                f"{model.names[0]} is not"
            )
    for flag, value in (
        ("--admin-key", settings.admin_key),
        ("--admin-key-file", settings.admin_key_file),
        ("--model-memory", settings.model_memory),
    ):
        if value:
            raise UsageError(f"--api-workers: with more than one, models are never unloaded; leave {flag} out")
    if settings.data_dir is not None:
        raise UsageError("--api-workers: batches need a single process; leave --data-dir out")


def _announce(entries: Sequence[ModelEntry], settings: ServerSettings, listeners: Sequence[socket.socket]) -> None:
    logger.info("%s", announcement(entries, settings, [listener.getsockname()[1] for listener in listeners]))
    if (warning := open_access_warning(settings)) is not None:
        logger.warning("%s", warning)


def _exit_code(failures: Sequence[Exception], configured_models: Sequence[ServedModel]) -> int:
    """Returns the exit code of a failed start. The first failure belongs to the first model."""
    config = configured_models[0].config
    return exit_code_of(failures[0], config.model, config.revision, START_FAILED) if failures else START_FAILED


def _log_failure(failure: Exception) -> None:
    if isinstance(failure, ModelLoadError):
        logger.error("%s", failure.message)
    elif isinstance(failure, OSError):
        logger.error("the engine could not be started: %s", failure)
    else:
        logger.error("the engine could not be started", exc_info=failure)


def _reload(server: HttpServer) -> None:
    logger.info(RELOAD_MESSAGE)
    server.request_reload()


def open_cache(settings: ServerSettings) -> VectorCache | None:
    """Opens the cache of embeddings; returns None if it is off.

    Raises:
        UsageError: An extra is missing, or there are several HTTP processes.
    """
    if settings.api_workers > 1 and (settings.cache is not None or settings.cache_dir is not None):
        raise UsageError("--api-workers: the cache needs a single process; leave --cache and --cache-dir out")
    if settings.cache_dir is not None and importlib.util.find_spec("lmdb") is None:
        raise UsageError("--cache-dir: needs lmdb; install the extra: pip install 'penstock[cache]'")
    if settings.cache is None and settings.cache_dir is None:
        return None
    return VectorCache(int(settings.cache or 0), settings.cache_dir, int(settings.cache_dir_size))


def check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raises UsageError if TLS cannot use these files."""
    if certificate is None:
        if key is not None:
            raise UsageError("--ssl-keyfile: needs --ssl-certfile too")
        return
    for flag, file in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        if file is not None and not os.access(file, os.R_OK):
            raise UsageError(f"{flag}: {file} cannot be read")
    try:
        load_certificate(certificate, key)
    except OSError as error:  # includes ssl.SSLError
        files = certificate if key is None else f"{certificate} and {key}"
        raise UsageError(
            f"--ssl-certfile, --ssl-keyfile: {files} must be a PEM certificate with its unencrypted key: {error}"
        ) from error


def bound_sockets(settings: ServerSettings) -> list[socket.socket]:
    """Returns the sockets of --port and, if it is set, of --metrics-port. They are bound but do not listen yet.

    Raises:
        UsageError: An address is in use or does not belong to this machine, or both ports are equal.
    """
    if settings.metrics_port is None:
        if settings.metrics_host is not None:
            raise UsageError("--metrics-host: needs --metrics-port too")
        return [_bound_socket(settings.host, settings.port, "--host, --port")]
    if settings.metrics_port == settings.port != 0:
        raise UsageError(f"--metrics-port: {settings.port} is also --port; choose another port")
    main = _bound_socket(settings.host, settings.port, "--host, --port")
    host = settings.host if settings.metrics_host is None else settings.metrics_host
    try:
        return [main, _bound_socket(host, settings.metrics_port, "--metrics-host, --metrics-port")]
    except UsageError:
        main.close()
        raise


def _bound_socket(host: str, port: int, flags: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(f"{flags}: cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


_ALL_ADDRESSES: Final = ("0.0.0.0", "::", "")


def announcement(models: Sequence[ModelEntry], settings: ServerSettings, ports: Sequence[int]) -> str:
    """Returns the log lines of a ready server.

    Args:
        models: All served models, loaded or not.
        settings: Settings of the server.
        ports: Ports of the listening sockets, which the system chose if the settings say 0.
    """
    lines = ["ready"]
    for entry in models:
        lines += _lines(entry, entry.model.config)
    scheme = "http" if settings.ssl_certfile is None else "https"
    url = f"{scheme}://{_shown_host(settings.host)}:{ports[0]}"
    lines.append(f"  {url}/ is a playground, {url}/docs shows the routes, {url}/v1 is the base URL of OpenAI clients")
    if len(ports) > 1:
        metrics_host = settings.host if settings.metrics_host is None else settings.metrics_host
        lines.append(f"  metrics: http://{_shown_host(metrics_host)}:{ports[1]}/metrics")
    lines.append(f"  data routes need {'an' if _wants_key(settings) else 'no'} API key")
    return "\n".join(lines)


def _shown_host(host: str) -> str:
    """Returns the host of a URL that reaches an address to listen on."""
    if host in _ALL_ADDRESSES:
        return "localhost"
    return f"[{host}]" if ":" in host else host


def _lines(entry: ModelEntry, config: EngineConfig) -> list[str]:
    if entry.engine is None:
        why = "could not be loaded; see above" if entry.error is not None else "is loaded when a request names it"
        return [f"  {entry.name}: {why}"]
    info = entry.engine.info
    placements = [replica.placement for replica in entry.engine.replicas]
    return [
        f"  {entry.name}: {_sizes(info)}",
        f"    on {_device(info, config)}, in {_dtype(info, config)}; tasks: {', '.join(info.tasks)}",
        *([f"    {_replicas(placements)}"] if placements else []),
    ]


def open_access_warning(settings: ServerSettings) -> str | None:
    """Returns a warning if the server needs no API key and listens on other addresses than localhost, else None."""
    if _wants_key(settings) or settings.host not in _ALL_ADDRESSES:
        return None
    return "every client that reaches this machine may use the server: set --api-key KEY or --host 127.0.0.1"


def _wants_key(settings: ServerSettings) -> bool:
    return bool(settings.api_key) or settings.api_key_file is not None


def _device(info: ModelInfo, config: EngineConfig) -> str:
    if config.devices:
        why = "--devices"
    elif config.device != "auto":
        why = "--device"
    else:
        why = "auto: there is no CUDA device" if info.device == "cpu" else "auto: there is a CUDA device"
    lanes = f", {info.num_lanes} lane{'s' * (info.num_lanes > 1)}" if info.num_lanes else ""
    kernels, _, instructions = info.kernels.partition(", ")
    executor = f"the C library ({instructions})" if kernels == "native" else info.kernels
    return f"{info.device} ({why}) by {executor}{lanes}"


def _replicas(placements: Sequence[str]) -> str:
    count = "1 replica" if len(placements) == 1 else f"{len(placements)} replicas"
    return f"{count}: {'; '.join(placements)}"


def _dtype(info: ModelInfo, config: EngineConfig) -> str:
    """Returns the type of the weights and why, and the type of products or attention if it differs."""
    source = info.sources["dtype"]
    if config.dtype != "auto":
        why = "--dtype"
    elif source.startswith("measured"):
        why = source
    else:
        why = f"auto: {info.dtype} on {'a CPU' if info.device == 'cpu' else 'a GPU'}"
    if info.arithmetic is None or (why == source and info.arithmetic == info.dtype):  # arithmetic repeats the dtype
        return f"{info.dtype} ({why})"
    part = "attention" if info.dtype == "int8" else "products"
    return f"{info.dtype} ({why}), {part} in {info.arithmetic} ({info.sources['arithmetic']})"


def _sizes(info: ModelInfo) -> str:
    count = WeightSummary.of(info.path).num_parameters
    parts = [info.model_type, f"{short_count(count)} parameters"] if count else [info.model_type]
    if info.embedding_size:
        parts.append(f"{info.dimensions or info.embedding_size} dimensions")
    if info.labels:
        parts.append("1 class" if len(info.labels) == 1 else f"{len(info.labels)} classes")
    return ", ".join([*parts, f"inputs of up to {info.max_model_len} tokens"])
