"""All errors of the engine.

    EngineError
    +-- InvalidRequestError          the request is wrong: change it
    |   +-- RequestTooLongError      more tokens than the model accepts
    |   +-- UnsupportedTaskError     the served model cannot do this task
    +-- ModelNotFoundError           no model is served under that name
    +-- EngineOverloadedError        the queue is full: try again later
    +-- DeadlineExceededError        the deadline passed before the work was done
    |   +-- OwnDeadlineExceededError the request itself had set it
    +-- RequestCancelledError        the caller has disconnected
    +-- EngineUnavailableError       starting, draining, or its process died: try again
    +-- ModelExecutionError          the forward failed for this request
    +-- UnknownObjectError           no file or batch of this client has that id
    +-- ConflictError                the state of a file or batch does not allow the operation
    +-- StorageError                 the disk is full or fails: free space, then try again
    +-- PoolError                    a sequence pool cannot do an operation
    |   +-- PoolExhaustedError       no block or slot is free
    |   +-- InvalidSlotError         not in use, out of range, or of the other kind
    +-- ModelLoadError               the model cannot be served at all (start-up only)
        +-- UnsupportedModelError    unknown architecture or model file
        +-- WeightError              a tensor is missing or has the wrong shape
        +-- MachineError             the machine or the installation lacks what the model needs

Independent of HTTP: server/errors.py has the only table from class to status.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

CUT_TO_FIT: Final = "truncate_prompt_tokens to -1"
"""The setting that truncates inputs, in vLLM's terms: the value of `cut_to_fit` in messages."""


class RejectionReason(StrEnum):
    """The limit or state of the engine that rejected a request."""

    QUEUE_TOKENS = "queue_tokens"
    QUEUE_SECONDS = "queue_seconds"
    CLIENT_SHARE = "client_share"
    QUEUED_CHARACTERS = "queued_characters"
    QUEUED_PIXELS = "queued_pixels"
    ENGINE_NOT_READY = "engine_not_ready"
    DRAINING = "draining"


def drop_tracebacks(error: BaseException) -> None:
    """Frees the stack frames of an error and of its causes. Call it when the error has been handled.

    Frames refer to local variables, such as the body of a request. A failed future among them forms a reference cycle
    with the error. Only the garbage collector would free the cycle, and it hardly ever runs in a serving process.
    """
    left = [error]
    seen = set[int]()
    while left:
        found = left.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        found.__traceback__ = None
        left += [each for each in (found.__cause__, found.__context__) if each is not None]
        if isinstance(found, BaseExceptionGroup):
            left += found.exceptions


class EngineError(Exception):
    """Base of all errors that the engine raises deliberately.

    Attributes:
        message: Text for the user: names the field, its value and a remedy.
        param: Name of the request field at fault, if there is one.

    Args:
        message: The text; with `values`, a template of str.format. A placeholder without a value is the name of a
            request field, which a dialect may replace by its own name.
        param: Name of that request field; None if no field is at fault.
        values: Values for the template.
    """

    def __init__(self, message: str, *, param: str | None = None, **values: object) -> None:
        self._template = message
        self._values = values
        self.param = param
        self.message = self._format({})
        super().__init__(self.message)

    def name_fields(self, names: Mapping[str, str]) -> None:
        """Replaces names of request fields, or values of the template, by those of a dialect."""
        self.message = self._format(names)
        if self.param is not None:
            self.param = names.get(self.param, self.param)

    def _format(self, names: Mapping[str, str]) -> str:
        return self._template.format_map(_TemplateValues({**self._values, **names})) if self._values else self._template


class _TemplateValues(dict[str, object]):
    """Values of a template. A missing value is its own name."""

    def __missing__(self, key: str) -> str:
        return key


class InvalidRequestError(EngineError, ValueError):
    """The request is invalid; the caller must change it."""


