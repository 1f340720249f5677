"""The engine process: an EngineCore and the sockets of its clients. engine_process.py starts it.

    python -P -m penstock.engine.core.worker ADDRESS DESCRIPTOR

The parent listens at ADDRESS, in a folder of its own, and passes the DESCRIPTOR of the socket. The first connection is
the parent's, and its first message is Start. Other clients may connect later (Attach). Standard input is a socket: the
process echoes the bytes of the parent, and ends when the parent closes it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Final

from ..heap import trim_heap
from ..logs import configure_logging, flush_logs
from ..protocol.messages import STUCK_EXIT_CODE
from .client_connections import ClientConnections
from .core import EngineCore
from .load_runner import load_runner
from .waker import Waker

logger = logging.getLogger("penstock.engine")

_COLLECT_AFTER: Final = 50_000
"""New objects before a garbage collection. With Python's default of 700, collections take as long as the rest of the
loop, although reference counts free the objects of requests."""
_LINGER_S: Final = 2.0
_HEARTBEAT_BYTES: Final = 64
"""More than the unanswered heartbeats of the parent."""


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
    """Excludes the objects of loading from garbage collections, which would take tens of milliseconds.

    Also returns free memory to the system, because glibc keeps about 10 MB.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, *gc.get_threshold()[1:])
    trim_heap()


def _end_stuck(reason: str) -> None:
    """Ends the process because its engine thread is stuck. If a driver blocks the exit, the heartbeat stops, too."""
    flush_logs()
    os._exit(STUCK_EXIT_CODE)


def _echo_heartbeats(address: Path) -> None:
    """Echoes the parent's heartbeats and ends the process when the parent has ended.

    Then removes the socket and its folder, which a killed parent leaves behind.
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
