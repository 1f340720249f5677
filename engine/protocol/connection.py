"""One end of a Unix socket between a frontend and a core: messages in their order, each with its frames.

Who waits for a message waits on the socket itself, and who sends one writes to it: no thread stands in between, as
waking one costs more than most messages do. Where the other end does not keep up, a thread sends what is left over, so
that a sender never waits.

A message is a row of 64-bit sizes, of its parts and before these how many there are, and then the parts, each padded so
that the next one begins at a multiple of 8 Bytes: arrays in frames lie where numpy wants them.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice
from struct import Struct
from typing import Final

from .messages import Frame

logger = logging.getLogger("penstock.engine")

_SIZE: Final = Struct("<q")
_ALIGNMENT: Final = 8
_PADDING: Final = tuple(bytes(-size % _ALIGNMENT) for size in range(_ALIGNMENT))
_BUFFER_BYTES: Final = 1 << 16
"""A message that is larger gets a buffer of its own, and keeps it."""
_UNREAD_BYTES: Final = 1 << 22
"""What a socket holds until it is read, or less where the system allows less: the rows of a large batch."""
_MOST_PARTS: Final = 256
"""Of one call to the system; it takes at least 1,024."""

Message = tuple[memoryview, list[Frame]]
"""What `encode` of messages.py gave, and the frames."""


class MessageConnection:
    """Sends and receives. `send` and `close` are thread-safe; `receive` belongs to one thread.

    Args:
        stream: A connected stream socket, which belongs to the connection from now on.
    """

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        self._socket = stream
        self._lock = threading.Lock()  # of what is sent
        self._unsent: deque[memoryview] = deque()
        self._sender: threading.Thread | None = None  # while something is unsent
        self._is_closed = False
        self._buffer = bytearray(_BUFFER_BYTES)
        self._num_held = 0  # Bytes in it: messages that have come in part

    @classmethod
    def open(cls, address: str) -> MessageConnection:
        """Connects to who listens at a path.

        Raises:
            OSError: Nobody does.
        """
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.connect(address)
        except OSError:
            stream.close()
            raise
        return cls(stream)

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when messages come; -1 after `close`."""
        return self._socket.fileno()

    def send(self, first: bytes, frames: Sequence[Frame] = ()) -> None:
        """Sends a message without waiting; nothing where the other end has gone.

        The frames may be read for long after: nobody may write to them.
        """
        parts = [first, *frames]
        whole = [memoryview(Struct(f"<{len(parts) + 1}q").pack(len(parts), *map(len, parts)))]
        for part in parts:
            whole += (memoryview(part), memoryview(_PADDING[len(part) % _ALIGNMENT]))
        with self._lock:
            if self._is_closed:
                return
            self._unsent.extend(whole)
            if self._sender is not None:
                return
            try:
                while self._unsent and (num_bytes := self._push(self._next_parts())):
                    self._drop(num_bytes)
            except ConnectionError:  # nobody hears it; whoever receives here is told
                self._unsent.clear()
            if self._unsent:
                sender = threading.Thread(target=self._send_the_rest, name="sender", daemon=True)
                sender.start()
                self._sender = sender

    def receive(self) -> list[Message]:
        """Returns the messages that have come since the last call, without waiting.

        Raises:
            EOFError: The other end has gone, and all that it has sent has been received.
        """
        messages: list[Message] = []
        while not self._is_closed:
            room = memoryview(self._buffer)[self._num_held :]
            try:
                num_bytes = self._socket.recv_into(room)
            except BlockingIOError:
                break
            except ConnectionError:
                num_bytes = 0
            if not num_bytes:
                if not messages:
                    raise EOFError("the other end of the connection has gone")
                break  # the socket stays readable: the next call tells
            self._num_held += num_bytes
            self._take_whole(messages)
            if num_bytes < len(room):  # there was no more; what comes from now on makes the socket readable again
                break
        return messages

    def close(self, linger_s: float = 0.0) -> None:
        """Closes it; what has been sent gets so many seconds to leave. May be called twice."""
        if linger_s and (sender := self._sender) is not None:
            sender.join(linger_s)
        with self._lock:
            self._is_closed = True
            self._give_up()
            sender = self._sender  # no other follows
        if sender is not None:
            sender.join()  # it has been woken; nobody else may get its descriptor before
        self._socket.close()

    def _take_whole(self, messages: list[Message]) -> None:
        """Adds the whole messages of the buffer; what follows them stays, in a buffer that will hold all of it."""
        data, begin, end = memoryview(self._buffer), 0, self._num_held
        num_bytes, places = layout(data[:end])
        while num_bytes <= end - begin:
            is_alone = num_bytes > _BUFFER_BYTES  # in its buffer
            whole = data if is_alone else memoryview(bytes(data[begin : begin + num_bytes]))
            messages.append((whole[places[0]], [whole[place] for place in places[1:]]))
            if is_alone:
                self._buffer, self._num_held = bytearray(_BUFFER_BYTES), 0
                return
            begin += num_bytes
            num_bytes, places = layout(data[begin:end])
        if begin == 0 and num_bytes <= len(data):
            return  # it grows where it lies
        rest = bytes(data[begin:end])
        if num_bytes > len(data):
            self._buffer = bytearray(num_bytes)
        self._num_held = len(rest)
        self._buffer[: len(rest)] = rest

    def _next_parts(self) -> list[memoryview]:
        """Returns what goes out next. The caller holds the lock."""
        return list(islice(self._unsent, _MOST_PARTS))

    def _push(self, parts: list[memoryview]) -> int:
        """Returns the Bytes that the socket took; 0 where it takes nothing now. Not for two threads at once."""
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0

    def _drop(self, num_bytes: int) -> None:
        """Forgets what has been sent. The caller holds the lock."""
        while self._unsent and num_bytes >= len(self._unsent[0]):
            num_bytes -= len(self._unsent.popleft())
        if num_bytes and self._unsent:  # else given up meanwhile
            self._unsent[0] = self._unsent[0][num_bytes:]

    def _send_the_rest(self) -> None:
        """Sends until nothing is left over; runs in a thread. Others may add to it, and do not wait for the system."""
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        try:
            while True:
                with self._lock:
                    parts = self._next_parts()
                    if not parts:
                        self._sender = None
                        return
                if num_bytes := self._push(parts):
                    with self._lock:
                        self._drop(num_bytes)
                else:
                    room.poll()
        except OSError as error:  # what is missing of a message cannot be sent later
            if not isinstance(error, ConnectionError):
                logger.exception("a connection between the server and its engine is given up")
            with self._lock:
                self._give_up()
                self._sender = None

    def _give_up(self) -> None:
        """Ends the connection for both ends: whoever receives is told. The caller holds the lock."""
        self._unsent.clear()
        with contextlib.suppress(OSError):  # it has ended, at this end or the other
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a sender that waits


def layout(data: memoryview) -> tuple[int, list[slice]]:
    """Returns the Bytes of the message that begins there, and where its parts are in it.

    Of one whose sizes have not come, the Bytes up to their end, and no parts.
    """
    if len(data) < _SIZE.size:
        return _SIZE.size, []
    (num_parts,) = _SIZE.unpack_from(data)
    num_bytes: int = (1 + num_parts) * _SIZE.size
    places: list[slice] = []
    if len(data) >= num_bytes:
        for size in Struct(f"<{num_parts}q").unpack_from(data, _SIZE.size):
            places.append(slice(num_bytes, num_bytes + size))
            num_bytes += size + -size % _ALIGNMENT
    return num_bytes, places
