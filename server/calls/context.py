"""What every handler needs: the served models, the metrics, and engine calls that end when the client hangs up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

from fastapi import Request
from starlette.types import Scope

from penstock.engine.async_engine import AsyncEngine, RequestOptions
from penstock.engine.frontend.supervisor import EngineState
from penstock.engine.protocol.errors import (
    DeadlineExceededError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelNotFoundError,
    OwnDeadlineExceededError,
    RequestCancelledError,
)

from ..observability.metrics import Metrics
from ..settings import ServerSettings
from ..wire.request_limits import RequestLimits, limits_of
from ..wire.shown_values import shown

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
    """Served names to engines; some may still be loading. The first model answers requests that name none."""

    def __init__(self) -> None:
        self._targets: dict[str, Target] = {}
        self._shown: list[Target] = []
        self._expected: list[tuple[str, ...]] = []

    def expect(self, names: Sequence[str]) -> None:
        """Announces a model; until `add`, requests for it are told to come back."""
        self._expected.append(tuple(names))

    def add(self, names: Sequence[str], engine: AsyncEngine) -> None:
        """Serves `engine` under `names`; the first one is shown."""
        self._expected = [expected for expected in self._expected if expected[0] != names[0]]
        self._shown.append(Target(engine, names[0]))
        self._targets.update({name: Target(engine, name) for name in names})

    def find(self, name: str | None) -> Target:
        """Returns the engine for the model that a request names.

        Raises:
            EngineUnavailableError: It is being loaded.
            ModelNotFoundError: No model has this name; the message lists those that are served.
        """
        if not name and self._shown:
            return self._shown[0]
        target = self._targets.get(name or "")
        if target is not None:
            return target
        expected = [each for names in self._expected for each in names]
        if not name or name in expected:
            raise EngineUnavailableError("The model is being loaded. Please try again in a moment.")
        served = ", ".join([*self._targets, *expected])
        raise ModelNotFoundError(f"The model {shown(name)} does not exist; this server has {served}.", param="model")

    def names(self) -> list[Target]:
        """Returns every served name with its engine. Raises EngineUnavailableError while all are being loaded."""
        if not self._targets:
            self.find(None)
        return list(self._targets.values())

    def engines(self) -> list[Target]:
        """Returns every engine that has been loaded once, with its shown name."""
        return list(self._shown)

    @property
    def only(self) -> AsyncEngine | None:
        """The engine that every request goes to; None where its body must be read to know, or no model is loaded."""
        return self._shown[0].engine if len(self._shown) == 1 and not self._expected else None

    def states(self) -> dict[str, EngineState]:
        """Returns where each model is in its life, by its shown name."""
        states = {name: engine.state for engine, name in self._shown}
        return states | {names[0]: EngineState.STARTING for names in self._expected}


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The state of one application; kept in `app.state.context`.

    Attributes:
        settings: What the operator asked for.
        metrics: Counters of this application.
        models: Served names to engines.
        started_s: Unix time of the start.
        scope: The request that is answered with it; None in `app.state`.
    """

    settings: ServerSettings
    metrics: Metrics
    models: ModelTable
    started_s: int
    scope: Scope | None = None

    def check_count(self, inputs: Sized, param: str) -> None:
        """Raises InvalidRequestError if a request holds more inputs than the server takes."""
        limit = self.settings.max_inputs_per_request
        if len(inputs) > limit:
            raise InvalidRequestError(f"{param} has {len(inputs)} entries; the limit is {limit}.", param=param)

    def options(
        self, prompt_name: str | None = None, instruction: str | None = None, *, priority: int | None = None
    ) -> RequestOptions:
        """Returns the engine options of a request: what its dialect says, and what its headers do.

        Args:
            prompt_name: See RequestOptions.
            instruction: See RequestOptions.
            priority: From the body, which wins over the header; None where it says nothing.

        Raises:
            InvalidRequestError: A header is wrong.
        """
        limits = RequestLimits() if self.scope is None else limits_of(self.scope)
        longest_s = self.settings.request_timeout_s or math.inf
        timeout_s = min(longest_s, limits.timeout_s or math.inf)
        return RequestOptions(
            timeout_s=None if timeout_s == math.inf else timeout_s,
            priority=limits.priority if priority is None else priority,
            client=limits.client,
            prompt_name=prompt_name,
            instruction=instruction,
        )


def context_of(request: Request) -> ServerContext:
    """Returns the state of the application that serves `request`, for this request."""
    context: ServerContext = request.app.state.context
    return replace(context, scope=request.scope)


async def until_client_leaves(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, and cancels it when the client hangs up first.

    Raises:
        RequestCancelledError: The client has gone.
        OwnDeadlineExceededError: The deadline that the request's header set passed.
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
    except DeadlineExceededError as error:
        if not _has_own_deadline(request):
            raise
        raise OwnDeadlineExceededError(error.message) from error
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()


def _has_own_deadline(request: Request) -> bool:
    """Returns whether the header of a request sets an earlier deadline than the server does."""
    asked_s, longest_s = limits_of(request.scope).timeout_s, context_of(request).settings.request_timeout_s
    return asked_s is not None and (not longest_s or asked_s < longest_s)
