"""Starts and ends an engine process and creates its socket. running_core.py sends it messages.

Imports few modules, so that a server can start the engine process, which may import torch, before the server's own
imports.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

_MAX_PATH: Final = 103
"""Bytes of a socket's path: 107 on Linux, 103 elsewhere."""
_DESCRIPTORS: Final = Path("/proc/self/fd")
SOCKET: Final = "engine"
"""Name of the socket."""


class SocketFolder(NamedTuple):
    """Folder of the socket.

    Attributes:
        path: Path of the folder, in this process and in a child that inherits the descriptors.
        descriptors: Descriptors that a child must inherit under the same number, because `path` may contain one.
    """

    path: str
    descriptors: tuple[int, ...]


@contextmanager
def spare_descriptors() -> Iterator[None]:
    """Lets this process open files up to the hard limit: HTTP connections may hold all up to the soft limit.

    The context must not wait, because connections could take these descriptors too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS does not grant its hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def socket_folder() -> Iterator[SocketFolder]:
    """Creates a temporary folder that only this user can enter, and removes it at the end.

    The path of a socket has at most 107 bytes; TMPDIR may be longer. A long path is replaced by the path of an open
    descriptor below /proc. An abstract socket would be open to every user of the machine.

    Raises:
        OSError: The folder cannot be created, or its path is too long and there is no /proc.
    """
    folder = tempfile.mkdtemp(prefix="penstock-")  # mode 0700
    try:
        if folder.isascii() and len(f"{folder}/{SOCKET}") <= _MAX_PATH:
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


_KILL_TIMEOUT_S: Final = 1.0
"""Seconds to wait for the end of a killed process."""
_BACKLOG: Final = 1024
"""Connections that the process has not accepted yet."""


class EngineProcess:
    """A process that runs core_process.py and waits for Start. As a context manager it kills the process at the end.

    Attributes:
        address: Path of the Unix socket for engine clients. They may connect at once and are accepted when the
            process runs.
        lifeline: A socket. A thread of the process echoes every message. The process ends when the socket closes.
        pid: Process id.

    Raises:
        OSError: No process or socket can be created.
    """

    def __init__(self) -> None:
        with contextlib.ExitStack() as resources:
            folder = resources.enter_context(socket_folder())
            self.address = f"{folder.path}/{SOCKET}"
            self.lifeline, other_end = socket.socketpair()
            resources.callback(self.lifeline.close)
            self.lifeline.setblocking(False)
            with other_end, socket.socket(socket.AF_UNIX) as listener:
                listener.bind(self.address)
                listener.listen(_BACKLOG)
                descriptor = listener.fileno()
                self._process = subprocess.Popen(  # noqa: S603 - no argument comes from a user
                    (sys.executable, "-P", "-m", "penstock.engine.core.core_process", self.address, str(descriptor)),
                    stdin=other_end.fileno(),
                    pass_fds=(descriptor, *folder.descriptors),
                    start_new_session=True,  # only the server gets Ctrl-C of a terminal; it then stops the core
                )
            self.pid = self._process.pid
            self._resources = resources.pop_all()
        self._ended: asyncio.Future[int] | None = None

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the number of a signal; None while it runs."""
        return self._process.poll()

    async def wait(self) -> int:
        """Waits for the end of the process and returns its exit code. Belongs to one event loop."""
        if self._ended is None:
            loop = asyncio.get_running_loop()
            self._ended = loop.create_future()
            # A daemon thread: a child that hangs in a driver must not block its parent.
            threading.Thread(target=self._watch, args=(loop, self._ended), name="engine-watch", daemon=True).start()
        return await asyncio.shield(self._ended)

    def host_bytes(self) -> int:
        """Returns the bytes of its private memory; 0 if it has ended or the system does not report them."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text("ascii", "replace")
        except OSError:  # it has ended, or the system has no /proc
            return 0
        line = next((line for line in status.splitlines() if line.startswith("RssAnon:")), None)
        return 0 if line is None else int(line.split()[1]) * 1024

    def kill(self) -> None:
        """Kills the process, unless it has ended."""
        self._process.kill()

    def close(self) -> None:
        """Kills the process and removes its folder. Does not wait. May be called twice."""
        self.kill()
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver blocks its end
            self._process.wait(_KILL_TIMEOUT_S)

    def _watch(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[int]) -> None:
        code = self._process.wait()

        def set_result() -> None:
            if not ended.done():
                ended.set_result(code)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(set_result)
