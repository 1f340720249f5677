"""What the supervising process and an HTTP process say to each other, beside the plan that the latter starts with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from penstock.engine.client.engine_client import EngineStatus
from penstock.engine.protocol.messages import ModelReady


class Serving(msgspec.Struct, tag=True, frozen=True):
    """Worker: it can take connections; before it has its models, it answers that they are being loaded."""


class Prepared(msgspec.Struct, tag=True, frozen=True):
    """Worker: it has all the models that could be loaded."""


class Wanted(msgspec.Struct, tag=True, frozen=True):
    """Worker: asks for a model by its place in the plan; answered with Loaded or NotLoaded."""

    model: int


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """Supervisor: what the core of a model said when it was loaded."""

    model: int
    ready: ModelReady


class NotLoaded(msgspec.Struct, tag=True, frozen=True):
    """Supervisor: why a model is not there. `kind` is a class name of errors.py."""

    model: int
    kind: str
    message: str


class EngineChanged(msgspec.Struct, tag=True, frozen=True):
    """Supervisor: the status of the engine of a model; sent at every change, and before each Loaded."""

    model: int
    status: EngineStatus


class Family(msgspec.Struct, array_like=True, frozen=True):
    """Figures of one name: their kind, as Prometheus calls it, and name, labels and value of each."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


class AskFigures(msgspec.Struct, tag=True, frozen=True):
    """Both: the supervisor asks for those of one process, a worker for those of all."""

    question: int


class Figures(msgspec.Struct, tag=True, frozen=True):
    """Both: the answer to AskFigures."""

    question: int
    families: list[Family]


FromWorker = Serving | Prepared | Wanted | AskFigures | Figures
FromSupervisor = Loaded | NotLoaded | EngineChanged | AskFigures | Figures

encode: Final[Callable[[FromWorker | FromSupervisor], bytes]] = msgspec.msgpack.Encoder().encode
decode_from_worker: Final = msgspec.msgpack.Decoder[FromWorker](FromWorker).decode
decode_from_supervisor: Final = msgspec.msgpack.Decoder[FromSupervisor](FromSupervisor).decode
