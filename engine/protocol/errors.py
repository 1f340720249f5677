"""Every way the engine can refuse or fail, in one tree.

    EngineError
    +-- InvalidRequestError          the request is wrong: change it
    |   +-- RequestTooLongError      more tokens than the model takes
    |   +-- UnsupportedTaskError     the served model cannot do this task
    +-- ModelNotFoundError           no model is served under that name
    +-- EngineOverloadedError        the queue is full: try again later
    +-- DeadlineExceededError        the deadline passed before the work was done
    |   +-- OwnDeadlineExceededError the request itself had set it
    +-- RequestCancelledError        the caller has gone
    +-- EngineUnavailableError       starting, draining, or the worker died: try again
    +-- ModelExecutionError          the forward failed for this request
    +-- PoolError                    a sequence pool was asked for what it cannot give
    |   +-- PoolExhausted            no block or slot is free
    |   +-- InvalidSlot              not in use, out of range, or of the other kind
    +-- ModelLoadError               the model cannot be served at all (start-up only)
        +-- UnsupportedModelError    unknown architecture or model file
        +-- WeightError              a tensor is missing or has the wrong shape

Knows nothing about HTTP: server/errors/table.py holds the only table from class to status.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose.

    Attributes:
        message: Text for the user: names the field, the value and the way out.
        param: Name of the request field at fault, where there is one.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(EngineError):
    """The request cannot be served as it is; the caller must change it."""


class RequestTooLongError(InvalidRequestError):
    """An input holds more tokens than the model takes.

    Attributes:
        num_tokens: Tokens in the input, special tokens included.
        max_num_tokens: Tokens that fit.
    """

    def __init__(self, message: str, *, num_tokens: int, max_num_tokens: int, param: str | None = "input") -> None:
        super().__init__(message, param=param)
        self.num_tokens = num_tokens
        self.max_num_tokens = max_num_tokens


class UnsupportedTaskError(InvalidRequestError):
    """The served model has no head for the task that was asked for."""


class ModelNotFoundError(EngineError):
    """No model is served under the requested name."""


class EngineOverloadedError(EngineError):
    """The waiting queue cannot take the whole request.

    Attributes:
        retry_after_s: Seconds after which trying again is likely to succeed.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(EngineError):
    """The deadline of the request passed before its work was done."""


class OwnDeadlineExceededError(DeadlineExceededError):
    """The deadline that the request itself had set passed; nothing is wrong with the server."""


class RequestCancelledError(EngineError):
    """The caller has gone; nobody waits for the answer."""


class EngineUnavailableError(EngineError):
    """The engine is starting, draining or lost its worker; the same request may succeed later."""


class ModelExecutionError(EngineError):
    """The model failed on this request. Other requests are not affected."""


class PoolError(EngineError):
    """A sequence pool cannot do what it was asked. Never reaches a caller: the scheduler waits or was wrong."""


class PoolExhausted(PoolError):  # noqa: N818 - the specification's name
    """No block or slot is free at the moment."""


class InvalidSlot(PoolError):  # noqa: N818 - the specification's name
    """A block or slot that is out of range, not in use, or of a kind that the pool does not hold."""


class ModelLoadError(EngineError):
    """The model cannot be served. Raised at start-up only."""


class UnsupportedModelError(ModelLoadError):
    """The architecture or a file of the model is not known."""


class WeightError(ModelLoadError):
    """A checkpoint tensor is missing or has the wrong shape."""
