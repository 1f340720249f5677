"""The engine process: an EngineCore and the sockets of its clients. engine_process.py starts it.

    python -P -m penstock.engine.core.worker ADDRESS DESCRIPTOR

The parent listens at ADDRESS, in a folder that nothing else uses, and passes the socket as an open file. The first
connection is the parent's, and the first message Start. Other clients may connect later (Attach). Standard input is a
socket: the process echoes the bytes that the parent writes there, and ends when the parent closes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Final

from ..logs import configure_logging, flush_logs
from ..protocol.messages import STUCK_EXIT_CODE
from .client_connections import ClientConnections
from .core import EngineCore
from .load_runner import load_runner
from .waker import Waker

logger = logging.getLogger("penstock.engine")

_COLLECT_AFTER: Final = 50_000
"""New objects before a garbage collection. Objects of requests are freed without the collector; with Python's default
of 700, collections took as long as the rest of the loop."""
_LINGER_S: Final = 2.0
_HEARTBEAT_BYTES: Final = 64
"""More than the parent writes before it gives up."""


def main() -> None:
    """Runs the process until Stop arrives or the parent ends."""
    address, descriptor = sys.argv[1:3]
    threading.Thread(target=_echo_heartbeats, args=(Path(address),), name="lifeline", daemon=True).start()
    waker = Waker()
    clients = ClientConnections(socket.socket(fileno=int(descriptor)), waker)
    start = clients.await_start()
    configure_logging(start.log_level, start.log_format)
    core = EngineCore(start.config, clients.send, load_runner, on_ready=_freeze, waker=waker, on_stuck=_end_stuck)
    clients.serve(core)
    try:
        core.run()
    except Exception:
        logger.exception("the engine process ends")
        flush_logs()
        os._exit(1)  # the interpreter's shutdown would wait for a stuck driver
    clients.close(_LINGER_S)


def _freeze() -> None:
    """Excludes the objects made during loading from garbage collections, which would take tens of ms.

    Returns free memory to the system: glibc keeps about 10 MB otherwise.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, *gc.get_threshold()[1:])
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _end_stuck(reason: str) -> None:
    """Ends the process, whose engine thread is stuck. If a driver prevents that, the heartbeat stops, too."""
    flush_logs()
    os._exit(STUCK_EXIT_CODE)


def _echo_heartbeats(address: Path) -> None:
    """Echoes the parent's heartbeats and ends the process when the parent has ended.

    A killed parent leaves its socket and the socket's folder behind. This removes both.
    """
    folder = address.parent.resolve()  # the address may be a link
    lifeline = sys.stdin.fileno()
    with contextlib.suppress(ConnectionError):
        while heartbeats := os.read(lifeline, _HEARTBEAT_BYTES):
            os.write(lifeline, heartbeats)
    with contextlib.suppress(OSError):  # a parent that ended normally has removed them
        (folder / address.name).unlink(missing_ok=True)
        folder.rmdir()
    os._exit(0)


if __name__ == "__main__":
    main()
