"""What every handler needs: the served models, the metrics, and how long the answer to a request is wanted."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Sequence, Sized
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final, NamedTuple

from fastapi import Request

from penstock.engine import RequestOptions
from penstock.engine.protocol.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    OwnDeadlineExceededError,
    RequestCancelledError,
)
from penstock.engine.protocol.model_info import ModelKind

from ..admission import AdmissionController, AnswerSize
from ..answers.limits import check_num_ids
from ..answers.sizes import of_token_rows
from ..models.table import ModelTable, Target
from ..models.weight_files import WeightHeaders
from ..observability.metrics import Metrics
from ..observability.timing import REQUEST
from ..routing import runs_model
from ..schemas.options import RequestBody
from ..settings import ServerSettings
from ..wire.request_limits import RequestLimits, limits_of
from .prompts import prompt_for

CONNECTION_LOST: Final = "penstock.connection_lost"
"""Where the scope of a request has a future that is done when its connection has ended, if its server is ours."""
EMBEDDERS: Final = (ModelKind.EMBEDDING,)
RERANKERS: Final = (ModelKind.CROSS_ENCODER,)
CLASSIFIERS: Final = (ModelKind.SEQUENCE_CLASSIFIER, ModelKind.TOKEN_CLASSIFIER)
FEWER_INPUTS: Final = "Send fewer inputs at once."
WATCH_AFTER_S: Final = 0.02
"""Seconds. A request that is answered sooner is not worth a look at its deadline."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The state of one application; kept in `app.state.context`.

    Attributes:
        settings: Settings of the operator.
        metrics: Counters of this application.
        models: Served names to engines.
        started_s: Unix time of the start.
        admission: Limits of bodies and responses.
        weight_headers: Cache of the headers of weight files.
    """

    settings: ServerSettings
    metrics: Metrics
    models: ModelTable
    started_s: int
    admission: AdmissionController
    weight_headers: WeightHeaders = field(default_factory=WeightHeaders)

    async def find(self, request: Request, name: str | None, kinds: Collection[ModelKind] = ()) -> Target:
        """Returns what a request goes to by the model that it names, which may have to be loaded first.

        Args:
            request: That is answered.
            name: The name; None or empty: none.
            kinds: What a request that names none is for: the first such model answers it, else the first of all.

        Raises:
            EngineUnavailableError: It is being loaded, or cannot be.
            ModelNotFoundError: No model has this name; the message lists those that are served.
            RequestCancelledError: The client has hung up while it was loaded.
            DeadlineExceededError: The deadline of the request passed meanwhile.
        """
        target = self.models.find(name, request.scope, kinds)
        if target is not None:
            return target
        is_timed = runs_model(request.scope)
        if is_timed:
            limits_of(request.scope)  # raises what is wrong with the headers: the watch reads them later
        with ClientWatch(request, is_timed=is_timed):
            return await self.models.load(name, request.scope, kinds)

    def check_count(self, inputs: Sized, param: str) -> None:
        """Raises InvalidRequestError if a request holds more inputs than the server takes."""
        limit = self.settings.max_inputs_per_request
        if len(inputs) > limit:
            raise InvalidRequestError(f"{param} has {len(inputs)} entries; the limit is {limit}.", param=param)

    def hold(self, request: Request, size: AnswerSize, *, param: str = "input", way_out: str = FEWER_INPUTS) -> None:
        """Holds room for the answer to a request, or for a further part of it; see AdmissionController.hold_response.

        Every answer that grows with its request is told here, before the model runs where its size is known by then.
        """
        self.admission.hold_response(request.scope, size, param=param, way_out=way_out)

    def with_rows(
        self, request: Request, options: RequestOptions, *, param: str = "input", names_tokens: bool = False
    ) -> RequestOptions:
        """Returns options by which an answer with rows for tokens is let in or refused before the model runs.

        Args:
            request: That is answered.
            options: Of its call.
            param: The request field that holds the inputs.
            names_tokens: The answer has the text of every token, too.
        """

        def check(num_rows: int, width: int) -> None:
            if names_tokens:
                check_num_ids(num_rows, param)
            self.hold(request, of_token_rows(num_rows, width, names_tokens=names_tokens), param=param)

        return replace(options, on_rows=check)

    def options(
        self,
        request: Request,
        prompt_name: str | None = None,
        instruction: str | None = None,
        *,
        priority: int | None = None,
    ) -> RequestOptions:
        """Returns the engine options of a request: what its dialect says, and what its headers and its time do.

        A `priority` of the body wins over that of the header.

        Raises:
            InvalidRequestError: A header is wrong.
            DeadlineExceededError: The request was read for so long that its deadline has passed.
        """
        limits = limits_of(request.scope)
        deadline = self.deadline(limits)
        left_s = deadline.left_s()
        if left_s <= 0:
            raise deadline.error()
        return RequestOptions(
            timeout_s=None if left_s == math.inf else left_s,
            priority=limits.priority if priority is None else priority,
            client=limits.client,
            namespace=limits.namespace,
            prompt_name=prompt_name,
            instruction=instruction,
        )

    def embed_options(
        self, request: Request, target: Target, body: RequestBody, *, priority: int | None = None
    ) -> RequestOptions:
        """Returns the engine options of a request for embeddings, with the prompt that its `prompt_fields` ask for.

        Requests that say nothing get the default prompt of their target. Raises what `prompt_for` and `options` raise.
        """
        default_name = target.default_prompt_name
        if default_name is None and body.model_fields_set.isdisjoint(body.prompt_fields):
            return self.options(request, priority=priority)
        wishes = {name: getattr(body, name) for name in body.prompt_fields}
        if default_name is None and not any(wishes.values()):
            return self.options(request, priority=priority)
        prompt = prompt_for(target.engine.info, default_name=default_name, **wishes)
        options = self.options(request, prompt.name, priority=priority)
        return replace(options, prompt=prompt.text, is_query=prompt.is_query)

    def deadline(self, limits: RequestLimits) -> Deadline:
        """Returns the deadline of a request: its own, or the server's where that is earlier."""
        longest_s = self.settings.request_timeout_s or math.inf
        own_s = math.inf if limits.timeout_s is None else limits.timeout_s
        return Deadline(min(own_s, longest_s), is_own=own_s < longest_s)

    def answer_head(
        self, request: Request, kind: str, model: str, task: str, num_tokens: Sequence[int]
    ) -> dict[str, Any]:
        """Counts the tokens of each input and returns an answer in OpenAI's shape, but for its `data`.

        Args:
            request: For its id.
            kind: What the id of the answer begins with.
            model: Its name, as the answer shows it.
            task: Name of the task, or of several, in the metrics.
            num_tokens: Tokens of each input.
        """
        total = self.metrics.count(task, num_tokens)
        return {
            "id": f"{kind}-{request.scope['request_id']}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "usage": {"prompt_tokens": total, "total_tokens": total},
        }


