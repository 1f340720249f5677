"""What every handler needs: the served models, the metrics, and engine calls that end when the client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from fastapi import Request

from penstock.engine.async_engine import AsyncEngine, RequestOptions
from penstock.engine.errors import InvalidRequestError, ModelNotFoundError, RequestCancelledError

from .metrics import Metrics
from .settings import ServerSettings

T = TypeVar("T")

WATCH_AFTER_S: Final = 0.02  # A request that is answered sooner is not worth a task that waits for its client to leave.


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is to be served.

    Attributes:
        names: Names that requests may use; the first one is shown.
        start: Loads the model and returns its engine.
    """

    names: tuple[str, ...]
    start: Callable[[], Awaitable[AsyncEngine]]


class Target(NamedTuple):
    """The engine that a request goes to, and the model name that its answer shows."""

    engine: AsyncEngine
    name: str


class ModelTable:
    """Served names to engines. The first model answers requests that name none."""

    def __init__(self) -> None:
        self._targets: dict[str, Target] = {}
        self._shown: list[Target] = []

    def add(self, names: Sequence[str], engine: AsyncEngine) -> None:
        """Serves `engine` under `names`; the first one is shown."""
        self._shown.append(Target(engine, names[0]))
        self._targets.update({name: Target(engine, name) for name in names})

    def find(self, name: str | None) -> Target:
        """Returns the engine for the model that a request names.

        Raises:
            ModelNotFoundError: No model has this name; the message lists those that are served.
        """
        if not name:
            return self._shown[0]
        target = self._targets.get(name)
        if target is None:
            served = ", ".join(self._targets)
            raise ModelNotFoundError(f"The model {name!r} does not exist; this server has {served}.", param="model")
        return target

    def names(self) -> list[Target]:
        """Returns every served name with its engine."""
        return list(self._targets.values())

    def engines(self) -> list[Target]:
        """Returns every engine once, with its shown name."""
        return list(self._shown)


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The state of one application; kept in `app.state.context`.

    Attributes:
        settings: What the operator asked for.
        metrics: Counters of this application.
        models: Served names to engines.
        started_s: Unix time of the start.
    """

    settings: ServerSettings
    metrics: Metrics
    models: ModelTable
    started_s: int

    def check_count(self, inputs: Sized, param: str) -> None:
        """Raises InvalidRequestError if a request holds more inputs than the server takes."""
        limit = self.settings.max_inputs_per_request
        if len(inputs) > limit:
            raise InvalidRequestError(f"{param} has {len(inputs)} entries; the limit is {limit}.", param=param)

    def options(self, prompt_name: str | None = None, instruction: str | None = None) -> RequestOptions:
        """Returns the engine options of a request."""
        timeout_s = self.settings.request_timeout_s or None
        return RequestOptions(timeout_s=timeout_s, prompt_name=prompt_name, instruction=instruction)


def context_of(request: Request) -> ServerContext:
    """Returns the state of the application that serves `request`."""
    context: ServerContext = request.app.state.context
    return context


async def until_client_leaves(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, and cancels it when the client hangs up first.

    Raises:
        RequestCancelledError: The client has gone.
    """
    task = asyncio.current_task()
    assert task is not None
    watcher: asyncio.Task[None] | None = None
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    def start_watching() -> None:
        nonlocal watcher
        watcher = asyncio.create_task(watch())

    timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, start_watching)
    try:
        return await work
    except asyncio.CancelledError:
        if not has_left:
            raise
        task.uncancel()
        raise RequestCancelledError("The client has hung up.") from None
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()