class RequestTooLongError(InvalidRequestError):
    """An input has more tokens than the model accepts.

    Attributes:
        num_tokens: Tokens in the input, special tokens included.
        max_num_tokens: Tokens that fit.
    """

    def __init__(
        self, message: str, *, num_tokens: int, max_num_tokens: int, param: str | None = "input", **values: object
    ) -> None:
        super().__init__(message, param=param, **values)
        self.num_tokens = num_tokens
        self.max_num_tokens = max_num_tokens

    @classmethod
    def over_limit(
        cls,
        found: str,
        remedy: str,
        *,
        num_tokens: int,
        max_num_tokens: int,
        limit_name: str | None = None,
        param: str | None = "input",
    ) -> RequestTooLongError:
        """Returns the error of an input above the limit of the model, with OpenAI's text.

        Args:
            found: The finding, such as "input 0 has 12 tokens".
            remedy: A sentence with the remedy. A template, see EngineError; `cut_to_fit` names the setting that
                truncates inputs.
            num_tokens: See the class.
            max_num_tokens: See the class.
            limit_name: Cause of the limit if it is not the model (ModelInfo.limit_name); a template.
            param: Name of the request field at fault.
        """
        name = f" ({limit_name})" if limit_name else ""
        return cls(
            f"This model's maximum context length is {max_num_tokens} tokens{name}, but {{found}}. {remedy}",
            num_tokens=num_tokens,
            max_num_tokens=max_num_tokens,
            param=param,
            found=found,
            cut_to_fit=CUT_TO_FIT,
        )


class UnsupportedTaskError(InvalidRequestError):
    """The served model does not support the requested task."""


class ModelNotFoundError(EngineError):
    """No model is served under the requested name."""


class EngineOverloadedError(EngineError):
    """The queue cannot accept the whole request.

    Attributes:
        retry_after_s: Seconds after which trying again is likely to succeed.
        reason: The limit that rejected the request: a RejectionReason, or a reason of the server. Metrics count by it.
    """

    def __init__(self, message: str, *, retry_after_s: float, reason: str) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class DeadlineExceededError(EngineError):
    """The deadline of the request passed before its work was done."""


class OwnDeadlineExceededError(DeadlineExceededError):
    """The deadline set by the request passed; not an error of the server."""


class RequestCancelledError(EngineError):
    """The caller has disconnected."""


class EngineUnavailableError(EngineError):
    """The engine is starting, draining or lost its process; the same request may succeed later.

    Attributes:
        reason: Label of the metric of rejected requests.
        retry_after_s: Seconds after which the server may be able to run the request.
    """

    def __init__(
        self, message: str, *, reason: str = RejectionReason.ENGINE_NOT_READY, retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


def shutting_down() -> EngineUnavailableError:
    """Returns the error of a request that arrives or waits while the engine is closed."""
    return EngineUnavailableError("The server is shutting down.", reason=RejectionReason.DRAINING)


class ModelExecutionError(EngineError):
    """The model failed on this request. Other requests are not affected."""


class UnknownObjectError(EngineError):
    """The client has no file or batch with that id."""


class ConflictError(EngineError):
    """The state of a file or batch does not allow the operation."""


class StorageError(EngineError):
    """The disk is full or fails."""


class PoolError(EngineError):
    """A sequence pool cannot do an operation. Never reaches a caller: the scheduler waits, or has a bug."""


class PoolExhaustedError(PoolError):
    """No block or slot is free at the moment."""


class InvalidSlotError(PoolError):
    """A block or slot is out of range, not in use, or of a kind that the pool does not have."""


class ModelLoadError(EngineError):
    """The model cannot be served. Raised at start-up only."""


class UnsupportedModelError(ModelLoadError):
    """The architecture or a file of the model is not known."""


class WeightError(ModelLoadError):
    """A checkpoint tensor is missing or has the wrong shape."""


class MachineError(ModelLoadError):
    """The machine or installation lacks a device, memory or a library that the model needs."""
