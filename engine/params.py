"""What one request may ask of pooling, and what the operator may set for all of them.

PoolingParams travels with a request; PoolerConfig belongs to the served model. The order of
resolution is request, then PoolerConfig, then the model's own files, then the built-in default.
Knows nothing about tensors.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from .errors import InvalidRequestError, UnsupportedTaskError
from .length_limit import limit_name

if TYPE_CHECKING:
    from .model_info import ModelInfo


class PoolingTask(StrEnum):
    """What a request wants from the model."""

    EMBED = "embed"
    CLASSIFY = "classify"
    SCORE = "score"
    TOKEN_EMBED = "token_embed"
    TOKEN_CLASSIFY = "token_classify"
    SPARSE_EMBED = "sparse_embed"


class PoolingType(StrEnum):
    """How token rows become the answer for a sequence. Values are the names on the wire."""

    CLS = "CLS"
    LAST = "LAST"
    MEAN = "MEAN"
    MAX = "MAX"
    MEAN_SQRT_LEN = "MEAN_SQRT_LEN"
    WEIGHTED_MEAN = "WEIGHTED_MEAN"
    ATTENTION = "ATTENTION"
    ALL = "ALL"
    STEP = "STEP"

    @property
    def is_token_level(self) -> bool:
        """True where the answer holds one row per token (ALL, STEP)."""
        return self in (PoolingType.ALL, PoolingType.STEP)


class ChunkedProcessingMode(StrEnum):
    """How over-long text becomes one embedding; see long_text.py. Values are those of `chunked_processing_mode`."""

    WINDOWS = "windows"
    VLLM = "vllm"


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
    PoolingTask.TOKEN_CLASSIFY: "a token classifier",
    PoolingTask.SPARSE_EMBED: "a model with sparse vectors, such as SPLADE or bge-m3",
}
"""What has to be served for a task."""
_MOST_TOKENS: Final = 2**31 - 1
"""Tokens that an input can ever have: lengths travel as int32."""
_TASK_PARAMETERS: Final = ("dimensions", "normalize", "use_activation", "step_tag_id", "returned_token_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Options of one request. None means: take the model's default.

    Attributes:
        truncate_prompt_tokens: Tokens. Cut every input to this many; -1 means the longest that is taken; None cuts to
            that if the server runs with --auto-truncate, and else refuses what is longer.
        refuse_too_long: Refuse inputs above the limit, whatever --auto-truncate says; a limit of truncate_prompt_tokens
            is one above which they are refused.
        truncation_side: "left" or "right": the side that is cut away. None means the tokenizer's own.
        dimensions: Width of the embedding (Matryoshka).
        normalize: L2-normalise embeddings.
        use_activation: Newer name of `normalize` for embeddings; softmax, sigmoid or identity for classes.
        task: The task; filled in by the engine call.
        step_tag_id: STEP pooling: keep the rows of tokens with this id.
        returned_token_ids: STEP pooling: keep these columns of the class scores.
        is_query: The inputs are queries of a multi-vector model; filled in by the engine call.
        also: Further tasks that the same forward answers; filled in by the engine call.
        is_compared: Answer with the similarities of each input's vectors to those of its query; filled in by `score`.
    """

    truncate_prompt_tokens: int | None = None
    refuse_too_long: bool = False
    truncation_side: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    task: PoolingTask | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    is_query: bool = False
    also: tuple[PoolingTask, ...] = ()
    is_compared: bool = False

    def clone(self, **changes: Any) -> PoolingParams:
        """Returns a copy with `changes` applied."""
        return dataclasses.replace(self, **changes)

    def verify(self, task: PoolingTask, model: ModelInfo) -> None:
        """Checks the parameters against the task and the served model.

        Raises:
            UnsupportedTaskError: The model has no such task.
            InvalidRequestError: A parameter does not belong to the task or has a value that the model refuses.
        """
        if task not in model.tasks:
            raise UnsupportedTaskError(
                f"{model.name} does not support the task {task.value!r}; it supports {_listed(model.tasks)}. "
                f"Serve {_MODELS[task]} for it.",
                param="task",
            )
        if self.task is not None and self.task is not task:
            raise InvalidRequestError(f"task is {self.task.value!r}, but this call runs {task.value!r}.", param="task")
        stray = [n for n in _TASK_PARAMETERS if getattr(self, n) is not None and n not in VALID_PARAMETERS[task]]
        if stray:
            raise InvalidRequestError(
                f"The task {task.value!r} takes the parameters {_listed(VALID_PARAMETERS[task])}; "
                f"it does not take {_listed(stray)}.",
                param=stray[0],
            )
        self._verify_normalize()
        self._verify_truncation(task, model)
        self._verify_dimensions(model)
        self._verify_step(model)

    def _verify_normalize(self) -> None:
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InvalidRequestError(
                f"normalize is {self.normalize} and use_activation is {self.use_activation}, "
                "but for embeddings they are two names of one option; give one of them.",
                param="normalize",
            )

    def _verify_truncation(self, task: PoolingTask, model: ModelInfo) -> None:
        if self.truncation_side not in (None, "left", "right"):
            raise InvalidRequestError(
                f"truncation_side is {self.truncation_side!r}; it must be 'left' or 'right'.", param="truncation_side"
            )
        limit = self.truncate_prompt_tokens
        if limit is None or limit == -1:
            return
        if limit < 1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {limit}; it must be -1 (the model's maximum) or at least 1.",
                param="truncate_prompt_tokens",
            )
        longest, name = model.max_model_len, limit_name(model) or "max_model_len"
        if model.enable_chunked_processing and task in (PoolingTask.EMBED, PoolingTask.SCORE):
            longest, name = model.max_embed_len or _MOST_TOKENS, "max_embed_len"
        if limit > longest:
            raise InvalidRequestError(
                f"truncate_prompt_tokens value is greater than {name}. "
                f"Please request a smaller truncation size. ({limit} > {longest})",
                param="truncate_prompt_tokens",
            )

    def _verify_dimensions(self, model: ModelInfo) -> None:
        dims = self.dimensions
        if dims is None or dims == model.embedding_size:
            return
        if not 1 <= dims <= model.embedding_size:
            raise InvalidRequestError(
                f"dimensions is {dims}; {model.name} gives 1 to {model.embedding_size}.", param="dimensions"
            )
        if model.matryoshka_dimensions:
            if dims not in model.matryoshka_dimensions:
                raise InvalidRequestError(
                    f"dimensions is {dims}; {model.name} declares {_listed(model.matryoshka_dimensions)} "
                    f"and its native {model.embedding_size}.",
                    param="dimensions",
                )
        elif not model.is_matryoshka:
            raise InvalidRequestError(
                f"dimensions is {dims}, but {model.name} does not declare Matryoshka support; leave dimensions out "
                f"or ask for its native {model.embedding_size}. To allow cutting, start the server with "
                "--hf-overrides '{\"is_matryoshka\": true}' or list sizes in '{\"matryoshka_dimensions\": [...]}'.",
                param="dimensions",
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
                f"step_tag_id is {self.step_tag_id}; the model has the ids 0 to {model.vocab_size - 1}.",
                param="step_tag_id",
            )
        bad = [i for i in self.returned_token_ids or () if not 0 <= i < max(model.num_labels, 1)]
        if bad:
            raise InvalidRequestError(
                f"returned_token_ids holds {bad[0]}; {model.name} gives columns 0 to {model.num_labels - 1}.",
                param="returned_token_ids",
            )

    def resolved(self, task: PoolingTask, model: ModelInfo) -> PoolingParams:
        """Verifies and fills every None that a pooler needs from the model's resolved defaults.

        Raises:
            InvalidRequestError: See `verify`.
        """
        self.verify(task, model)
        if task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED):
            asked = self.normalize if self.normalize is not None else self.use_activation
            normalize = model.normalize if asked is None else asked
            return self.clone(
                task=task, normalize=normalize, use_activation=normalize, dimensions=self.dimensions or model.dimensions
            )
        if task is PoolingTask.SPARSE_EMBED:
            return self.clone(task=task)
        use_activation = model.use_activation if self.use_activation is None else self.use_activation
        return self.clone(
            task=task,
            use_activation=use_activation,
            step_tag_id=self.step_tag_id if self.step_tag_id is not None else model.step_tag_id,
            returned_token_ids=self.returned_token_ids or model.returned_token_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """The operator's settings for the pooler of one model (`--pooler-config`). None means: from the model's files.

    Attributes:
        pooling_type: Pooling of the sequence or, for ALL and STEP, of the tokens.
        normalize: L2-normalise embeddings unless the request says otherwise.
        dimensions: Width of embeddings unless the request says otherwise.
        use_activation: Apply the class activation unless the request says otherwise.
        logit_bias: Added to class logits before the activation, after mean and sigma.
        logit_mean: Subtracted from class logits.
        logit_sigma: Class logits are divided by it, after the mean is subtracted.
        step_tag_id: STEP pooling: token id whose rows are kept.
        returned_token_ids: STEP pooling: columns that are kept.
        attention_head: ATTENTION pooling: the head whose weights are used; None averages all heads.
        enable_chunked_processing: Embed text above max_model_len in windows and average their vectors.
        max_embed_len: Tokens. Limit of an input with enable_chunked_processing; None leaves it to the queue.
        chunk_overlap: Tokens that a window shares with the one before it.
        chunked_processing_mode: How the windows are cut and averaged.
    """

    pooling_type: PoolingType | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    logit_bias: float | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    attention_head: int | None = None
    enable_chunked_processing: bool | None = None
    max_embed_len: int | None = None
    chunk_overlap: int | None = None
    chunked_processing_mode: ChunkedProcessingMode | None = None

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and its value."""
        for name in ("dimensions", "max_embed_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        for name in ("logit_bias", "logit_mean", "logit_sigma"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} is {value}; it must be a finite number.")
        if self.logit_sigma == 0:
            raise ValueError("logit_sigma is 0; logits are divided by it.")
        for name in ("attention_head", "step_tag_id", "chunk_overlap"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}; it must be 0 or more.")
        for name in ("max_embed_len", "chunk_overlap", "chunked_processing_mode"):
            if getattr(self, name) is not None and not self.enable_chunked_processing:
                raise ValueError(f"{name} says how over-long text is cut; it needs enable_chunked_processing: true.")
        if self.chunk_overlap and self.chunked_processing_mode is ChunkedProcessingMode.VLLM:
            raise ValueError(f"chunk_overlap is {self.chunk_overlap}; the mode 'vllm' knows no overlap.")

    @classmethod
    def from_json(cls, text: str) -> PoolerConfig:
        """Parses the JSON of `--pooler-config`.

        Raises:
            ValueError: Not a JSON object, an unknown field, or a value of the wrong type; the message names it.
        """
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"must be a JSON object, not {type(fields).__name__}.")
        return cls.from_dict(fields)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> PoolerConfig:
        """Builds the configuration from plain values.

        Raises:
            ValueError: An unknown field or a value of the wrong type; the message names it.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}; known are {_listed(sorted(known))}.")
        return cls(**{name: _checked(name, value) for name, value in fields.items()})


