"""The engine process: an EngineCore between two sockets. Started by process_core.py; ends when its parent does.

    python -P -m penstock.engine.core.worker INBOX OUTBOX

INBOX and OUTBOX are ZeroMQ endpoints; the process binds the first and connects to the second. The first message must be
Start. Other frontends may connect to the inbox later; each says where it awaits its answers (Attach). End of standard
input means that the parent has gone, however it went.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Final

import zmq

from ..logs import configure_logging
from ..protocol.ipc.frontends import Attach, Detach
from ..protocol.ipc.messages import Ping, Pong, Start, Stop, ToCore, Turn, decode_to_core
from .core import EngineCore
from .load_runner import load_runner
from .outboxes import Outboxes

logger = logging.getLogger("penstock.engine")

_REMOVAL_ATTEMPTS: Final = 100
_COLLECT_AFTER: Final = 50_000
"""Objects that there are more than at the last collection. Those of requests are freed without the collector, and to
look at all that wait whenever 700 more have come, as Python does, took as long as the rest of the loop."""


def main() -> None:
    """Runs the process until Stop arrives or the parent ends."""
    inbox_endpoint, outbox_endpoint = sys.argv[1:3]

    endpoints = (inbox_endpoint, outbox_endpoint)
    threading.Thread(target=_end_with_parent, args=endpoints, name="parent-watch", daemon=True).start()
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.set_hwm(0)  # admission bounds what is under way; a socket must never block or drop
    inbox.bind(inbox_endpoint)
    outboxes = Outboxes(context, outbox_endpoint)

    start = decode_to_core(inbox.recv())
    if not isinstance(start, Start):
        raise TypeError(f"the first message must be Start, not {type(start).__name__}")
    configure_logging(start.log_level, start.log_format)
    # Pong, and what EngineCore.receive refuses or does at once, come from the receiving thread, all else not.
    core = EngineCore(start.config, outboxes.send, load_runner, on_ready=_freeze)
    receiving = threading.Thread(target=_receive, args=(inbox, core, outboxes), name="inbox", daemon=True)
    receiving.start()
    try:
        core.run()
    except Exception:
        logger.exception("the engine process ends")
        os._exit(1)  # not through the interpreter's shutdown, which would wait for the inbox thread
    outboxes.close(linger_ms=2000)
    context.term()  # ends the inbox thread and waits until the last messages have left
    # It lets go of the core, and so of the weights. Where the interpreter ended meanwhile, Python would end the thread
    # inside a tensor's destructor, and C++ takes that for a crash.
    receiving.join()


def _freeze() -> None:
    """Takes what loading has made, torch above all, out of the collector's sight: walking it takes tens of ms.

    What it has used meanwhile goes back to the system, as far as the C library can say so: glibc's keeps some 10 MB.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, *gc.get_threshold()[1:])
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _receive(inbox: zmq.Socket[bytes], core: EngineCore, outboxes: Outboxes) -> None:
    """Hands messages to the core as they come; a message that it cannot take ends the process, never hangs it."""
    try:
        while True:
            first, *frames = inbox.recv_multipart()
            _take(decode_to_core(first), frames, core, outboxes)
    except zmq.ContextTerminated:
        inbox.close(linger=0)
    except Exception:
        logger.exception("the engine process cannot read its inbox")
        os._exit(1)


def _take(message: ToCore, frames: list[bytes], core: EngineCore, outboxes: Outboxes) -> None:
    """Takes a message from its frontend to where it belongs."""
    if isinstance(message, Turn):
        if not outboxes.is_from_gone(message):
            core.receive(message, *frames)
    elif isinstance(message, Ping):
        outboxes.send(Pong(), [])
    elif isinstance(message, Attach):
        outboxes.attach(message.frontend, message.outbox)
    elif isinstance(message, Detach):
        outboxes.detach(message.frontend)
        core.forget(message.frontend)
    elif isinstance(message, Stop):
        core.stop()
    else:
        raise TypeError(f"{type(message).__name__} cannot come now")


def _end_with_parent(*endpoints: str) -> None:
    """Blocks until the parent's end of standard input closes, then ends the process at once.

    A parent that was killed has left its sockets behind: they go too, with their folder, and nothing else in it.
    """
    folder = Path(endpoints[0].removeprefix("ipc://")).parent.resolve()  # it may be the name of an open file
    while os.read(sys.stdin.fileno(), 1):
        pass
    for _ in range(_REMOVAL_ATTEMPTS):  # the other thread may make a socket in between
        for endpoint in endpoints:
            with contextlib.suppress(OSError):
                (folder / Path(endpoint).name).unlink(missing_ok=True)
        try:
            folder.rmdir()
        except FileNotFoundError:  # the parent has removed it itself, as it does where it ends in peace
            break
        except OSError:
            time.sleep(0.01)
        else:
            break
    os._exit(0)


if __name__ == "__main__":
    main()
