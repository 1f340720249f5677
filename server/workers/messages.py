"""Messages between the supervisor and an HTTP process, and the WorkerConfig with which an HTTP process starts.

The WorkerConfig is sent over a private socket. A process that starts later serves the same models as the first one,
even if files have changed since.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

import msgspec
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from penstock.engine import EngineConfig
from penstock.engine.client.shared_engine import EngineStatus
from penstock.engine.protocol.message_connection import MessageConnection
from penstock.engine.protocol.messages import ModelReady

from ..models.served_model import ServedModel
from ..settings import ServerSettings

logger = logging.getLogger(__name__)

Message = TypeVar("Message")
_LENGTH_BYTES: Final = 8


class WorkerListening(msgspec.Struct, tag=True, frozen=True):
    """Worker: it accepts connections. It responds with 503 until its models are loaded."""


class WorkerReady(msgspec.Struct, tag=True, frozen=True):
    """Worker: all models are loaded, or have failed to load."""


class GetModel(msgspec.Struct, tag=True, frozen=True):
    """Worker: requests a model by its index in the WorkerConfig. The response is ModelLoaded or ModelNotLoaded."""

    model: int


class ModelLoaded(msgspec.Struct, tag=True, frozen=True):
    """Supervisor: a model is loaded; `ready` is the message of its engine."""

    model: int
    ready: ModelReady


class ModelNotLoaded(msgspec.Struct, tag=True, frozen=True):
    """Supervisor: a model could not be loaded. `kind` is a class name of errors.py."""

    model: int
    kind: str
    message: str


class EngineChanged(msgspec.Struct, tag=True, frozen=True):
    """Supervisor: the status of the engine of a model; sent at every change, and before each ModelLoaded."""

    model: int
    status: EngineStatus


class MetricFamily(msgspec.Struct, array_like=True, frozen=True):
    """Metrics of one name: their Prometheus type, and the name, labels and value of each sample."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


def to_families(metrics: Iterable[Metric]) -> list[MetricFamily]:
    """Converts metrics to messages."""
    return [
        MetricFamily(m.name, m.documentation, m.type, [(s.name, dict(s.labels), float(s.value)) for s in m.samples])
        for m in metrics
    ]


def to_metrics(families: Iterable[MetricFamily]) -> list[Metric]:
    """Converts messages to metrics."""
    metrics = []
    for family in families:
        metric = Metric(family.name, family.text, family.kind)
        metric.samples = [Sample(*sample) for sample in family.samples]
        metrics.append(metric)
    return metrics


class GetMetrics(msgspec.Struct, tag=True, frozen=True):
    """Both: the supervisor requests the metrics of one process, a worker the metrics of all processes.

    The response has the same `request_id`.
    """

    request_id: int


class MetricsReport(msgspec.Struct, tag=True, frozen=True):
    """Both: the response to GetMetrics."""

    request_id: int
    families: list[MetricFamily]


class Reload(msgspec.Struct, tag=True, frozen=True):
    """Supervisor: API keys and the certificate must be read again."""


FromWorker = WorkerListening | WorkerReady | GetModel | GetMetrics | MetricsReport
FromSupervisor = ModelLoaded | ModelNotLoaded | EngineChanged | GetMetrics | MetricsReport | Reload

encode: Final[Callable[[FromWorker | FromSupervisor], bytes]] = msgspec.msgpack.Encoder().encode
decode_from_worker: Final = msgspec.msgpack.Decoder[FromWorker](FromWorker).decode
decode_from_supervisor: Final = msgspec.msgpack.Decoder[FromSupervisor](FromSupervisor).decode


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The part of the server that one HTTP process serves.

    Attributes:
        settings: Settings of the whole server.
        connection_number: Number of its EngineClients.
        salt: Salt of client identities, which is equal in all processes.
        started_s: Unix time of the start of the server.
    """

    settings: ServerSettings
    models: tuple[ServedModel, ...]
    num_workers: int
    connection_number: int
    salt: bytes
    started_s: int

    def config_with_share(self, model: ServedModel) -> EngineConfig:
        """Returns the configuration of a model with this process's share of the limits."""
        config = model.config
        limits = model.config.scheduler
        own_limits = replace(
            limits,
            max_queued_tokens=max(limits.max_queued_tokens // self.num_workers, 1),
            max_queue_s=limits.max_queue_s / self.num_workers,
        )
        return replace(
            config,
            scheduler=own_limits,
            max_queued_chars=max(config.max_queued_chars // self.num_workers, 1),
            image_memory=max(config.image_memory // self.num_workers, 1),
        )

    async def send(self, sock: socket.socket) -> None:
        """Sends the WorkerConfig as the first message on a socket, which becomes non-blocking."""
        frame = pickle.dumps(self)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(sock, len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)

    @staticmethod
    def receive(sock: socket.socket) -> WorkerConfig:
        """Receives the first message on a socket. Raises EOFError if the other end closes it."""
        length = int.from_bytes(_receive_exactly(sock, _LENGTH_BYTES), "little")
        worker_config = pickle.loads(_receive_exactly(sock, length))  # noqa: S301 - sent by the parent process
        assert isinstance(worker_config, WorkerConfig)
        return worker_config


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise EOFError("the supervising process has ended")
        data += part
    return data


class Channel(Generic[Message]):
    """One end of a socket for messages between two processes. Used by one event loop.

    Args:
        on_end: Called once, when the other end has closed or sent an invalid message; not after `close`.
    """

    def __init__(
        self, decode: Callable[[memoryview], Message], on_message: Callable[[Message], None], on_end: Callable[[], None]
    ) -> None:
        self._decode = decode
        self._on_message = on_message
        self._on_end = on_end
        self._connection: MessageConnection

    def open(self, sock: socket.socket) -> None:
        """Takes over a socket and starts to receive."""
        self._connection = MessageConnection(sock)
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self._receive)

    def send(self, message: FromWorker | FromSupervisor) -> None:
        """Sends a message without blocking. Does nothing if the other end has closed."""
        self._connection.send(encode(message))

    def close(self) -> None:
        """Ends the channel. May be called twice."""
        if (descriptor := self._connection.fileno()) >= 0:
            asyncio.get_running_loop().remove_reader(descriptor)
            self._connection.close()

    def _receive(self) -> None:
        try:
            for message, _ in self._connection.receive():
                if self._connection.fileno() >= 0:  # otherwise the handler of the last message has closed it
                    self._on_message(self._decode(message))
        except EOFError:
            self._end()
        except Exception:  # a callback of the event loop has no caller
            logger.exception("a message between the server's processes is invalid")
            self._end()

    def _end(self) -> None:
        self.close()
        self._on_end()
