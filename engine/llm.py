"""The engine for code without asyncio: calls that return when all is done, as vLLM's class of this name has them.

with LLM("path/or/hub-id") as llm:
    vectors = [output.outputs.embedding for output in llm.embed(["A gate holds the water.", "A pipe carries it."])]
"""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from .async_engine import AsyncEngine
from .client.scoring import check_sides
from .protocol.config import EngineConfig, PoolerConfig
from .protocol.errors import EngineError, EngineUnavailableError, InvalidRequestError
from .protocol.model_info import ModelInfo
from .protocol.params import PoolingParams
from .protocol.request import RequestOptions, Text
from .protocol.results import ClassificationOutput, EmbeddingOutput, PoolingOutput, PoolingRequestOutput, ScoringOutput
from .protocol.tasks import PoolingTask

_SLICE: Final = 256
"""Inputs of one request to the engine: enough for full batches, few enough for a progress bar that moves."""
_IN_FLIGHT: Final = 2

Output = TypeVar("Output")
Result = TypeVar("Result")
Call = Callable[[list[Any]], Awaitable[list[Output]]]
Prompt = str | Sequence[int] | Mapping[str, Any]
Params = PoolingParams | Sequence[PoolingParams]


class LoopThread:
    """An event loop in a thread of its own, for callers that have none."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-llm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs `work` on the loop and waits for it; an interrupt of the wait cancels it.

        Raises:
            EngineUnavailableError: The thread has ended.
        """
        if self._loop.is_closed():
            work.close()
            raise EngineUnavailableError("The engine was closed.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class LLM:
    """A model and the engine process behind it. Safe to use from several threads.

    Args:
        model: Local folder or hub id.
        runner: As in vLLM, where "pooling" chooses what every model here is.
        hf_overrides: Values laid over the model's config.json.
        pooler_config: How token rows become an answer: a PoolerConfig, or its fields.
        enforce_eager: As in vLLM: no CUDA graphs, as `cuda_graphs=False`.
        log_level: Least severe level that the engine process logs.
        **settings: Further fields of EngineConfig, such as `dtype`, `max_model_len` and `trust_remote_code`.

    Raises:
        ModelLoadError: The model cannot be served; the message says why.
        ValueError: A setting has a wrong value.
        TypeError: EngineConfig has no such setting.
    """

    def __init__(
        self,
        model: str,
        *,
        runner: Literal["auto", "pooling"] = "auto",
        hf_overrides: dict[str, Any] | None = None,
        pooler_config: PoolerConfig | dict[str, Any] | None = None,
        enforce_eager: bool = False,
        log_level: str = "WARNING",
        **settings: Any,
    ) -> None:
        if runner not in ("auto", "pooling"):
            raise ValueError(f"runner is {runner!r}; every model here is a pooling model: 'auto' or 'pooling'.")
        if enforce_eager:
            settings["cuda_graphs"] = False
        pooler = pooler_config or PoolerConfig()
        pooler = pooler if isinstance(pooler, PoolerConfig) else PoolerConfig.from_dict(pooler)
        config = EngineConfig(model=model, hf_overrides=hf_overrides or {}, pooler_config=pooler, **settings)
        # Nobody else waits behind this caller, who waits for all of it.
        scheduler = replace(config.scheduler, max_queue_s=math.inf)
        self._loop = LoopThread()
        try:
            self._engine = self._loop.run(AsyncEngine.start(replace(config, scheduler=scheduler), log_level=log_level))
        except BaseException:
            self._loop.stop()
            raise
        self._close = weakref.finalize(self, _close, self._engine, self._loop)

    @property
    def info(self) -> ModelInfo:
        """The resolved description of the model."""
        return self._engine.info

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: Params | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Embeds each input into one vector.

        Args:
            prompts: A text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; or a list of these.
            pooling_params: Width, norm, truncation; one for all inputs, or one for each.
            truncate_prompt_tokens: Tokens. Cuts every input; see PoolingParams.
            prompt_name: Named prompt of the model to put before every text.
            use_tqdm: Show a progress bar for long lists.

        Raises:
            EngineError: A kind of it says what is wrong with the request, or what befell the engine.
        """
        options = RequestOptions(prompt_name=prompt_name)

        async def call(params: PoolingParams, texts: list[Text]) -> list[PoolingRequestOutput[EmbeddingOutput]]:
            result = await self._engine.embed(texts, params, options)
            rows = zip(result.embeddings, result.num_tokens, strict=True)
            return [PoolingRequestOutput(EmbeddingOutput(row), num_tokens) for row, num_tokens in rows]

        return self._run_each(call, prompts, pooling_params, truncate_prompt_tokens, use_tqdm)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: Params | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Gives every input a score for each class of the model. Arguments and errors: see `embed`."""

        async def call(params: PoolingParams, texts: list[Text]) -> list[PoolingRequestOutput[ClassificationOutput]]:
            result = await self._engine.classify(texts, params)
            rows = zip(result.scores, result.num_tokens, strict=True)
            return [PoolingRequestOutput(ClassificationOutput(row, result.labels), count) for row, count in rows]

        return self._run_each(call, prompts, pooling_params, truncate_prompt_tokens, use_tqdm)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Scores pairs, 1 to 1, 1 to N or N to N; see AsyncEngine.score for how. The rest: see `embed`."""
        left = [queries] if isinstance(queries, str) else list(queries)
        right = [documents] if isinstance(documents, str) else list(documents)
        check_sides(left, right)  # before they are sliced
        params = _params(pooling_params, truncate_prompt_tokens)
        options = RequestOptions(instruction=instruction)

        async def call(places: list[int]) -> list[PoolingRequestOutput[ScoringOutput]]:
            own = left if len(left) == 1 else [left[place] for place in places]
            result = await self._engine.score(own, [right[place] for place in places], params, options)
            rows = zip(result.scores.tolist(), result.num_tokens, strict=True)
            return [PoolingRequestOutput(ScoringOutput(score), num_tokens) for score, num_tokens in rows]

        return self._run(call, list(range(len(right))), use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params | None = None,
        *,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Answers a task with its numbers: embed, classify, token_embed or token_classify. The rest: see `embed`.

        Raises:
            InvalidRequestError: `pooling_task` is none of these, or None and the model has none of them.
        """

        async def call(params: PoolingParams, texts: list[Text]) -> list[PoolingRequestOutput[PoolingOutput]]:
            rows: Iterable[NDArray[np.float32]]
            task, params = self._task(pooling_task or params.task), params.clone(task=None)
            if task is PoolingTask.EMBED:
                embedded = await self._engine.embed(texts, params)
                rows, num_tokens = embedded.embeddings, embedded.num_tokens
            elif task is PoolingTask.CLASSIFY:
                classified = await self._engine.classify(texts, params)
                rows, num_tokens = classified.scores, classified.num_tokens
            else:
                of_tokens = self._engine.token_embed if task is PoolingTask.TOKEN_EMBED else self._engine.token_classify
                result = await of_tokens(texts, params)
                rows, num_tokens = result.rows, result.num_tokens
            return [PoolingRequestOutput(PoolingOutput(r), n) for r, n in zip(rows, num_tokens, strict=True)]

        return self._run_each(call, prompts, pooling_params, truncate_prompt_tokens, use_tqdm)

    def close(self) -> None:
        """Stops the engine process. May be called twice; calls after it fail."""
        self._close()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes it."""
        self.close()

    def _task(self, name: str | None) -> PoolingTask:
        known = (PoolingTask.EMBED, PoolingTask.CLASSIFY, PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY)
        if name is None:
            task = next((task for task in known if task in self.info.tasks), None)
        else:
            task = next((task for task in known if task.value == name), None)
        if task is None:
            listed = ", ".join(task.value for task in known)
            raise InvalidRequestError(f"pooling_task is {name!r}; it must be one of {listed}.", param="pooling_task")
        return task

    def _run_each(
        self,
        call: Callable[[PoolingParams, list[Text]], Awaitable[list[Output]]],
        prompts: Prompt | Sequence[Prompt],
        params: Params | None,
        truncate_prompt_tokens: int | None,
        use_tqdm: bool,
    ) -> list[Output]:
        """Runs inputs with parameters for all of them, or with those of each: equal ones together."""
        inputs = _inputs(prompts)
        each = [params] * len(inputs) if params is None or isinstance(params, PoolingParams) else list(params)
        if len(each) != len(inputs):
            raise InvalidRequestError(
                f"There are {len(each)} pooling_params for {len(inputs)} inputs; give one for all, or one for each.",
                param="pooling_params",
            )
        places: dict[PoolingParams, list[int]] = {}
        for place, own in enumerate(each):
            places.setdefault(_params(own, truncate_prompt_tokens), []).append(place)
        outputs: dict[int, Output] = {}
        for own, alike in places.items() or [(PoolingParams(), [])]:
            done = self._run(partial(call, own), [inputs[place] for place in alike], use_tqdm)
            outputs.update(zip(alike, done, strict=True))
        return [outputs[place] for place in range(len(inputs))]

    def _run(self, call: Call[Output], inputs: Sequence[Any], use_tqdm: bool) -> list[Output]:
        if not inputs:
            raise InvalidRequestError("Give at least one input.", param="input")
        return self._loop.run(in_slices(call, inputs, shows_progress=use_tqdm))


def _close(engine: AsyncEngine, loop: LoopThread) -> None:
    loop.run(engine.close())
    loop.stop()


def _params(params: PoolingParams | None, truncate_prompt_tokens: int | None) -> PoolingParams:
    params = params or PoolingParams()
    return params if truncate_prompt_tokens is None else params.clone(truncate_prompt_tokens=truncate_prompt_tokens)


def _inputs(prompts: Prompt | Sequence[Prompt]) -> list[Text]:
    """Returns the inputs of a call, one for each answer. Raises InvalidRequestError for what is none."""
    if isinstance(prompts, str | Mapping) or (len(prompts) and isinstance(prompts[0], int)):
        return [_input(prompts, 0)]
    return [_input(prompt, index) for index, prompt in enumerate(prompts)]


def _input(prompt: Any, index: int) -> Text:
    given = prompt
    if isinstance(prompt, Mapping):
        given = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(given, str):
        return given
    if isinstance(given, Sequence | np.ndarray) and all(isinstance(i, int | np.integer) for i in given):
        return [int(i) for i in given]
    raise InvalidRequestError(
        f"Input {index} is {str(prompt)[:60]!r}; give a text, token ids, or an object with prompt or prompt_token_ids.",
        param="input",
    )


async def in_slices(call: Call[Output], inputs: Sequence[Any], *, shows_progress: bool) -> list[Output]:
    """Runs slices of the inputs, the next one while one runs, and returns their outputs in order.

    Args:
        call: Returns an output for each input of a slice.
        inputs: Inputs to run, any number.
        shows_progress: Show a bar where there is more than one slice.

    Raises:
        EngineError: Of the first slice that fails; the others are cancelled.
    """
    is_hidden = not shows_progress or len(inputs) <= _SLICE
    outputs: list[Output] = []
    in_flight: deque[asyncio.Task[list[Output]]] = deque()
    starts = iter(range(0, len(inputs), _SLICE))
    try:
        with tqdm(total=len(inputs), unit=" inputs", dynamic_ncols=True, disable=is_hidden) as progress:
            while len(outputs) < len(inputs):
                while len(in_flight) < _IN_FLIGHT and (start := next(starts, None)) is not None:
                    in_flight.append(asyncio.ensure_future(_slice(call, inputs, start)))
                done = await in_flight.popleft()
                outputs += done
                progress.update(len(done))
    finally:
        for task in in_flight:
            task.cancel()
        await asyncio.gather(*in_flight, return_exceptions=True)
    return outputs


async def _slice(call: Call[Output], inputs: Sequence[Any], start: int) -> list[Output]:
    try:
        return await call(list(inputs[start : start + _SLICE]))
    except EngineError as error:
        if start:
            error.add_note(f"Inputs are counted from {start} on, where this part of the list begins.")
        raise
