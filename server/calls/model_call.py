"""A request to a model: the steps of a handler between the validated body and the response.

A handler checks the body against the limits, starts a call, reserves memory for the response, runs the engine, and
builds the response:

    check_input_limits(request, body)
    call = await ModelCall.start(request, body.model, EMBEDDERS)
    call.reserve(size_of_numbers(...), param="inputs")
    result = await call.engine.embed(body.inputs, params, call.options())
    num_tokens = call.record_usage(PoolingTask.EMBED, result)
    return call.respond({**call.response_fields("embd", num_tokens), "data": ...})
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from fastapi import Request, Response

from penstock.engine import RequestOptions
from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.model_info import ModelKind

from ..http.json_responses import json_response
from ..models.table import ModelTarget
from ..request_state import state_of
from ..response_size import ResponseSize, has_large_response, size_of_token_rows
from ..schemas.options import RequestBody
from .context import ServerContext, context_of
from .limits import check_num_named_tokens
from .prompts import prompt_for

EMBEDDERS: Final = (ModelKind.EMBEDDING,)
RERANKERS: Final = (ModelKind.CROSS_ENCODER,)
CLASSIFIERS: Final = (ModelKind.SEQUENCE_CLASSIFIER, ModelKind.TOKEN_CLASSIFIER)
FEWER_INPUTS: Final = "Send fewer inputs at once."
FEWER_IDS: Final = "Send fewer token ids at once."


class EngineResult(Protocol):
    """A result of AsyncEngine."""

    @property
    def num_tokens(self) -> Sequence[int]:
        """Tokens of each input."""
        ...


class TruncationCounter:
    """Number of truncated inputs of a request.

    RequestOptions holds the method `add`. A method of ModelCall would refer to the request: after an error, the body
    would stay in memory until the next garbage collection.
    """

    __slots__ = ("num",)

    def __init__(self) -> None:
        self.num = 0

    def add(self, num_inputs: int) -> None:
        """Adds inputs. A document that `max_tokens_per_doc` and the limit of the model truncate counts twice."""
        self.num += num_inputs


class ModelCall:
    """The call of one model by a route, for one HTTP request.

    Attributes:
        engine: Engine of the model.
        info: Description of the model.
        name: Name of the model in the response.
        default_prompt_name: Prompt for texts to embed if a request names none.
        adapter: LoRA adapter that the request names; None: none.
        began_s: time.perf_counter() when the handler began.
        num_images: Number of images in the fields that have been read.
        truncated: Counts the inputs that were truncated.
    """

    __slots__ = (
        "adapter",
        "began_s",
        "context",
        "default_prompt_name",
        "engine",
        "info",
        "name",
        "num_images",
        "request",
        "truncated",
    )

    def __init__(self, request: Request, context: ServerContext, target: ModelTarget, began_s: float) -> None:
        self.request = request
        self.context = context
        self.engine = target.engine
        self.info = target.engine.info
        self.name = target.name
        self.default_prompt_name = target.default_prompt_name
        self.adapter = target.adapter
        self.began_s = began_s
        self.num_images = 0
        self.truncated = TruncationCounter()

    @classmethod
    async def start(cls, request: Request, model: str | None, kinds: Collection[ModelKind] = ()) -> ModelCall:
        """Finds the model of a request, and loads it first if necessary.

        Args:
            request: The HTTP request.
            model: Model name in the request. None or empty: the request names no model.
            kinds: A request without a model name gets the first model of these kinds, or else the first model.

        Raises:
            EngineUnavailableError: The model is loading or failed to load.
            ModelNotFoundError: No model has this name. The message lists the served models.
        """
        began_s = time.perf_counter()
        context = context_of(request)
        target = context.models.find(model, request.scope, kinds)
        if target is None:
            target = await context.models.find_or_load(model, request.scope, kinds)
        return cls(request, context, target, began_s)

    def reserve(self, size: ResponseSize, *, param: str = "input", remedy: str = FEWER_INPUTS) -> None:
        """Reserves memory for the response, or for a further part of it; see AdmissionController.reserve_response.

        Every response that grows with its request must reserve memory, before the model runs if the size is known.
        """
        self.context.admission.reserve_response(self.request.scope, size, param=param, remedy=remedy)

    def reserve_rows(
        self, options: RequestOptions, *, param: str = "input", num_encodings: int = 1, names_tokens: bool = False
    ) -> RequestOptions:
        """Returns options that reserve memory for token rows when the engine knows their number.

        Args:
            options: Options of the engine call.
            param: The request field that holds the inputs.
            num_encodings: Number of formats. The response has each row in every format.
            names_tokens: The response also has the text of every token.
        """

        def reserve(num_rows: int, width: int) -> None:
            if names_tokens:
                check_num_named_tokens(num_rows, param)
            size = size_of_token_rows(num_rows, width, num_encodings=num_encodings, names_tokens=names_tokens)
            self.reserve(size, param=param)

        return replace(options, on_rows=reserve)

    def options(
        self, prompt_name: str | None = None, instruction: str | None = None, *, priority: int | None = None
    ) -> RequestOptions:
        """Returns the engine options of the request, from its headers, API key and deadline.

        A `priority` in the body has precedence over the header.

        Raises:
            DeadlineExceededError: The deadline has passed while the request was read.
        """
        state = state_of(self.request.scope)
        deadline = self.context.deadline(state)
        remaining_s = deadline.remaining_s(state)
        if remaining_s <= 0:
            raise deadline.error()
        return RequestOptions(
            timeout_s=None if remaining_s == math.inf else remaining_s,
            priority=state.priority if priority is None or state.is_batch_line else priority,
            client=state.client,
            namespace=state.namespace,
            adapter=self.adapter,
            prompt_name=prompt_name,
            instruction=instruction,
            on_truncated=self.truncated.add,
        )

    def truncation_warnings(self) -> dict[str, Any]:
        """Returns the fields of Cohere's `meta` for truncated inputs, if there are any."""
        if not self.truncated.num:
            return {}
        return {"warnings": [f"Inputs that were truncated because they are too long: {self.truncated.num}."]}

    def embed_options(self, body: RequestBody, *, priority: int | None = None) -> RequestOptions:
        """Returns the engine options of an embedding request, with the prompt selected by its `prompt_fields`.

        Without these fields, the default prompt of the model is used. Raises the errors of `prompt_for` and `options`.
        """
        default_name = self.default_prompt_name
        if default_name is None and body.model_fields_set.isdisjoint(body.prompt_fields):
            return self.options(priority=priority)
        fields = {name: getattr(body, name) for name in body.prompt_fields}
        if default_name is None and not any(fields.values()):
            return self.options(priority=priority)
        prompt = prompt_for(self.info, default_name=default_name, **fields)
        options = self.options(prompt.name, priority=priority)
        if None not in (prompt.adapter, options.adapter) and prompt.adapter != options.adapter:
            raise InvalidRequestError(
                f"The purpose of the texts selects the LoRA adapter {prompt.adapter!r}, and the model name selects "
                f"{options.adapter!r}. Send only one of them.",
                param="model",
            )
        adapter = prompt.adapter or options.adapter
        return replace(options, prompt=prompt.text, is_query=prompt.is_query, adapter=adapter)

    def record_usage(self, task: str, result: EngineResult) -> int:
        """Adds the inputs, tokens and truncated inputs of a result to the record of the request and to the metrics.

        Returns:
            Number of tokens of all inputs.
        """
        num_inputs = len(result.num_tokens)
        num_tokens = sum(result.num_tokens)
        num_truncated = self.truncated.num
        model = ""
        if (record := state_of(self.request.scope).record) is not None:
            record.task = task
            record.num_inputs = num_inputs
            record.num_tokens = num_tokens
            record.num_truncated = num_truncated
            model = record.model
        self.context.metrics.count_usage(
            model, task, num_inputs=num_inputs, num_tokens=num_tokens, num_truncated=num_truncated
        )
        return num_tokens

    def response_fields(self, id_prefix: str, num_tokens: int) -> dict[str, Any]:
        """Returns the fields of an OpenAI response except `data`.

        Args:
            id_prefix: Start of the id.
            num_tokens: Tokens of all inputs.
        """
        return {
            "id": f"{id_prefix}-{state_of(self.request.scope).request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": self.name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def respond(self, content: Any) -> Response:
        """Returns a JSON response. Its memory must have been reserved. See `iter_json` for the types in `content`."""
        return json_response(content, incremental=has_large_response(self.request.scope))
