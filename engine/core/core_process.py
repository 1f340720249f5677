"""The engine process: an EngineCore and its connections to engine clients. engine_process.py starts it.

    python -P -m penstock.engine.core.core_process ADDRESS DESCRIPTOR

The parent listens at ADDRESS, in a folder of its own, and passes the DESCRIPTOR of the socket. The first connection is
the parent's, and its first message is Start. Other engine clients may connect later (Attach). Standard input is a
socket: the process echoes the bytes of the parent, and ends when the parent closes it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import socket
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from ..host import trim_heap
from ..logs import configure_logging, flush_logs
from ..protocol.batch_outputs import ResultArray, pack_results, unpack_results
from ..protocol.message_connection import Message, MessageConnection
from ..protocol.messages import (
    STUCK_EXIT_CODE,
    Attach,
    ClientMessage,
    Frame,
    FromCore,
    PrefixCacheCleared,
    RequestFailed,
    Start,
    StepResults,
    Stop,
    connection_number_of,
    decode_to_core,
    encode,
)
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
_PAUSE_S: Final = 0.5
"""Seconds before the next attempt to accept a connection after one has failed."""

_Part = tuple[FromCore, list[Frame]]


def main() -> None:
    """Runs the process until Stop arrives or the parent ends."""
    address, descriptor = sys.argv[1:3]
    threading.Thread(target=_echo_heartbeats, args=(Path(address),), name="lifeline", daemon=True).start()
    waker = Waker()
    connections = ClientConnections(socket.socket(fileno=int(descriptor)), waker)
    start = connections.await_start()
    configure_logging(start.log_level, start.log_format)
    core = EngineCore(start.config, connections.send, load_runner, on_ready=_freeze, waker=waker, on_stuck=_end_stuck)
    connections.serve(core)
    try:
        core.run()
    except Exception:
        logger.exception("the engine process ends")
        flush_logs()
        os._exit(1)  # the interpreter's shutdown would wait for a stuck driver
    connections.close(_LINGER_S)


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
    with contextlib.suppress(ConnectionError):  # the parent was killed
        while heartbeats := os.read(lifeline, _HEARTBEAT_BYTES):
            os.write(lifeline, heartbeats)
    with contextlib.suppress(OSError):  # a parent that ended normally has removed them
        (folder / address.name).unlink(missing_ok=True)
        folder.rmdir()
    os._exit(0)


class ClientConnections:
    """The connections to all engine clients. Used on the engine thread only.

    The parent has connection 0. It also gets the messages that concern no particular engine client.

    Args:
        listener: Socket where engine clients connect. This object closes it.
        waker: Wakes the engine thread when an engine client has sent data.
    """

    def __init__(self, listener: socket.socket, waker: Waker) -> None:
        self._listener = listener
        self._waker = waker
        self._core: EngineCore
        self._connections: dict[int, MessageConnection] = {}
        self._is_shared = False  # there are several engine clients
        self._early: list[Message] = []  # messages received together with Start

    def await_start(self) -> Start:
        """Waits for connection 0 and returns its first message.

        Raises:
            EOFError: The parent disconnected before it sent a message.
            TypeError: The first message is not Start.
        """
        stream, _ = self._listener.accept()
        first = self._connections[0] = MessageConnection(stream)
        while not (messages := first.receive()):
            select.select([first], [], [])
        (message, _), *self._early = messages
        start = decode_to_core(message)
        if not isinstance(start, Start):
            raise TypeError(f"the first message must be Start, not {type(start).__name__}")
        return start

    def serve(self, core: EngineCore) -> None:
        """Starts to pass messages to a core. Errors are raised in the callbacks that `Waker.wait` returns."""
        self._core = core
        if self._early:
            self._receive(self._connections[0])
        self._listener.setblocking(False)
        self._waker.watch(self._listener, self._accept)
        self._watch(self._connections[0])

    def send(self, message: FromCore, frames: list[Frame]) -> None:
        """Sends a message. If it concerns several engine clients, each gets its part."""
        parts = split(message, frames) if self._is_shared else {0: (message, frames)}
        for number, (part, part_frames) in parts.items():
            connection = self._connections.get(number)
            if connection is not None:
                connection.send(encode(part), part_frames)

    def close(self, linger_s: float) -> None:
        """Closes all connections. Waits up to `linger_s` seconds for sent messages to leave."""
        for connection in self._connections.values():
            connection.close(linger_s)
        self._listener.close()

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except BlockingIOError:  # the client has disconnected again
            return
        except OSError as error:  # for example too many open files; connected clients are not affected
            logger.error("an engine client cannot connect: %s", error)
            self._waker.pause(self._listener, _PAUSE_S)  # the listener stays readable and would wake every step
            return
        self._watch(MessageConnection(stream))

    def _watch(self, connection: MessageConnection) -> None:
        self._waker.watch(connection, partial(self._receive, connection))

    def _receive(self, connection: MessageConnection) -> None:
        try:
            messages = self._early or connection.receive()
            self._early = []
        except EOFError:
            self._disconnect(connection)
            return
        for encoded, frames in messages:
            message = decode_to_core(encoded)
            if isinstance(message, ClientMessage):
                self._core.receive(message, *frames)
            elif isinstance(message, Attach):
                self._connections[message.connection_number] = connection
                self._is_shared = True
            elif isinstance(message, Stop):
                self._core.stop()
            else:
                raise TypeError(f"unexpected message {type(message).__name__}")

    def _disconnect(self, connection: MessageConnection) -> None:
        """Cancels the requests of an engine client that has disconnected."""
        self._waker.unwatch(connection)
        connection.close()
        for number in [number for number, other in self._connections.items() if other is connection]:
            del self._connections[number]
            self._core.cancel_connection(number)


def split(message: FromCore, frames: list[Frame]) -> dict[int, _Part]:
    """Splits a message by connection. Returns the part of each connection, by connection number.

    A connection gets the metrics of steps with results for it. Connection 0 gets the metrics of all steps.
    """
    if isinstance(message, RequestFailed | PrefixCacheCleared):
        return {connection_number_of(message.request_id): (message, frames)}
    if not isinstance(message, StepResults):
        return {0: (message, frames)}
    arrays: dict[int, list[ResultArray]] = {0: []}
    finished: dict[int, list[tuple[int, float, float]]] = {}
    for results in unpack_results(message, frames):
        positions: dict[int, list[int]] = {}
        for position, request_id in enumerate(results.request_ids):
            positions.setdefault(connection_number_of(request_id), []).append(position)
        for number, indices in positions.items():
            arrays.setdefault(number, []).append(results.pick(indices))
    for request in message.finished:
        finished.setdefault(connection_number_of(request[0]), []).append(request)
    parts: dict[int, _Part] = {}
    for number in arrays.keys() | finished.keys():
        headers, own_frames = pack_results(arrays.get(number, []))
        part = msgspec.structs.replace(message, arrays=headers, finished=finished.get(number, []))
        parts[number] = part, own_frames
    return parts


if __name__ == "__main__":
    main()
