"""The engine for code without asyncio, with the interface of the class LLM of vLLM.

with LLM("path/or/hub-id") as llm:
    vectors = [output.outputs.embedding for output in llm.embed(["A gate holds the water.", "A pipe carries it."])]
"""

from __future__ import annotations

import asyncio
import atexit
import math
import sys
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from .async_engine import AsyncEngine
from .client.scoring import check_sides
from .daemon_threads import EventLoopThread
from .llm_inputs import Prompt, Side, UnreadImage, inputs_of, read_images, sides_of
from .protocol.config import EngineConfig, PoolerConfig
from .protocol.errors import EngineError, InvalidRequestError
from .protocol.images import MixedInput
from .protocol.model_info import ModelInfo
from .protocol.params import Input, PoolingParams, RequestOptions
from .protocol.results import ClassificationOutput, EmbeddingOutput, PoolingOutput, PoolingRequestOutput, ScoringOutput
from .protocol.tasks import PoolingTask

_SLICE: Final = 256
"""Inputs of one request to the engine: enough for full batches, and few enough for frequent progress."""
_IMAGE_SLICE: Final = 32
"""Inputs of one request if there are images: their files are in memory."""
_IN_FLIGHT: Final = 2

Output = TypeVar("Output")
EngineCall = Callable[[list[Any]], Awaitable[list[Output]]]
Params = PoolingParams | Sequence[PoolingParams]


