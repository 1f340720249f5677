"""What the system still holds of an answer for a client that reads it slowly."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import termios
from array import array


def num_unacknowledged(transport: asyncio.BaseTransport) -> int:
    """Returns the bytes that the system holds for the client: it takes more only when a third of its own is free.

    So an honest reader may take for minutes before our own buffer shrinks. 0 where the system does not tell.
    """
    number = array("i", [0])
    with contextlib.suppress(OSError):  # the socket is closing, or the system is none that tells
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, number)
    return number[0]
