"""A worker without a model, run as a process: `played_worker.py INBOX OUTBOX`. The model's name says what it does.

Its answer to Start and to a Turn is a Failed message that tells what came. "stays" ends at Stop, "ends" at once with
exit code 3, "garbage" sends what is no message, "deaf" does not heed Stop.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from pathlib import Path

import zmq

from penstock.engine.protocol.ipc.messages import Failed, Start, Stop, Turn, decode_to_core, encode


def main() -> None:
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.bind(sys.argv[1])
    outbox.connect(sys.argv[2])
    start = decode_to_core(inbox.recv())
    assert isinstance(start, Start)
    model = start.config.model
    surroundings = {
        "model": model,
        "leads_session": os.getsid(0) == os.getpid(),
        "has_pipe": stat.S_ISFIFO(os.fstat(0).st_mode) or stat.S_ISSOCK(os.fstat(0).st_mode),
        "folder_mode": stat.S_IMODE(Path(sys.argv[1].removeprefix("ipc://")).parent.stat().st_mode),
    }
    outbox.send(encode(Failed(0, "Start", json.dumps(surroundings))))
    if model == "garbage":
        outbox.send(b"no message")
    while model != "ends":
        first, *frames = inbox.recv_multipart()
        message = decode_to_core(first)
        if isinstance(message, Turn):
            outbox.send(encode(Failed(message.frontend, "Turn", b"".join(frames).decode())))
        elif isinstance(message, Stop):
            if model == "deaf":
                time.sleep(600)
            break
    context.destroy(linger=2000)
    sys.exit(3 if model == "ends" else 0)


if __name__ == "__main__":
    main()
