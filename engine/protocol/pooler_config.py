"""The operator's settings for the pooler of one model. Plain Python, no tensors."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from .json_text import json_object
from .tasks import ChunkedProcessingMode, PoolingTask, PoolingType, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """The operator's settings for the pooler of one model (`--pooler-config`). None: from the model's files.

    Enum fields also take names as plain strings, in any case. `returned_token_ids` also takes a list.

    Attributes:
        task: Restrict the model to this task, and to scoring if it is based on the task; None: all tasks.
        pooling_type: Sets `tok_pooling_type` if it is ALL or STEP, else `seq_pooling_type`.
        seq_pooling_type: Pooling of the sequence.
        tok_pooling_type: Pooling of the tokens: ALL or STEP.
        normalize: L2-normalise embeddings unless the request says otherwise.
        dimensions: Width of embeddings unless the request says otherwise.
        use_activation: Apply the class activation unless the request says otherwise.
        logit_mean: Subtracted from class logits, before the activation.
        logit_sigma: Class logits are divided by it, after the mean is subtracted.
        logit_bias: Older name of `logit_mean`, as in vLLM. Moved to `logit_mean`.
        logit_scale: 1 / `logit_sigma`. Moved to `logit_sigma`.
        step_tag_id: STEP pooling: keep the rows of this token id.
        returned_token_ids: STEP pooling: keep these columns.
        attention_head: ATTENTION pooling: use the weights of this head; None averages all heads.
        enable_chunked_processing: Embed text above max_model_len in windows and average their vectors.
        max_embed_len: Tokens. Limit of an input with enable_chunked_processing; None: the limit of the queue.
        chunk_overlap: Tokens that a window shares with the one before it.
        chunked_processing_mode: How windows are cut and averaged.
    """

    task: PoolingTask | None = None
    pooling_type: PoolingType | None = None
    seq_pooling_type: PoolingType | None = None
    tok_pooling_type: PoolingType | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    logit_bias: float | None = None
    logit_scale: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    attention_head: int | None = None
    enable_chunked_processing: bool | None = None
    max_embed_len: int | None = None
    chunk_overlap: int | None = None
    chunked_processing_mode: ChunkedProcessingMode | None = None

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and its value."""
        for name in (*_ENUM_FIELDS, "returned_token_ids"):
            object.__setattr__(self, name, _checked(name, getattr(self, name)))
        check_least(self, 1, "dimensions", "max_embed_len")
        for name in ("logit_mean", "logit_sigma", "logit_bias", "logit_scale"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} is {value}; it must be a finite number.")
        if self.logit_sigma == 0:
            raise ValueError("logit_sigma is 0; logits are divided by it.")
        if self.logit_scale == 0:
            raise ValueError("logit_scale is 0; every class would get the same score.")
        if self.pooling_type is not None:
            name = "tok_pooling_type" if self.pooling_type.is_token_level else "seq_pooling_type"
            if getattr(self, name) not in (None, self.pooling_type):
                raise ValueError(f"pooling_type is {self.pooling_type}, {name} is {getattr(self, name)}; give one.")
            object.__setattr__(self, name, self.pooling_type)
        for name, of_tokens in (("seq_pooling_type", False), ("tok_pooling_type", True)):
            kind: PoolingType | None = getattr(self, name)
            if kind is not None and kind.is_token_level != of_tokens:
                raise ValueError(f"{name} is {kind}; that pools {'the sequence' if of_tokens else 'the tokens'}.")
        self._rename("logit_bias", "logit_mean", self.logit_bias)
        self._rename("logit_scale", "logit_sigma", None if self.logit_scale is None else 1 / self.logit_scale)
        check_least(self, 0, "attention_head", "step_tag_id", "chunk_overlap")
        for name in ("max_embed_len", "chunk_overlap", "chunked_processing_mode"):
            if getattr(self, name) is not None and not self.enable_chunked_processing:
                raise ValueError(f"{name} says how over-long text is cut; it needs enable_chunked_processing: true.")
        if self.chunk_overlap and self.chunked_processing_mode is ChunkedProcessingMode.VLLM:
            raise ValueError(f"chunk_overlap is {self.chunk_overlap}; the mode 'vllm' knows no overlap.")

    def _rename(self, older: str, name: str, value: float | None) -> None:
        """Moves the value of an older name to its field. Raises ValueError if both are set."""
        if value is None:
            return
        if getattr(self, name) is not None:
            raise ValueError(f"{older} is the older name of {name}, but both are given; leave {older} out.")
        object.__setattr__(self, name, value)
        object.__setattr__(self, older, None)

    @classmethod
    def from_json(cls, text: str) -> PoolerConfig:
        """Parses the JSON of `--pooler-config`; see `json_object` and `from_dict`."""
        return cls.from_dict(json_object(text))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> PoolerConfig:
        """Builds the configuration from plain values.

        Raises:
            ValueError: An unknown field or a value of the wrong type; the message names it.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}; known are {listed(sorted(known))}.")
        return cls(**{name: _checked(name, value) for name, value in fields.items()})


_ENUM_FIELDS: Final[dict[str, type[StrEnum]]] = {
    "task": PoolingTask,
    "pooling_type": PoolingType,
    "seq_pooling_type": PoolingType,
    "tok_pooling_type": PoolingType,
    "chunked_processing_mode": ChunkedProcessingMode,
}
_BOOL_FIELDS: Final = {"normalize", "use_activation", "enable_chunked_processing"}
_FLOAT_FIELDS: Final = {"logit_mean", "logit_sigma", "logit_bias", "logit_scale"}


def check_least(config: object, least: int, *names: str) -> None:
    """Raises ValueError, which names it, for a field that is set and below `least`."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= least:
            raise ValueError(f"{name} is {value}; it must be {f'at least {least}' if least else '0 or more'}.")


def _checked(name: str, value: Any) -> Any:
    """Returns `value` in the type of the PoolerConfig field `name`, or raises ValueError that names both."""
    if value is None:
        return None
    if name in _ENUM_FIELDS:
        kind = _ENUM_FIELDS[name]
        try:
            return kind(str(value) if kind is PoolingType else str(value).lower())
        except ValueError:
            raise ValueError(f"{name} is {value!r}; it must be one of {listed(kind)}.") from None
    if name in _BOOL_FIELDS:
        fits, wanted = isinstance(value, bool), "true or false"
    elif name in _FLOAT_FIELDS:
        fits, wanted = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    elif name == "returned_token_ids":
        is_list = type(value) in (list, tuple) and bool(value)
        fits, wanted = is_list and all(type(i) is int and i >= 0 for i in value), "a list of token ids"
    else:
        fits, wanted = type(value) is int, "an integer"
    if not fits:
        raise ValueError(f"{name} is {value!r}; it must be {wanted}.")
    if isinstance(value, list):
        return tuple(value)
    return float(value) if name in _FLOAT_FIELDS else value
