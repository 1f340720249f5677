"""A worker without a model, as a process: `played_worker.py ADDRESS DESCRIPTOR`. The model's name says what it does.

Its answer to Start and to a Turn is a Failed message that tells what came. "stays" ends at Stop, "ends" at once with
exit code 3, "garbage" sends what is no message, "deaf" does not heed Stop. All send back what standard input says.
"""

from __future__ import annotations

import json
import os
import select
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from penstock.engine.protocol.message_connection import Message, MessageConnection
from penstock.engine.protocol.messages import ClientMessage, RequestFailed, Start, Stop, decode_to_core, encode


def messages_of(connection: MessageConnection) -> Iterator[Message]:
    while True:
        select.select([connection], [], [])
        yield from connection.receive()


def answer_parent() -> None:
    while questions := os.read(0, 64):
        os.write(0, questions)


def main() -> None:
    threading.Thread(target=answer_parent, daemon=True).start()
    with socket.socket(fileno=int(sys.argv[2])) as listener:
        connection = MessageConnection(listener.accept()[0])
    messages = messages_of(connection)
    start = decode_to_core(next(messages)[0])
    assert isinstance(start, Start)
    model = start.config.model
    surroundings = {
        "model": model,
        "leads_session": os.getsid(0) == os.getpid(),
        "has_lifeline": stat.S_ISSOCK(os.fstat(0).st_mode),
        "folder_mode": stat.S_IMODE(Path(sys.argv[1]).parent.stat().st_mode),
    }
    connection.send(encode(RequestFailed(0, "Start", json.dumps(surroundings))))
    if model == "garbage":
        connection.send(b"no message")
    for first, frames in messages if model != "ends" else ():
        message = decode_to_core(first)
        if isinstance(message, ClientMessage):
            connection.send(encode(RequestFailed(message.client_number, "Turn", b"".join(frames).decode())))
        elif isinstance(message, Stop):
            if model == "deaf":
                time.sleep(600)
            break
    connection.close(linger_s=2)
    sys.exit(3 if model == "ends" else 0)


if __name__ == "__main__":
    main()