_ENUM_FIELDS: Final[dict[str, type[StrEnum]]] = {
    "pooling_type": PoolingType,
    "chunked_processing_mode": ChunkedProcessingMode,
}
_BOOL_FIELDS: Final = {"normalize", "use_activation", "enable_chunked_processing"}
_FLOAT_FIELDS: Final = {"logit_bias", "logit_mean", "logit_sigma"}


def _checked(name: str, value: Any) -> Any:
    """Returns `value` in the type of the PoolerConfig field `name`, or raises ValueError that names both."""
    if value is None:
        return None
    if name in _ENUM_FIELDS:
        known = {member.lower(): member for member in _ENUM_FIELDS[name]}
        if str(value).lower() in known:
            return known[str(value).lower()]
        raise ValueError(f"{name} is {value!r}; it must be one of {_listed(known.values())}.")
    if name in _BOOL_FIELDS:
        if isinstance(value, bool):
            return value
        raise ValueError(f"{name} is {value!r}; it must be true or false.")
    if name in _FLOAT_FIELDS:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise ValueError(f"{name} is {value!r}; it must be a number.")
    if name == "returned_token_ids":
        if isinstance(value, list | tuple) and value and all(type(i) is int and i >= 0 for i in value):
            return tuple(value)
        raise ValueError(f"returned_token_ids is {value!r}; it must be a list of token ids.")
    if type(value) is int:
        return value
    raise ValueError(f"{name} is {value!r}; it must be an integer.")


def _listed(values: Any) -> str:
    """Returns values as a comma-separated list for an error message."""
    shown = [getattr(v, "value", v) for v in values]
    if isinstance(values, set | frozenset):
        shown.sort()
    return ", ".join(map(str, shown)) or "none"
