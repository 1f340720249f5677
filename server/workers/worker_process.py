"""The supervisor's side of a worker: starts its process, watches it, and replaces it when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from penstock.engine.client.running_core import Heartbeat, restart_pause_s

from .handover import Acceptor, ConnectionSender
from .messages import (
    Channel,
    FromSupervisor,
    FromWorker,
    GetMetrics,
    MetricFamily,
    MetricsReport,
    WorkerConfig,
    WorkerListening,
    decode_from_worker,
)

logger = logging.getLogger(__name__)

_SETTLED_S: Final = 60.0
"""Seconds. A process that lives longer restarts without a growing pause."""
_MIN_START_TIMEOUT_S: Final = 120.0
"""Seconds. A process that does not listen after this time, or after `hang_timeout_s` if that is longer, is killed."""
_METRICS_EVERY_S: Final = 6.0
"""Seconds between two GetMetrics messages, which serve as heartbeats."""
_HEARTBEAT: Final = -1
"""Request id of the GetMetrics that are heartbeats. The last response is kept after the process has ended."""


class WorkerProcess:
    """A worker of the server: its process, or the successor of one that died. Used by one event loop.

    Args:
        slot: Number of the worker, from 0.
        make_config: Returns the WorkerConfig of the next process.
        acceptors: Pass connections to it, one for each port.
        on_message: Called with this object and each message that this class does not handle.
        on_end: Called with this object when the process has ended.
        hang_timeout_s: Seconds without a response after which a process is killed; 0: never.

    Attributes:
        has_served: Whether a process has accepted connections.
        has_failed: Whether a process has ended and none has accepted connections.
        metrics: The last metrics of the process.
    """

    def __init__(
        self,
        slot: int,
        make_config: Callable[[], WorkerConfig],
        acceptors: Sequence[Acceptor],
        on_message: Callable[[WorkerProcess, FromWorker], None],
        on_end: Callable[[WorkerProcess], None],
        hang_timeout_s: float,
    ) -> None:
        self.slot = slot
        self.has_served = self.has_failed = False
        self.metrics: list[MetricFamily] = []
        self._make_config = make_config
        self._acceptors = acceptors
        self._on_message = on_message
        self._on_end = on_end
        self._hang_timeout_s = hang_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Channel[FromWorker] | None = None
        self._connection_sender: ConnectionSender  # of the running process
        self._watch: asyncio.TimerHandle | asyncio.Task[None] | None = None  # of the start, then of the heartbeat
        self._metrics_requests: dict[int, asyncio.Future[None]] = {}
        self._last_request_id = 0
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Keeps a process running until `stop`."""
        num_deaths = 0
        while not self._stopping.is_set():
            began_s = time.monotonic()
            reason = await self._run_process()
            if self._stopping.is_set():
                return
            num_deaths = 0 if time.monotonic() - began_s > _SETTLED_S else num_deaths + 1
            pause_s = restart_pause_s(max(num_deaths - 1, 0))
            ended = "ended" if self.has_served else "could not serve: it ended"
            logger.error("an HTTP process %s with %s; another one is started in %.0f s.", ended, reason, pause_s)
            await self._pause(pause_s)

    def stop(self, number: int) -> None:
        """Sends a signal that lets the process finish its requests, and starts no successor."""
        self._stopping.set()
        self._signal(number)

    def kill(self) -> None:
        """Ends the process at once."""
        self._signal(signal.SIGKILL)

    def send(self, message: FromSupervisor) -> None:
        """Sends a message to the process, if there is one."""
        if self._channel is not None:
            self._channel.send(message)

    def sender(self) -> Callable[[FromSupervisor], None]:
        """Returns a function that sends to the current process, but not to its successors."""
        channel = self._channel
        return channel.send if channel is not None else lambda _: None

    def open(self) -> None:
        """Passes connections to the running process from now on."""
        for acceptor in self._acceptors:
            acceptor.add(self._connection_sender)

    async def update_metrics(self, timeout_s: float) -> None:
        """Waits for new metrics. Keeps the last ones if the process does not answer in time."""
        if self._channel is None:
            return
        self._last_request_id = request_id = self._last_request_id + 1
        response = self._metrics_requests[request_id] = asyncio.get_running_loop().create_future()
        self.send(GetMetrics(request_id))
        try:
            with contextlib.suppress(TimeoutError):  # the last metrics stay
                async with asyncio.timeout(timeout_s):
                    await response
        finally:
            self._metrics_requests.pop(request_id, None)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):  # the pause has passed without `stop`
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _run_process(self) -> str:
        worker_config = self._make_config()
        try:
            process, control, connections = await self._start()
        except OSError as error:  # the machine has no process or file left
            self._end()
            return f"the error {error}"
        self._process = process
        with contextlib.suppress(OSError):  # it has ended already
            await worker_config.send(control)
        connection_sender = ConnectionSender(connections)
        channel = Channel(decode_from_worker, self._handle, self._handle_end)
        channel.open(control)
        self._channel = channel
        self._connection_sender = connection_sender
        self._heartbeat = Heartbeat(self._hang_timeout_s or 10 * _METRICS_EVERY_S, self._ask_metrics, self._give_up)
        if self._hang_timeout_s:
            timeout_s = max(self._hang_timeout_s, _MIN_START_TIMEOUT_S)
            self._watch = asyncio.get_running_loop().call_later(timeout_s, self._kill_unstarted, timeout_s)
        if self._stopping.is_set():  # stopped while it was started
            self._signal(signal.SIGTERM)
        try:
            code = await process.wait()
        finally:
            self._channel = None
            self._end_watch()
            for acceptor in self._acceptors:
                acceptor.remove(connection_sender)
            connection_sender.close()
            channel.close()
            for response in self._metrics_requests.values():
                if not response.done():  # the last metrics are used
                    response.set_result(None)
            self._metrics_requests.clear()
            self._end()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    async def _start(self) -> tuple[asyncio.subprocess.Process, socket.socket, socket.socket]:
        """Starts a process; returns it, its socket for messages and its socket for connections."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            control, others_control = socket.socketpair()
            ours.enter_context(control)
            theirs.enter_context(others_control)
            connections, others_connections = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.enter_context(connections)
            theirs.enter_context(others_connections)
            descriptors = (others_control.fileno(), others_connections.fileno())
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "penstock.server.workers.worker", *map(str, descriptors)),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C in a terminal is for the supervising process, which passes it on
            )
            ours.pop_all()
            return process, control, connections

    def _end(self) -> None:
        self.has_failed = not self.has_served
        self._on_end(self)

    def _handle(self, message: FromWorker) -> None:
        match message:
            case WorkerListening():
                self.has_served = True
                self.has_failed = False
                self._end_watch()
                self._watch = asyncio.create_task(self._heartbeat.run())
                self._on_message(self, message)
            case MetricsReport():
                self.metrics = message.families
                self._heartbeat.record_pong()
                response = self._metrics_requests.get(message.request_id)
                if response is not None and not response.done():
                    response.set_result(None)
            case _:
                self._on_message(self, message)

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def _kill_unstarted(self, timeout_s: float) -> None:
        logger.error("an HTTP process does not listen after %g s; it is killed", timeout_s)
        self.kill()

    def _ask_metrics(self) -> None:
        self.send(GetMetrics(_HEARTBEAT))
        if not self._hang_timeout_s:
            self._heartbeat.record_pong()  # the process may hang, and is asked again

    def _give_up(self) -> None:
        logger.error("an HTTP process has not answered for %g s; it is killed", self._hang_timeout_s)
        self.kill()

    def _handle_end(self) -> None:
        """Kills the process: it has closed its socket, so it is ending."""
        if not self._stopping.is_set():
            self.kill()
