"""One end of a Unix socket between an engine client and a core. It sends and receives messages, each with its frames.

Sender and receiver use the socket directly, because waking a thread costs more than most messages. If the other end
does not read fast enough, a thread sends the rest, so that `send` never blocks.

Format of a message: the number of its parts and the size of each part, as 64-bit integers, then the parts. Each part is
padded to a multiple of 8 bytes, so that numpy can use arrays in frames without a copy.
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
"""Size of the shared buffer. A larger message gets its own buffer."""
_UNREAD_BYTES: Final = 1 << 22
"""Send buffer of a socket, enough for the results of a large batch. The system may allow less."""
_MAX_PARTS: Final = 256
"""Most parts of one system call; the system accepts at least 1,024."""

Message = tuple[memoryview, list[Frame]]
"""The result of `encode` of messages.py, and the frames."""


class MessageConnection:
    """Sends and receives messages. `send` and `close` are thread-safe; `receive` belongs to one thread.

    Args:
        stream: A connected stream socket. The connection closes it.
    """

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        self._socket = stream
        self._lock = threading.Lock()  # of the fields for sending
        self._unsent: deque[memoryview] = deque()
        self._sender: threading.Thread | None = None  # exists while something is unsent
        self._is_closed = False
        self._buffer = bytearray(_BUFFER_BYTES)
        self._num_held = 0  # bytes in the buffer: incomplete messages

    @classmethod
    def open(cls, address: str) -> MessageConnection:
        """Connects to the listener at a path.

        Raises:
            OSError: There is no listener.
        """
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.connect(address)
        except OSError:
            stream.close()
            raise
        return cls(stream)

    def fileno(self) -> int:
        """Returns the descriptor that is readable when messages have arrived; -1 after `close`."""
        return self._socket.fileno()

    def send(self, first: bytes, frames: Sequence[Frame] = ()) -> None:
        """Sends a message without blocking. Does nothing if the other end is closed.

        The frames may be read after this call returns: do not change them.
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
            except ConnectionError:  # the other end is closed; `receive` raises EOFError
                self._unsent.clear()
            if self._unsent:
                sender = threading.Thread(target=self._send_rest, name="sender", daemon=True)
                sender.start()
                self._sender = sender

    def receive(self) -> list[Message]:
        """Returns the messages that have arrived since the last call, without blocking.

        Raises:
            EOFError: The other end is closed, and all its messages have been received.
        """
        messages: list[Message] = []
        while not self._is_closed:
            free = memoryview(self._buffer)[self._num_held :]
            try:
                num_bytes = self._socket.recv_into(free)
            except BlockingIOError:
                break
            except ConnectionError:
                num_bytes = 0
            if not num_bytes:
                if not messages:
                    raise EOFError("the other end closed the connection")
                break  # the socket stays readable: the next call raises EOFError
            self._num_held += num_bytes
            self._extract_messages(messages)
            if num_bytes < len(free):  # the socket is empty; new data makes it readable again
                break
        return messages

    def close(self, linger_s: float = 0.0) -> None:
        """Closes the connection. Waits up to `linger_s` seconds for sent messages to leave. May be called twice."""
        if linger_s and (sender := self._sender) is not None:
            sender.join(linger_s)
        with self._lock:
            self._is_closed = True
            self._shut_down()
            sender = self._sender  # no other sender starts
        if sender is not None:
            sender.join()  # it has been woken; the descriptor must not be reused before it ends
        self._socket.close()

    def _extract_messages(self, messages: list[Message]) -> None:
        """Moves complete messages out of the buffer. Keeps the rest in a buffer large enough for its message."""
        data = memoryview(self._buffer)
        begin = 0
        end = self._num_held
        num_bytes, parts = layout(data[:end])
        while num_bytes <= end - begin:
            has_own_buffer = num_bytes > _BUFFER_BYTES
            whole = data if has_own_buffer else memoryview(bytes(data[begin : begin + num_bytes]))
            messages.append((whole[parts[0]], [whole[part] for part in parts[1:]]))
            if has_own_buffer:
                self._buffer = bytearray(_BUFFER_BYTES)
                self._num_held = 0
                return
            begin += num_bytes
            num_bytes, parts = layout(data[begin:end])
        if begin == 0 and num_bytes <= len(data):
            return  # the message continues in this buffer
        rest = bytes(data[begin:end])
        if num_bytes > len(data):
            self._buffer = bytearray(num_bytes)
        self._num_held = len(rest)
        self._buffer[: len(rest)] = rest

    def _next_parts(self) -> list[memoryview]:
        """Returns the next unsent parts. The caller holds the lock."""
        return list(islice(self._unsent, _MAX_PARTS))

    def _push(self, parts: list[memoryview]) -> int:
        """Returns the number of bytes that the socket accepted; 0 if it is full. One thread at a time."""
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0

    def _drop(self, num_bytes: int) -> None:
        """Removes sent bytes from the unsent parts. The caller holds the lock."""
        while self._unsent and num_bytes >= len(self._unsent[0]):
            num_bytes -= len(self._unsent.popleft())
        if num_bytes and self._unsent:  # else shut down meanwhile
            self._unsent[0] = self._unsent[0][num_bytes:]

    def _send_rest(self) -> None:
        """Sends until nothing is unsent. Runs in a thread; `send` may add parts meanwhile."""
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
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
                    poller.poll()
        except OSError as error:  # an incomplete message cannot be continued
            if not isinstance(error, ConnectionError):
                logger.exception("closing a connection between the server and its engine after an error")
            with self._lock:
                self._shut_down()
                self._sender = None

    def _shut_down(self) -> None:
        """Ends the connection for both ends: `receive` raises EOFError. The caller holds the lock."""
        self._unsent.clear()
        with contextlib.suppress(OSError):  # already closed at this end or the other
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a waiting sender


def layout(data: memoryview) -> tuple[int, list[slice]]:
    """Returns the size of the first message in `data` in bytes, and the slices of its parts.

    If the sizes are incomplete, returns the number of bytes up to the end of the sizes, and no slices.
    """
    if len(data) < _SIZE.size:
        return _SIZE.size, []
    (num_parts,) = _SIZE.unpack_from(data)
    num_bytes: int = (1 + num_parts) * _SIZE.size
    parts: list[slice] = []
    if len(data) >= num_bytes:
        for size in Struct(f"<{num_parts}q").unpack_from(data, _SIZE.size):
            parts.append(slice(num_bytes, num_bytes + size))
            num_bytes += size + -size % _ALIGNMENT
    return num_bytes, parts
