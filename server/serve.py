"""`penstock serve`: settings to a running server."""

from __future__ import annotations

import functools
import gc
import logging
import math
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Final

import uvicorn

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.config import EngineConfig
from penstock.engine.errors import ModelLoadError
from penstock.engine.model_files import resolve_model

from .app import check_prompt_name, create_app
from .command_errors import UsageError
from .context import ServedModel
from .logs import configure_logging
from .settings import ServerSettings, unknown_variables

logger = logging.getLogger(__name__)

START_FAILED: Final = 3
_MAYBE_HUB_ID: Final = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
KEEP_ALIVE_S: Final = 120  # Above the idle time of every client's pool (Go: 90 s), which do not replay a sent POST.


def serve(settings: ServerSettings, model: str, names: tuple[str, ...]) -> None:
    """Serves until SIGTERM or SIGINT, then lets running requests finish.

    Args:
        settings: What the operator asked for.
        model: Local folder or hub id.
        names: Served names, the shown one first.

    Raises:
        UsageError: The address cannot be bound, or the model's files refuse; found before the model is loaded.
        SystemExit: SIGTERM came (0), or the model cannot be loaded (not 0); the log has said why.
    """
    configure_logging(settings.log_level, settings.log_format)
    for variable in unknown_variables():
        logger.warning("the environment variable %s is not known and has no effect", variable)
    config = settings.engine_config(model, names[0])
    check_model(config, settings.default_prompt_name)
    listener = bound_socket(settings.host, settings.port)
    start = functools.partial(AsyncEngine.start, config, log_level=settings.log_level.upper())
    server = uvicorn.Server(
        uvicorn.Config(
            create_app([ServedModel(names, start)], settings, on_ready=_freeze),
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(settings.drain_timeout_s),
        )
    )
    # uvicorn raises the signal again when it has shut down; a stop on request is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server.run(sockets=[listener])
    if not server.started:
        raise SystemExit(START_FAILED)


def check_model(config: EngineConfig, default_prompt_name: str | None) -> None:
    """Reads the JSON files of a local model, in milliseconds. A hub id is left to the engine, which may download it.

    Raises:
        UsageError: The engine would refuse the model, or it lacks the prompt.
    """
    if _MAYBE_HUB_ID.fullmatch(config.model) and not Path(config.model).exists():
        return
    try:
        check_prompt_name(default_prompt_name, resolve_model(config))
    except ModelLoadError as error:
        raise UsageError(error.message) from error


def bound_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound but does not listen: clients are refused until the model is loaded.

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
    """Takes what start-up has made out of the collector's sight, so that it is not walked while requests wait."""
    gc.collect()
    gc.freeze()