class LLM:
    """A model with its engine process. Several threads may use it at the same time.

    The limits of the queue (`max_queued_chars`, and `max_queued_tokens` and `max_queue_s` of `scheduler`) do not apply:
    each call waits for its results and has at most two slices of its inputs in the queue.

    Args:
        model: Local folder or hub id.
        runner: Exists for vLLM; both values mean the same, because all models of penstock are pooling models.
        hf_overrides: Values that replace those of config.json.
        pooler_config: Pooling settings as a PoolerConfig or as its fields.
        enforce_eager: Turns CUDA graphs off, as `cuda_graphs=False` does.
        log_level: Lowest level that the engine process logs.
        **settings: Other fields of EngineConfig, such as `dtype`, `max_model_len` and `trust_remote_code`.

    Raises:
        ModelLoadError: The model cannot be loaded; the message has the reason.
        ValueError: A setting has a wrong value.
        TypeError: EngineConfig has no setting of that name.
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
            raise ValueError(f"runner is {runner!r}; it must be 'auto' or 'pooling'.")
        if enforce_eager:
            settings["cuda_graphs"] = False
        pooler = pooler_config or PoolerConfig()
        pooler = pooler if isinstance(pooler, PoolerConfig) else PoolerConfig.from_dict(pooler)
        config = EngineConfig(model=model, hf_overrides=hf_overrides or {}, pooler_config=pooler, **settings)
        # Callers wait for all results, and have their inputs in memory already.
        scheduler = replace(config.scheduler, max_queue_s=math.inf, max_queued_tokens=sys.maxsize)
        config = replace(config, scheduler=scheduler, max_queued_chars=sys.maxsize)
        self._loop = EventLoopThread()
        try:
            self._engine = self._loop.run(AsyncEngine.start(config, log_level=log_level))
        except BaseException:  # stop the thread, also after an interrupt
            self._loop.stop()
            raise
        self._close_at_exit = partial(_close, weakref.ref(self))
        self._finalizer = weakref.finalize(self, _stop_later, self._close_at_exit, self._loop, self._engine)
        self._finalizer.atexit = False  # unlike `close`, it does not wait
        atexit.register(self._close_at_exit)

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
        """Returns one vector for each input.

        Args:
            prompts: A text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; or a list of such inputs. For
                a model that reads images also an image of Pillow, the bytes or the Path of an image file, or
                `{"image": ...}` with one of these, a path or a data URI, and optionally "text" after the image.
            pooling_params: Parameters for all inputs, or a list with those of each input.
            truncate_prompt_tokens: Maximum number of tokens of every input; see PoolingParams.
            prompt_name: Name of the model's prompt that is added before every text.
            use_tqdm: Whether to show a progress bar for long lists.

        Raises:
            EngineError: The request is wrong or the engine failed; the subclass names the reason.
        """
        options = RequestOptions(prompt_name=prompt_name)

        async def call(params: PoolingParams, inputs: list[Input]) -> list[PoolingRequestOutput[EmbeddingOutput]]:
            result = await self._engine.embed(inputs, params, options)
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
        """Returns a score for each class of the model, for every input; arguments and errors as in `embed`."""

        async def call(params: PoolingParams, inputs: list[Input]) -> list[PoolingRequestOutput[ClassificationOutput]]:
            result = await self._engine.classify(inputs, params)
            rows = zip(result.scores, result.num_tokens, strict=True)
            return [PoolingRequestOutput(ClassificationOutput(row, result.labels), count) for row, count in rows]

        return self._run_each(call, prompts, pooling_params, truncate_prompt_tokens, use_tqdm)

    def score(
        self,
        queries: Side | Sequence[Side],
        documents: Side | Sequence[Side],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Scores pairs of texts, 1 to 1, 1 to N or N to N, as AsyncEngine.score does; other arguments as in `embed`.

        Queries and documents may be images, in the forms of `embed`, if the model reads images.
        """
        left, right = sides_of(queries), sides_of(documents)
        check_sides(left, right)  # before the lists are split
        params = _params(pooling_params, truncate_prompt_tokens)
        options = RequestOptions(instruction=instruction)

        async def call(indices: list[int]) -> list[PoolingRequestOutput[ScoringOutput]]:
            queries = await read_images(left if len(left) == 1 else [left[index] for index in indices])
            documents = await read_images([right[index] for index in indices])
            result = await self._engine.score(queries, documents, params, options)
            rows = zip(result.scores.tolist(), result.num_tokens, strict=True)
            return [PoolingRequestOutput(ScoringOutput(score), num_tokens) for score, num_tokens in rows]

        return self._run(call, list(range(len(right))), use_tqdm, _slice_size([*left, *right]))

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params | None = None,
        *,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Returns the arrays of a task: embed, classify, token_embed or token_classify; other arguments as in `embed`.

        Raises:
            InvalidRequestError: `pooling_task` is another task, or it is None and the model has none of the four tasks.
        """

        async def call(params: PoolingParams, inputs: list[Input]) -> list[PoolingRequestOutput[PoolingOutput]]:
            rows: Iterable[NDArray[np.float32]]
            task = self._task(pooling_task or params.task)
            params = params.clone(task=None)
            if task is PoolingTask.EMBED:
                embedded = await self._engine.embed(inputs, params)
                rows, num_tokens = embedded.embeddings, embedded.num_tokens
            elif task is PoolingTask.CLASSIFY:
                classified = await self._engine.classify(inputs, params)
                rows, num_tokens = classified.scores, classified.num_tokens
            else:
                of_tokens = self._engine.token_embed if task is PoolingTask.TOKEN_EMBED else self._engine.token_classify
                result = await of_tokens(inputs, params)
                rows, num_tokens = result.rows, result.num_tokens
            return [PoolingRequestOutput(PoolingOutput(r), n) for r, n in zip(rows, num_tokens, strict=True)]

        return self._run_each(call, prompts, pooling_params, truncate_prompt_tokens, use_tqdm)

    def close(self) -> None:
        """Stops the engine process and waits for its end; later calls of other methods fail."""
        if self._finalizer.detach() is None:  # closed already
            return
        atexit.unregister(self._close_at_exit)
        try:
            self._loop.run(self._engine.close())
        finally:
            self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        call: Callable[[PoolingParams, list[Input]], Awaitable[list[Output]]],
        prompts: Prompt | Sequence[Prompt],
        params: Params | None,
        truncate_prompt_tokens: int | None,
        use_tqdm: bool,
    ) -> list[Output]:
        """Runs inputs that have the same parameters together."""
        inputs = inputs_of(prompts)
        each = [params] * len(inputs) if params is None or isinstance(params, PoolingParams) else list(params)
        if len(each) != len(inputs):
            raise InvalidRequestError(
                f"There are {len(each)} pooling_params for {len(inputs)} inputs; "
                "pooling_params must be a single object or a list with one for each input.",
                param="pooling_params",
            )
        groups: dict[PoolingParams, list[int]] = {}
        for index, input_params in enumerate(each):
            groups.setdefault(_params(input_params, truncate_prompt_tokens), []).append(index)
        outputs: dict[int, Output] = {}
        for group_params, indices in groups.items() or [(PoolingParams(), [])]:
            some = [inputs[index] for index in indices]
            done = self._run(partial(_call_loaded, call, group_params), some, use_tqdm, _slice_size(some))
            outputs.update(zip(indices, done, strict=True))
        return [outputs[index] for index in range(len(inputs))]

    def _run(self, call: EngineCall[Output], inputs: Sequence[Any], use_tqdm: bool, size: int) -> list[Output]:
        if not inputs:
            raise InvalidRequestError("Give at least one input.", param="input")
        return self._loop.run(run_in_slices(call, inputs, size=size, shows_progress=use_tqdm))


def _close(llm: weakref.ref[LLM]) -> None:
    if (open_llm := llm()) is not None:
        open_llm.close()


def _stop_later(close_at_exit: Callable[[], None], loop: EventLoopThread, engine: AsyncEngine) -> None:
    """Stops the engine of an LLM that was deleted. Does not wait; see EventLoopThread.stop_after."""
    atexit.unregister(close_at_exit)
    loop.stop_after(engine.close)


def _params(params: PoolingParams | None, truncate_prompt_tokens: int | None) -> PoolingParams:
    params = params or PoolingParams()
    return params if truncate_prompt_tokens is None else params.clone(truncate_prompt_tokens=truncate_prompt_tokens)


async def _call_loaded(
    call: Callable[[PoolingParams, list[Input]], Awaitable[list[Output]]], params: PoolingParams, inputs: list[Any]
) -> list[Output]:
    return await call(params, await read_images(inputs))


def _slice_size(inputs: Sequence[Any]) -> int:
    return _IMAGE_SLICE if any(isinstance(item, UnreadImage | MixedInput) for item in inputs) else _SLICE


async def run_in_slices(
    call: EngineCall[Output], inputs: Sequence[Any], *, shows_progress: bool, size: int = _SLICE
) -> list[Output]:
    """Runs the inputs in slices, two at a time, and returns the outputs in order.

    Args:
        call: Returns an output for each input of a slice.
        inputs: All inputs.
        shows_progress: Whether to show a progress bar for more than one slice.
        size: Inputs of a slice.

    Raises:
        EngineError: A slice failed; the other slices are cancelled.
    """
    is_hidden = not shows_progress or len(inputs) <= size
    outputs: list[Output] = []
    in_flight: deque[asyncio.Task[list[Output]]] = deque()
    starts = iter(range(0, len(inputs), size))
    try:
        with tqdm(total=len(inputs), unit=" inputs", dynamic_ncols=True, disable=is_hidden) as progress:
            while len(outputs) < len(inputs):
                while len(in_flight) < _IN_FLIGHT and (start := next(starts, None)) is not None:
                    in_flight.append(asyncio.ensure_future(_slice(call, inputs, start, size)))
                done = await in_flight.popleft()
                outputs += done
                progress.update(len(done))
    finally:
        for task in in_flight:
            task.cancel()
        await asyncio.gather(*in_flight, return_exceptions=True)
    return outputs


async def _slice(call: EngineCall[Output], inputs: Sequence[Any], start: int, size: int) -> list[Output]:
    try:
        return await call(list(inputs[start : start + size]))
    except EngineError as error:
        if start:
            error.add_note(f"The numbers of inputs in this message begin at input {start} of the list.")
        raise
