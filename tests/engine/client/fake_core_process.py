"""An engine process without a model: `fake_core_process.py ADDRESS DESCRIPTOR`. The model's name sets its behaviour.

It answers Start with LoadFailed and ClientMessage with RequestFailed, which hold the received data, and echoes stdin.
"stays" ends after Stop, "ends" at once with exit code 3, "stuck" at once with STUCK_EXIT_CODE, "garbage" sends an
invalid message, "deaf" ignores Stop.
"""

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
from penstock.engine.protocol.messages import (
    STUCK_EXIT_CODE,
    ClientMessage,
    LoadFailed,
    RequestFailed,
    Start,
    Stop,
    decode_to_core,
    encode,
)

EXIT_CODES = {"ends": 3, "stuck": STUCK_EXIT_CODE}


def receive_all(connection: MessageConnection) -> Iterator[Message]:
    while True:
        select.select([connection], [], [])
        yield from connection.receive()


def echo() -> None:
    while data := os.read(0, 64):
        os.write(0, data)


def main() -> None:
    threading.Thread(target=echo, daemon=True).start()
    with socket.socket(fileno=int(sys.argv[2])) as listener:
        connection = MessageConnection(listener.accept()[0])
    messages = receive_all(connection)
    start = decode_to_core(next(messages)[0])
    assert isinstance(start, Start)
    model = start.config.model
    environment = {
        "model": model,
        "leads_session": os.getsid(0) == os.getpid(),
        "has_lifeline": stat.S_ISSOCK(os.fstat(0).st_mode),
        "folder_mode": stat.S_IMODE(Path(sys.argv[1]).parent.stat().st_mode),
    }
    connection.send(encode(LoadFailed("Start", json.dumps(environment))))
    if model == "garbage":
        connection.send(b"no message")
    for first, frames in messages if model not in EXIT_CODES else ():
        message = decode_to_core(first)
        if isinstance(message, ClientMessage):
            text = b"".join(frames).decode()
            connection.send(encode(RequestFailed(message.connection_number, "ClientMessage", text)))
        elif isinstance(message, Stop):
            if model == "deaf":
                time.sleep(600)
            break
    connection.close(linger_s=2)
    sys.exit(EXIT_CODES.get(model, 0))


if __name__ == "__main__":
    main()
