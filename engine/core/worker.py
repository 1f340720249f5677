"""The engine process: an EngineCore and the sockets of its frontends. engine_process.py starts it; it ends with that.

    python -P -m penstock.engine.core.worker ADDRESS DESCRIPTOR

The parent listens at ADDRESS, in a folder for it alone, and hands the socket over as an open file. The first connection
is the parent's, and the first message Start; other frontends may connect later (Attach). Standard input is a socket,
too: what the parent writes there comes back as long as the process lives, and its end means that the parent has gone.
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
from ..protocol.ipc.messages import STUCK_EXIT_CODE
from .bell import Bell
from .core import EngineCore
from .frontends import Frontends
from .load_runner import load_runner

logger = logging.getLogger("penstock.engine")

_COLLECT_AFTER: Final = 50_000
"""Objects that there are more than at the last collection. Those of requests are freed without the collector, and to
look at all that wait whenever 700 more have come, as Python does, took as long as the rest of the loop."""
_LINGER_S: Final = 2.0
_MOST_QUESTIONS: Final = 64
"""Bytes: more than the parent asks before it gives up."""


def main() -> None:
    """Runs the process until Stop arrives or the parent ends."""
    address, descriptor = sys.argv[1:3]
    threading.Thread(target=_answer_parent, args=(Path(address),), name="lifeline", daemon=True).start()
    bell = Bell()
    frontends = Frontends(socket.socket(fileno=int(descriptor)), bell)
    start = frontends.await_start()
    configure_logging(start.log_level, start.log_format)
    core = EngineCore(start.config, frontends.send, load_runner, on_ready=_freeze, bell=bell, on_stuck=_end_stuck)
    frontends.serve(core)
    try:
        core.run()
    except Exception:
        logger.exception("the engine process ends")
        flush_logs()
        os._exit(1)  # not through the interpreter's shutdown, which would wait for what a driver holds
    frontends.close(_LINGER_S)


def _freeze() -> None:
    """Takes what loading has made, torch above all, out of the collector's sight: walking it takes tens of ms.

    What it has used meanwhile goes back to the system, as far as the C library can say so: glibc's keeps some 10 MB.
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


def _answer_parent(address: Path) -> None:
    """Says that the process lives, whatever runs; ends it at once when the parent has gone.

    A parent that was killed has left the socket behind: it goes, too, with its folder, and nothing else in it.
    """
    folder = address.parent.resolve()  # it may be the name of an open file
    lifeline = sys.stdin.fileno()
    with contextlib.suppress(ConnectionError):
        while questions := os.read(lifeline, _MOST_QUESTIONS):
            os.write(lifeline, questions)
    with contextlib.suppress(OSError):  # the parent has removed them itself, as it does where it ends in peace
        (folder / address.name).unlink(missing_ok=True)
        folder.rmdir()
    os._exit(0)


if __name__ == "__main__":
    main()
