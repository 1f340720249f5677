"""A folder of its own for the socket of one engine process, under a name that the kernel takes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

_MAX_PATH: Final = 103
"""Bytes of a socket's path: 107 on Linux, 103 elsewhere."""
_DESCRIPTORS: Final = Path("/proc/self/fd")
SOCKET: Final = "engine"
"""Name of the socket."""
_ROOM: Final = len(f"/{SOCKET}")


class SocketFolder(NamedTuple):
    """Where the socket is.

    Attributes:
        path: Of the folder, in this process and in one that gets the descriptors.
        descriptors: Open files that a process has to inherit, under the same number, for `path` to mean the folder.
    """

    path: str
    descriptors: tuple[int, ...]


@contextmanager
def socket_folder() -> Iterator[SocketFolder]:
    """Makes a folder where temporary files lie, which this user alone can enter, and removes it.

    A socket's path may be 107 bytes long, and TMPDIR may be longer. Such a folder is reached through an open file of
    it: an abstract socket would be short too, but open to every user of the machine.

    Raises:
        OSError: There is no place for it; on systems without /proc also: its path is too long.
    """
    folder = tempfile.mkdtemp(prefix="penstock-")  # mode 0700
    try:
        if folder.isascii() and len(folder) + _ROOM <= _MAX_PATH:
            yield SocketFolder(folder, ())
            return
        if not _DESCRIPTORS.is_dir():
            raise OSError(f"{folder} is too long a path for a socket; set TMPDIR to a shorter folder")
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield SocketFolder(str(_DESCRIPTORS / str(descriptor)), (descriptor,))
        finally:
            os.close(descriptor)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
