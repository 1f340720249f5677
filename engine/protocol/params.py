"""The arguments of the engine's calls: inputs, pooling parameters and options. Plain Python, no tensors.

The order of resolution is request, then PoolerConfig, then the model's own files, then the built-in default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from .errors import InvalidRequestError, UnsupportedTaskError
from .images import ImageInput, MixedInput
from .model_info import ModelInfo
from .tasks import PoolingTask, PoolingType, listed

Text = str | Sequence[int]
"""A text, or its token ids."""
Input = Text | ImageInput | MixedInput
"""What a model embeds."""
TextOrImage = str | ImageInput | MixedInput
"""One side of a pair to score."""

VALID_PARAMETERS: Final[dict[PoolingTask, frozenset[str]]] = {
    PoolingTask.EMBED: frozenset({"dimensions", "normalize", "use_activation"}),
    PoolingTask.TOKEN_EMBED: frozenset({"dimensions", "normalize", "use_activation"}),
    PoolingTask.CLASSIFY: frozenset({"use_activation"}),
    PoolingTask.SCORE: frozenset({"use_activation"}),
    PoolingTask.TOKEN_CLASSIFY: frozenset({"use_activation", "step_tag_id", "returned_token_ids"}),
    PoolingTask.SPARSE_EMBED: frozenset(),
}
_MODELS: Final[dict[PoolingTask, str]] = {
    PoolingTask.EMBED: "an embedding model",
    PoolingTask.TOKEN_EMBED: "an embedding model",
    PoolingTask.CLASSIFY: "a model with classes, such as a sequence classifier",
    PoolingTask.SCORE: "a reranker (cross-encoder) or an embedding model",
    PoolingTask.TOKEN_CLASSIFY: "a token classifier, or a sequence classifier of the decoder kind,",
    PoolingTask.SPARSE_EMBED: "a model with sparse vectors, such as SPLADE or bge-m3",
}
"""The kind of model that a task needs."""
_MAX_TOKENS: Final = 2**31 - 1
"""Most tokens of any input: lengths are int32."""
_TASK_PARAMETERS: Final = ("dimensions", "normalize", "use_activation", "step_tag_id", "returned_token_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Options of one request. None means: take the model's default.

    Attributes:
        truncate_prompt_tokens: Tokens. Truncate inputs to this length; -1 means the model's limit. None truncates to
            the model's limit with --auto-truncate, and otherwise rejects longer inputs.
        reject_too_long: Reject inputs above the limit, even with --auto-truncate. truncate_prompt_tokens then lowers
            the limit.
        truncation_side: "left" or "right": the side that is removed. None means the tokenizer's own.
        dimensions: Width of the embedding (Matryoshka).
        any_dimensions: Allow every width up to the model's, even if the model was not trained for it.
        normalize: L2-normalise embeddings.
        use_activation: Newer name of `normalize` for embeddings; softmax, sigmoid or identity for classes.
        task: The task; filled in by the engine call.
        step_tag_id: STEP pooling: keep the rows of tokens with this id.
        returned_token_ids: STEP pooling: keep these columns of the class scores.
        is_query: The inputs are queries of a multi-vector model, or of a model with ModelInfo.query_model; filled in by
            the engine call.
        extra_tasks: Further tasks that the same forward answers; filled in by the engine call.
        adapter: Name of the LoRA adapter; `resolved` fills it in from RequestOptions. None: the base weights.
        is_compared: Return similarities between the vectors of the input and of its query; filled in by `score`.
    """

    truncate_prompt_tokens: int | None = None
    reject_too_long: bool = False
    truncation_side: str | None = None
    dimensions: int | None = None
    any_dimensions: bool = False
    normalize: bool | None = None
    use_activation: bool | None = None
    task: PoolingTask | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    is_query: bool = False
    extra_tasks: tuple[PoolingTask, ...] = ()
    adapter: str | None = None
    is_compared: bool = False

    def clone(self, **changes: Any) -> PoolingParams:
        """Returns a copy with `changes` applied."""
        return dataclasses.replace(self, **changes)

    def verify(self, task: PoolingTask | str, model: ModelInfo) -> None:
        """Checks the parameters against the task and the served model.

        Args:
            task: A task or its name, such as "embed".
            model: The served model.

        Raises:
            UnsupportedTaskError: The model has no such task.
            InvalidRequestError: A parameter does not belong to the task, or the model does not allow its value.
        """
        task = _task_of(task)
        if task not in model.tasks:
            has_rows = task is PoolingTask.EMBED and PoolingTask.TOKEN_EMBED in model.tasks
            remedy = "Send the request to /v1/multi-vector or /pooling, or serve" if has_rows else "Serve"
            raise UnsupportedTaskError(
                f"{model.name} does not support the task {task.value!r}; it supports {listed(model.tasks)}. "
                f"{remedy} {_MODELS[task]}.",
                param="task",
            )
        if self.task is not None and _task_of(self.task) is not task:
            raise InvalidRequestError(f"task is {str(self.task)!r}, but this call runs {task.value!r}.", param="task")
        stray = [n for n in _TASK_PARAMETERS if getattr(self, n) is not None and n not in VALID_PARAMETERS[task]]
        if stray:
            raise InvalidRequestError(
                f"The task {{task!r}} takes the parameters {_fields(sorted(VALID_PARAMETERS[task]))}; "
                f"it does not take {_fields(stray)}.",
                param=stray[0],
                task=task.value,
            )
        self._verify_normalize()
        self._verify_truncation(task, model)
        self._verify_dimensions(model)
        self._verify_step(model)

    def _verify_normalize(self) -> None:
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InvalidRequestError(
                "{normalize} is {given} and use_activation is {other}, but for embeddings they are two names of one "
                "option; give one of them.",
                param="normalize",
                given=self.normalize,
                other=self.use_activation,
            )

    def _verify_truncation(self, task: PoolingTask, model: ModelInfo) -> None:
        if self.truncation_side not in (None, "left", "right"):
            raise InvalidRequestError(
                "{truncation_side} is {side!r}; it must be 'left' or 'right'.",
                param="truncation_side",
                side=self.truncation_side,
            )
        limit = self.truncate_prompt_tokens
        if limit is None or limit == -1:
            return
        if limit < 1:
            raise InvalidRequestError(
                "{truncate_prompt_tokens} is {limit}; it must be -1 (the model's maximum) or at least 1.",
                param="truncate_prompt_tokens",
                limit=limit,
            )
        longest, name = model.max_model_len, model.limit_name or "max_model_len"
        if model.enable_chunked_processing and task in (PoolingTask.EMBED, PoolingTask.SCORE):
            longest, name = model.max_embed_len or _MAX_TOKENS, "max_embed_len"
        if limit > longest:
            raise InvalidRequestError(
                "{truncate_prompt_tokens} value is greater than {longest_name}. "
                "Please request a smaller truncation size. ({limit} > {longest})",
                param="truncate_prompt_tokens",
                longest_name=name,
                limit=limit,
                longest=longest,
            )

    def _verify_dimensions(self, model: ModelInfo) -> None:
        dims = self.dimensions
        if dims is None or dims == model.embedding_size:
            return
        if not 1 <= dims <= model.embedding_size:
            raise InvalidRequestError(
                "{dimensions} is {given}; it must be 1 to {model.embedding_size} for {model.name}.",
                param="dimensions",
                given=dims,
                model=model,
            )
        if self.any_dimensions:
            return
        if model.matryoshka_dimensions:
            if dims not in model.matryoshka_dimensions:
                raise InvalidRequestError(
                    "{dimensions} is {given}; {model.name} declares {declared} and its native {model.embedding_size}. "
                    "--matryoshka any allows every width.",
                    param="dimensions",
                    given=dims,
                    model=model,
                    declared=listed(model.matryoshka_dimensions),
                )
        elif not model.is_matryoshka:
            raise InvalidRequestError(
                "{dimensions} is {given}, but {model.name} does not declare Matryoshka support; leave {dimensions} out "
                "or set it to the native {model.embedding_size}. If the model supports smaller vectors, start "
                "with --matryoshka any, or with --hf-overrides '{{\"matryoshka_dimensions\": [...]}}'.",
                param="dimensions",
                given=dims,
                model=model,
            )

    def _verify_step(self, model: ModelInfo) -> None:
        if (self.step_tag_id, self.returned_token_ids) == (None, None):
            return
        if model.token_pooling is not PoolingType.STEP:
            raise InvalidRequestError(
                f"step_tag_id and returned_token_ids need STEP pooling; {model.name} uses {model.token_pooling.value}. "
                'Start the server with --pooler-config \'{"pooling_type": "STEP"}\'.',
                param="step_tag_id" if self.step_tag_id is not None else "returned_token_ids",
            )
        if self.step_tag_id is not None and not 0 <= self.step_tag_id < model.vocab_size:
            raise InvalidRequestError(
                f"step_tag_id is {self.step_tag_id}; it must be 0 to {model.vocab_size - 1}.",
                param="step_tag_id",
            )
        bad = [i for i in self.returned_token_ids or () if not 0 <= i < max(model.num_labels, 1)]
        if bad:
            raise InvalidRequestError(
                f"returned_token_ids holds {bad[0]}; {model.name} has the columns 0 to {model.num_labels - 1}.",
                param="returned_token_ids",
            )

    def resolved(self, task: PoolingTask | str, model: ModelInfo, adapter: str | None = None) -> PoolingParams:
        """Verifies the parameters and replaces None by the model's defaults.

        Args:
            task: A task or its name.
            model: The served model.
            adapter: Adapter that the request selects (RequestOptions.adapter).

        Raises:
            ModelNotFoundError: The model has no such adapter.
            InvalidRequestError: The model or the task does not support a parameter.
        """
        task = _task_of(task)
        self.verify(task, model)
        adapter = model.adapter_of(adapter or self.adapter)
        if task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED):
            given = self.normalize if self.normalize is not None else self.use_activation
            normalize = model.normalize if given is None else given
            dimensions = self.dimensions or model.dimensions
            return self.clone(
                task=task, adapter=adapter, normalize=normalize, use_activation=normalize, dimensions=dimensions
            )
        if task is PoolingTask.SPARSE_EMBED:
            return self.clone(task=task, adapter=adapter)
        use_activation = model.use_activation if self.use_activation is None else self.use_activation
        return self.clone(
            task=task,
            adapter=adapter,
            use_activation=use_activation,
            step_tag_id=self.step_tag_id if self.step_tag_id is not None else model.step_tag_id,
            returned_token_ids=self.returned_token_ids or model.returned_token_ids,
        )


