"""Limits the size of bodies, and the memory of bodies and responses, before the engine is called.

The limits of the engine's queue are in engine/client/queue_admission.py, the limits on the number of inputs in
calls/limits.py, the limits of files and batches in server/batches. docs/limits.md lists all limits.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Final

from fastapi import HTTPException
from starlette.types import Scope

from penstock.engine.protocol.errors import (
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
    RejectionReason,
)
from penstock.engine.protocol.shared_resource import Reservation, SharedResource

from .request_state import state_of
from .response_size import ResponseSize
from .settings import ServerSettings

SMALL_BODY_BYTES: Final = 4_096
"""Bytes. Smaller bodies are not counted: connections are limited, and counting would slow down small requests."""
VALUE_BYTES: Final = 8
"""Bytes of memory that are reserved for each JSON value, by its weight."""
MAX_RESPONSE_BYTES: Final = 256 * 1024 * 1024
"""Maximum bytes of JSON of one response: about 22 million numbers."""
_SMALL_RESPONSE_BYTES: Final = 1024 * 1024
"""Bytes. Smaller responses are not counted, because connections are limited."""
_BODIES_IN_MEMORY: Final = 32
"""The memory for bodies, as a number of bodies of maximum size."""
_DENSE_VALUE_BYTES: Final = 64 * 1024 * 1024
"""Bytes for the values of all bodies in addition to the estimate by body size, because small bodies may be dense."""
_CLIENT_SHARE: Final = 0.5
"""Share of each memory that one client may hold, so that a slow client leaves the rest to others."""
_MAX_FETCHES: Final = 64
"""Images that all clients together may fetch from URLs at once."""
_RETRY_AFTER_S: Final = 2.0


class ServerRejectionReason(StrEnum):
    """The limit of the server that rejected a request. RejectionReason has the limits of the engine."""

    BODY_BYTES = "body_bytes"
    BODY_MEMORY = "body_memory"
    BODY_MEMORY_SHARE = "body_memory_share"
    JSON_VALUES = "json_values"
    RESPONSE_MEMORY = "response_memory"
    RESPONSE_MEMORY_SHARE = "response_memory_share"
    IMAGE_FETCHES = "image_fetches"
    IMAGE_FETCHES_SHARE = "image_fetches_share"
    SLOW_TRANSFER = "slow_transfer"
    FILE_BYTES = "file_bytes"
    FILE_STORAGE = "file_storage"
    UNFINISHED_BATCHES = "unfinished_batches"
    MODEL_LOADING = "model_loading"
    MODEL_MEMORY = "model_memory"


REJECTION_REASONS: Final = tuple(str(reason) for reason in (*RejectionReason, *ServerRejectionReason))
"""Every value of the label `reason` of penstock_rejected_requests_total."""


class LimitError(HTTPException):
    """A limit of the server rejects a request with 408, 413 or 503.

    Attributes:
        reason: A ServerRejectionReason.
    """

    def __init__(self, status: int, message: str, reason: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, message, headers)
        self.reason = reason


def note_rejection(scope: Scope, error: Exception) -> None:
    """Stores the limit that caused an error, if any, in the RequestState, for the metrics."""
    if isinstance(error, LimitError | EngineOverloadedError | EngineUnavailableError):
        state_of(scope).rejected_by = error.reason


def client_of(scope: Scope) -> str:
    """Returns the client of a request for memory limits: its API key, or else its address.

    The address is also used if the server has a single key. "" if neither is known.
    """
    if client := state_of(scope).client:
        return client
    address = scope.get("client")
    return "" if address is None else str(address[0])


class AdmissionController:
    """Limits the memory of bodies and responses of one HTTP process. Used by one event loop.

    Args:
        settings: Limits of the server.
        num_processes: HTTP processes of the server. Each enforces 1/num_processes of the memory limits.

    Attributes:
        max_json_values: Maximum values of one body; see json_reader.py.
        fetches: Images that are being fetched from URLs.
    """

    def __init__(self, settings: ServerSettings, num_processes: int = 1) -> None:
        self.max_body_bytes = settings.max_body_bytes
        self.max_json_values = settings.max_json_values
        reasons = ServerRejectionReason
        self.bodies = _shared_memory(
            _BODIES_IN_MEMORY * settings.max_body_bytes // num_processes,
            "the memory for bodies",
            f"{_BODIES_IN_MEMORY} x --max-body-bytes",
            full=reasons.BODY_MEMORY,
            share=reasons.BODY_MEMORY_SHARE,
        )
        self._dense_values = _shared_memory(
            _DENSE_VALUE_BYTES // num_processes,
            "the memory for the values of dense bodies",
            "fixed",
            full=reasons.BODY_MEMORY,
            share=reasons.BODY_MEMORY_SHARE,
        )
        self.responses = _shared_memory(
            settings.response_memory // num_processes,
            "the response memory",
            "--response-memory",
            full=reasons.RESPONSE_MEMORY,
            share=reasons.RESPONSE_MEMORY_SHARE,
        )

        self.fetches = SharedResource(
            max(_MAX_FETCHES // num_processes, 1),
            "the slots for fetching images",
            "images",
            "this limit cannot be changed",
            full=reasons.IMAGE_FETCHES,
            share=reasons.IMAGE_FETCHES_SHARE,
            max_share=_CLIENT_SHARE,
        )

    def check_body_bytes(self, num_bytes: int) -> None:
        """Raises LimitError 413 if a body is too large."""
        if num_bytes > self.max_body_bytes:
            raise LimitError(
                413,
                f"The body is larger than the limit of {self.max_body_bytes} bytes (--max-body-bytes); send "
                "fewer inputs at once.",
                ServerRejectionReason.BODY_BYTES,
                {"connection": "close"},
            )

    def check_json_values(self, num_values: int) -> None:
        """Raises LimitError 413 if a body has too many values."""
        if num_values > self.max_json_values:
            raise LimitError(
                413,
                f"The body has more than {self.max_json_values} values (a text, list, object or key counts as 8); "
                "send fewer inputs at once, or start the server with a larger --max-json-values.",
                ServerRejectionReason.JSON_VALUES,
            )

    def body_memory(self, scope: Scope) -> BodyMemory | None:
        """Returns a reservation for the body of a request, or None for a small body. `release` frees it.

        Raises LimitError 413 if its Content-Length is too large.
        """
        num_bytes = self.content_length(scope)
        is_small = num_bytes is not None and num_bytes <= SMALL_BODY_BYTES
        return None if is_small or state_of(scope).is_batch_line else self._new_body_memory(scope)

    def content_length(self, scope: Scope) -> int | None:
        """Returns the Content-Length of a request; None if it has none. Raises LimitError 413 if it is too large."""
        for name, value in scope["headers"]:
            if name == b"content-length":
                num_bytes = int(value) if value.isdigit() else sys.maxsize
                self.check_body_bytes(num_bytes)
                return num_bytes
        return None

    def reserve_images(self, scope: Scope, num_bytes: int) -> None:
        """Reserves memory for decoded or fetched images of a request. Raises LimitError 503."""
        memory = state_of(scope).body_memory or self._new_body_memory(scope)
        memory.add_images(num_bytes)

    def _new_body_memory(self, scope: Scope) -> BodyMemory:
        client = client_of(scope)
        memory = BodyMemory(self, Reservation(self.bodies, client), Reservation(self._dense_values, client))
        state_of(scope).body_memory = memory
        return memory

    def reserve_fetches(self, scope: Scope, num_images: int) -> None:
        """Reserves the right to fetch images at once, until `release`. Raises EngineOverloadedError."""
        fetches = state_of(scope).fetches = Reservation(self.fetches, client_of(scope))
        if (rejection := fetches.resize(num_images)) is not None:
            raise EngineOverloadedError(
                f"{rejection.message} Please try again later, or send images as data URIs.",
                retry_after_s=_RETRY_AFTER_S,
                reason=rejection.reason,
            )

    def release_fetches(self, scope: Scope) -> None:
        """Releases the reservation of `reserve_fetches`."""
        state = state_of(scope)
        if state.fetches is not None:
            state.fetches.release()
            state.fetches = None

    def reserve_response(self, scope: Scope, size: ResponseSize, *, param: str, remedy: str) -> None:
        """Reserves memory for the response to a request, or for a further part of it.

        Args:
            scope: Scope of the request.
            size: Estimated size of the response.
            param: The request field that determines the size.
            remedy: Advice for the client, a sentence of the error message.

        Raises:
            InvalidRequestError: The response would exceed MAX_RESPONSE_BYTES.
            EngineOverloadedError: The memory is full, or other responses of the client use its whole share.
        """
        state = state_of(scope)
        state.response_size = total = size if state.response_size is None else size.plus(state.response_size)
        if total.json_bytes > MAX_RESPONSE_BYTES:
            raise InvalidRequestError(
                f"The response would have about {total.json_bytes} bytes; the limit is {MAX_RESPONSE_BYTES}. {remedy}",
                param=param,
            )
        if total.json_bytes <= _SMALL_RESPONSE_BYTES:
            return
        if state.response_memory is None:
            state.response_memory = Reservation(self.responses, client_of(scope))
        if (rejection := state.response_memory.resize(total.memory_bytes)) is not None:
            raise EngineOverloadedError(
                f"{rejection.message} Please try again later. {remedy}",
                retry_after_s=_RETRY_AFTER_S,
                reason=rejection.reason,
            )

    def release(self, scope: Scope) -> None:
        """Releases the memory reservations of a request for its body and its response."""
        state = state_of(scope)
        for reservation in (state.body_memory, state.response_memory, state.fetches):
            if reservation is not None:
                reservation.release()
        state.body_memory = state.response_memory = state.fetches = None


def _shared_memory(num_bytes: int, name: str, flag: str, *, full: str, share: str) -> SharedResource:
    return SharedResource(max(num_bytes, 1), name, "bytes", flag, full=full, share=share, max_share=_CLIENT_SHARE)


class BodyMemory:
    """Memory reservation of one body and its values until the response has been sent."""

    def __init__(self, admission: AdmissionController, bodies: Reservation, dense_values: Reservation) -> None:
        self._admission = admission
        self._body = bodies
        self._dense_values = dense_values
        self._num_bytes = 0

    def add_bytes(self, num_bytes: int) -> None:
        """Counts received bytes. Raises LimitError 413 or 503."""
        self._num_bytes += num_bytes
        self._admission.check_body_bytes(self._num_bytes)
        _reserve(self._body, num_bytes)

    def add_values(self, num_values: int) -> None:
        """Reserves memory for the values of the body before it is parsed. Raises LimitError 503."""
        num_bytes = VALUE_BYTES * num_values
        _reserve(self._body, num_bytes)
        _reserve(self._dense_values, max(num_bytes - VALUE_BYTES * self._num_bytes, 0))

    def add_images(self, num_bytes: int) -> None:
        """Reserves memory for decoded or fetched images. Raises LimitError 503."""
        _reserve(self._body, num_bytes)

    def release(self) -> None:
        """Releases all memory."""
        self._body.release()
        self._dense_values.release()


def _reserve(memory: Reservation, num_more: int) -> None:
    """Reserves more memory for a body. Raises LimitError 503 if there is none."""
    if (rejection := memory.resize(memory.amount + num_more)) is not None:
        message = f"{rejection.message} Please try again later, and send large requests one after the other."
        raise LimitError(503, message, rejection.reason, {"connection": "close", "retry-after": "1"})
