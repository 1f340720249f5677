"""The limits of the server that refuse requests, and how a refusal is noted for the metrics."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from fastapi import HTTPException
from starlette.types import Scope

from penstock.engine.protocol.errors import EngineOverloadedError, EngineUnavailableError, RefusalReason

REFUSED_BY: Final = "penstock.refused_by"
"""The key of a request's scope that holds the limit which refused it, for the metrics."""


class ServerRefusalReason(StrEnum):
    """The limit of the server that refused a request; RefusalReason has those of the engine."""

    BODY_BYTES = "body_bytes"
    BODY_MEMORY = "body_memory"
    BODY_MEMORY_SHARE = "body_memory_share"
    JSON_VALUES = "json_values"
    RESPONSE_MEMORY = "response_memory"
    RESPONSE_MEMORY_SHARE = "response_memory_share"
    SLOW_TRANSFER = "slow_transfer"
    FILE_BYTES = "file_bytes"
    FILE_STORAGE = "file_storage"
    UNFINISHED_BATCHES = "unfinished_batches"
    MODEL_LOADING = "model_loading"
    MODEL_MEMORY = "model_memory"


REFUSAL_REASONS: Final = tuple(str(reason) for reason in (*RefusalReason, *ServerRefusalReason))
"""Every value of the label `reason` of penstock_refused_requests_total."""


class LimitError(HTTPException):
    """A request that a limit of the server refuses with 408, 413 or 503.

    Attributes:
        reason: The limit.
    """

    def __init__(
        self, status: int, message: str, reason: ServerRefusalReason, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(status, message, headers)
        self.reason = reason


def refusal_reason(error: Exception) -> str | None:
    """Returns the limit behind an error; None for errors that no limit raised."""
    if isinstance(error, LimitError | EngineOverloadedError | EngineUnavailableError):
        return error.reason
    return None


def note_refusal(scope: Scope, error: Exception) -> None:
    """Notes the limit behind an error, if there is one, in the scope of the request that it ends."""
    if (reason := refusal_reason(error)) is not None:
        scope[REFUSED_BY] = reason