def _task_of(task: PoolingTask | str) -> PoolingTask:
    """Returns a task by its name. Raises UnsupportedTaskError for an unknown name."""
    try:
        return PoolingTask(task)
    except ValueError:
        raise UnsupportedTaskError(
            f"There is no task {task!r}; known are {listed(PoolingTask)}.", param="task"
        ) from None


def _fields(names: Sequence[str]) -> str:
    """Lists request fields for the template of an error."""
    return ", ".join(f"{{{name}}}" for name in names) or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of a request other than its pooling parameters.

    Attributes:
        timeout_s: Seconds until the deadline.
        priority: Lower runs first among the requests of a client; a level equals one second of waiting.
        client: The HTTP client, by the name of its API key. Waiting clients share the device evenly,
            regardless of how much each sends.
        namespace: Cached vectors and prefixes are shared within a namespace only, so that the latency of a request does
            not reveal the texts of other namespaces.
        adapter: Name of a LoRA adapter of the model; None takes the model's default.
        prompt_name: Named prompt of the model to put before every text.
        prompt: Text to put before every text; overrides `prompt_name`.
        instruction: Task instruction for `score`; None takes the model's own.
        is_rendered: Texts are whole prompts, such as rendered chats: no prompt of the model is put around them.
        add_special_tokens: Put the tokenizer's special tokens around every text; False if the texts contain them.
            Pairs and late chunking always have them.
        max_passages: `score` splits a document that does not fit into up to this many passages and takes the best
            score; 1 truncates the document as `params` say.
        is_query: For models that distinguish them: True for queries, False for documents. None: the prompt decides;
            without a prompt they are documents, or queries if ModelInfo.default_is_query is set.
        on_rows: Called before the model runs with the number and the width of the token rows in the result. An error
            that it raises rejects the request.
        on_truncated: Called before the model runs with the number of inputs that were truncated, if it is above 0. It
            may be called several times, for example for queries and for documents.
    """

    timeout_s: float | None = None
    priority: int = 0
    client: str = ""
    namespace: str = ""
    adapter: str | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None
    is_rendered: bool = False
    add_special_tokens: bool = True
    max_passages: int = 1
    is_query: bool | None = None
    on_rows: Callable[[int, int], None] | None = None
    on_truncated: Callable[[int], None] | None = None

    def report_rows(self, num_rows: int, width: int) -> None:
        """Calls `on_rows`, if it is set."""
        if self.on_rows is not None:
            self.on_rows(num_rows, width)

    def report_truncated(self, num_inputs: int) -> None:
        """Calls `on_truncated`, if it is set and the number is above 0."""
        if self.on_truncated is not None and num_inputs:
            self.on_truncated(num_inputs)


DEFAULT_OPTIONS: Final = RequestOptions()

CLIENT: Final[ContextVar[str]] = ContextVar("penstock_client", default="")
"""The client of the request that the current task serves; "": no client.

JsonDispatcher of the server sets it. TokenizerPool and DecodeQueue read it, because they divide their queues among
clients, also for calls without RequestOptions, such as /tokenize.
"""