def context_of(request: Request) -> ServerContext:
    """Returns the state of the application that serves `request`."""
    context: ServerContext = request.app.state.context
    return context


class Deadline(NamedTuple):
    """When the answer to a request is of no use any more.

    Attributes:
        timeout_s: Seconds from the arrival of the request on; infinity: never.
        is_own: A header of the request has set it.
    """

    timeout_s: float
    is_own: bool

    def left_s(self) -> float:
        """Returns how many seconds are left to the request that the current task answers."""
        record = REQUEST.get()
        return self.timeout_s if record is None else self.timeout_s - (time.perf_counter() - record.began_s)

    def error(self) -> DeadlineExceededError:
        """Returns the error of a request that it has passed for."""
        message = f"The deadline of {self.timeout_s:g} s passed before the answer."
        return OwnDeadlineExceededError(message) if self.is_own else DeadlineExceededError(message)


class ClientWatch:
    """Ends what runs inside when nobody wants the answer any more: `with ClientWatch(request): ...`.

    That a client has gone is told by its connection, which costs a request nothing but a callback. Where an application
    runs behind another server, it is asked of ASGI, by a task.

    Args:
        request: Its headers have been checked by `ServerContext.options`.
        is_timed: It has a deadline.

    Raises:
        RequestCancelledError: The client has hung up.
        DeadlineExceededError: The deadline of the server, or the one that the request's header set, has passed.
    """

    __slots__ = ("_error", "_is_over", "_is_timed", "_lost", "_request", "_task", "_timer")

    def __init__(self, request: Request, *, is_timed: bool = True) -> None:
        self._request = request
        self._is_timed = is_timed
        self._is_over = False
        self._lost: asyncio.Future[None] | None = None
        self._error: EngineError | None = None

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer = task.get_loop().call_later(WATCH_AFTER_S, self._watch)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over = True  # what has been called to run soon cannot be called back
        self._timer.cancel()
        if self._lost is not None:
            self._lost.remove_done_callback(self._hang_up)
            if isinstance(self._lost, asyncio.Task):
                self._lost.cancel()
        reason, self._error = self._error, None  # the traceback of a raised error refers to this frame and the watch
        if reason is not None and kind is asyncio.CancelledError:
            self._task.uncancel()
            try:
                raise reason from None
            finally:
                del reason
        if kind is DeadlineExceededError:
            raise self._deadline().error() from error

    def _watch(self) -> None:
        loop = self._task.get_loop()
        told: asyncio.Future[None] | None = self._request.scope.get(CONNECTION_LOST)
        self._lost = lost = loop.create_task(self._wait_for_hangup()) if told is None else told
        lost.add_done_callback(self._hang_up)
        if self._is_timed and (left_s := (deadline := self._deadline()).left_s()) < math.inf:
            self._timer = loop.call_later(max(left_s, 0.0), self._end, deadline.error())

    async def _wait_for_hangup(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass

    def _hang_up(self, _: asyncio.Future[None]) -> None:
        self._end(RequestCancelledError("The client has hung up."))

    def _end(self, error: EngineError) -> None:
        if self._error is None and not self._is_over:
            self._error = error
            self._task.cancel()

    def _deadline(self) -> Deadline:
        return context_of(self._request).deadline(limits_of(self._request.scope))
