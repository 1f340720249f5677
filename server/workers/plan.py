"""What an HTTP process is told when it starts: all that the command line, the environment and the files have said.

It comes as a pickle from the process that has started it, over a socket that nobody else has, so that a process that
is started later serves what the first one did, whatever the files say by then.
"""

from __future__ import annotations

import pickle
import socket
from dataclasses import dataclass, replace
from typing import Final

from penstock.engine import EngineConfig, ModelInfo

from ..models.served_model import ServedModel
from ..settings import ServerSettings

_LENGTH_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that all processes serve.

    Attributes:
        names: See ServedModel.
        config: Of its engine.
        default_prompt_name: See ServedModel.
        info: See ServedModel.
        hidden_names: See ServedModel.
    """

    names: tuple[str, ...]
    config: EngineConfig
    default_prompt_name: str | None = None
    info: ModelInfo | None = None
    hidden_names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: ServedModel, config: EngineConfig) -> PlannedModel:
        """Returns the description of a served model for other processes."""
        prompt_name = model.default_prompt_name
        return cls(model.names, config, prompt_name, model.info, model.hidden_names)


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What one HTTP process serves.

    Attributes:
        settings: What the operator asked for, for the whole server.
        models: What is served.
        num_workers: Processes that serve.
        client: Number of its EngineClients.
        salt: See Common.
        started_s: See Common.
    """

    settings: ServerSettings
    models: tuple[PlannedModel, ...]
    num_workers: int
    client: int
    salt: bytes
    started_s: int

    def own_config(self, model: PlannedModel) -> EngineConfig:
        """Returns the configuration of a model with this process's share of the queue limits."""
        config, limits = model.config, model.config.scheduler
        own_limits = replace(
            limits,
            max_queued_tokens=max(limits.max_queued_tokens // self.num_workers, 1),
            max_queue_s=limits.max_queue_s / self.num_workers,
        )
        return replace(
            config, scheduler=own_limits, max_queued_chars=max(config.max_queued_chars // self.num_workers, 1)
        )

    def send(self, end: socket.socket) -> None:
        """Sends the plan, as the first thing on a socket."""
        frame = pickle.dumps(self)
        end.sendall(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)

    @staticmethod
    def receive(end: socket.socket) -> WorkerPlan:
        """Returns the plan that comes first on a socket. Raises EOFError where it does not come."""
        length = int.from_bytes(_exactly(end, _LENGTH_BYTES), "little")
        plan = pickle.loads(_exactly(end, length))  # noqa: S301 - the parent's own words
        assert isinstance(plan, WorkerPlan)
        return plan


def _exactly(end: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = end.recv(num_bytes - len(data))
        if not part:
            raise EOFError("the supervising process has gone")
        data += part
    return data
