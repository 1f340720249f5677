"""`penstock serve`: settings to a running server."""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

import uvicorn

from penstock.engine.frontend.engine_process import EngineProcess
from penstock.engine.logs import configure_logging
from penstock.engine.protocol.errors import ModelLoadError

from ..app import create_app
from ..settings import ServerSettings, UsageError, unknown_variables
from ..transport.connection import Connection
from ..transport.connection_limits import raise_file_limit
from ..transport.http_server import HttpServer
from .announcement import announcement, exposure
from .model_plans import ModelPlan
from .served_models import served_model

logger = logging.getLogger(__name__)

START_FAILED: Final = 3
_COLLECT_AFTER: Final = 10_000
"""New objects after which the collector looks at them."""
KEEP_ALIVE_S: Final = 120  # Above the idle time of every client's pool (Go: 90 s), which do not replay a sent POST.


def serve(settings: ServerSettings, plans: Sequence[ModelPlan], process: EngineProcess | None = None) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, then lets running requests finish.

    Args:
        settings: What the operator asked for.
        plans: The models.
        process: Of the first model's engine, where it has been started already.

    Raises:
        UsageError: The address cannot be bound, or a file refuses: the model's, the certificate, the keys. Found before
            the model is loaded.
        SystemExit: SIGTERM or SIGHUP came (0), or the model cannot be loaded (not 0); the log has said why.
    """
    configure_logging(settings.log_level, settings.log_format)
    for variable in unknown_variables():
        logger.warning("the environment variable %s is not known and has no effect", variable)
    num_engines = min(len(plans), settings.max_loaded_models or len(plans))
    models = [served_model(plan, settings, num_engines, process if plan is plans[0] else None) for plan in plans]
    check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    failures: list[Exception] = []

    def give_up(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    def announce() -> None:
        _freeze()
        entries = app.state.context.models.entries
        logger.info("%s", announcement(entries, settings, listener.getsockname()[1]))
        if (warning := exposure(settings)) is not None:
            logger.warning("%s", warning)

    raise_file_limit()
    app = create_app(models, settings, on_ready=announce, on_failure=give_up)
    listener = bound_socket(settings.host, settings.port)
    server = HttpServer(
        uvicorn.Config(
            app,
            loop="uvloop",
            http=Connection,
            ws="none",
            lifespan="on",
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(settings.drain_timeout_s),
        ),
        body_s=settings.request_timeout_s or math.inf,
    )
    # uvicorn raises the signal again when it has shut down; a stop on request is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _stop_on_hangup(server)
    server.run(sockets=[listener])
    for error in failures:  # told last: what is read first is the end of a log
        _tell(error)
    if failures or not server.started:
        raise SystemExit(START_FAILED)


def _tell(failure: Exception) -> None:
    """Logs why the engine could not be started."""
    if isinstance(failure, ModelLoadError):
        logger.error("%s", failure.message)
    elif isinstance(failure, OSError):
        logger.error("the engine could not be started: %s", failure)
    else:
        logger.error("the engine could not be started", exc_info=failure)


def _stop_on_hangup(server: HttpServer) -> None:
    """Takes a closed terminal as SIGTERM. What was started to outlive its terminal (nohup) ignores it, and goes on."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return

    def stop(_: int, frame: FrameType | None) -> None:
        if not server.should_exit:
            logger.warning("SIGHUP: the terminal was closed; the server finishes what it runs and stops")
        server.handle_exit(signal.SIGTERM, frame)

    signal.signal(signal.SIGHUP, stop)


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


def _freeze() -> None:
    """Takes what start-up has made out of the collector's sight, and lets it look less often.

    It would walk what start-up has made while requests wait. Requests leave next to nothing that it could find: at
    Python's own threshold it takes about 6 % of their time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 20, 20)
