"""Admits requests before the engine is called: the sizes of bodies and the memory of bodies and responses.

The engine refuses requests while its queue is full (engine/client/admission.py); server/batches has the limits of files
and batches. docs/limits.md lists all limits.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

from fastapi import HTTPException
from starlette.types import Scope

from penstock.engine.protocol.errors import (
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
    RefusalReason,
)
from penstock.engine.protocol.shared_resource import SharedResource, Shortage

from .settings import ServerSettings

REFUSED_BY: Final = "penstock.refused_by"
"""The key of a request's scope that holds the limit which refused it, for the metrics."""
BODY_MEMORY: Final = "penstock.body_memory"
"""The key of a request's scope that holds its BodyMemory, if its body is larger than SMALL_BODY_BYTES."""
SMALL_BODY_BYTES: Final = 4_096
"""Bodies up to this size are not counted: the connections are bounded, and counting would cost every small request."""
VALUE_BYTES: Final = 8
"""Bytes of memory that are reserved for each JSON value, by its weight."""
MAX_RESPONSE_BYTES: Final = 256 * 1024 * 1024
"""JSON of one response: about 22 million numbers."""
LARGE_RESPONSE_BYTES: Final = 6_000_000
"""JSON from which on a response is sent in parts: half a million numbers, which take 50 ms to write at once."""
_SMALL_RESPONSE_BYTES: Final = 1024 * 1024
"""Responses up to this size are not counted: the connections are bounded."""
_BODIES_IN_MEMORY: Final = 32
"""Bodies of the largest size that the memory of bodies holds."""
_DENSE_VALUE_BYTES: Final = 64 * 1024 * 1024
"""Bytes that the values of all bodies may take beyond VALUE_BYTES for each byte: small bodies may be dense, too."""
_CLIENT_SHARE: Final = 0.5
"""Part of each memory that one client may hold: a client that sends or reads slowly leaves the rest to others."""
_RETRY_AFTER_S: Final = 2.0
_TRY_AGAIN: Final = {"connection": "close", "retry-after": "1"}
_RESPONSE_SIZE: Final = "penstock.response_size"
_RESPONSE_BYTES: Final = "penstock.response_bytes"


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


def note_refusal(scope: Scope, error: Exception) -> None:
    """Notes the limit behind an error, if there is one, in the scope of the request, for the metrics."""
    if isinstance(error, LimitError | EngineOverloadedError | EngineUnavailableError):
        scope[REFUSED_BY] = error.reason


def client_of(scope: Scope) -> str:
    """Returns the client of a request, for limits on the memory of one client: the API key, else the address.

    With a single key the address counts, as it does without keys. "" where neither is known.
    """
    key: str = scope.get("api_client", "")
    if key:
        return key
    address = scope.get("client")
    return "" if address is None else str(address[0])


class AnswerSize(NamedTuple):
    """About how large a response is, or a part of one.

    Attributes:
        written: Bytes of its JSON.
        kept: Bytes of the values that it is written from.
    """

    written: int
    kept: int

    @property
    def is_large(self) -> bool:
        """Whether it is written a part at a time while the client reads it."""
        return self.written >= LARGE_RESPONSE_BYTES

    @property
    def held(self) -> int:
        """Bytes that it holds until the client has read it: its values or, of a small one, its JSON."""
        return self.kept if self.is_large else self.written

    def plus(self, other: AnswerSize) -> AnswerSize:
        """Returns the size of both."""
        return AnswerSize(self.written + other.written, self.kept + other.kept)


class AdmissionController:
    """Admits the bodies and the responses of one HTTP process. Belongs to one event loop.

    Args:
        settings: Limits of the server.
        num_processes: HTTP processes of the server; each enforces its part of the limits on memory.

    Attributes:
        max_body_bytes: Bytes of one body.
        max_json_values: Values of one body; see json_reader.py.
        responses: Bytes that responses hold.
    """

    def __init__(self, settings: ServerSettings, num_processes: int = 1) -> None:
        self.max_body_bytes = settings.max_body_bytes
        self.max_json_values = settings.max_json_values
        memory = max(_BODIES_IN_MEMORY * settings.max_body_bytes // num_processes, 1)
        self._bodies = SharedResource(memory, max_share=_CLIENT_SHARE)
        self._dense_values = SharedResource(_DENSE_VALUE_BYTES // num_processes, max_share=_CLIENT_SHARE)
        self.responses = SharedResource(max(settings.answer_memory // num_processes, 1), max_share=_CLIENT_SHARE)

    def check_body_bytes(self, num_bytes: int) -> None:
        """Raises LimitError 413 for a body that is too large."""
        if num_bytes > self.max_body_bytes:
            raise LimitError(
                413,
                f"The body is larger than this server takes ({self.max_body_bytes} bytes, --max-body-bytes); send "
                "fewer inputs at once.",
                ServerRefusalReason.BODY_BYTES,
                {"connection": "close"},
            )

    def check_json_values(self, num_values: int) -> None:
        """Raises LimitError 413 for a body that holds too many values."""
        if num_values > self.max_json_values:
            raise LimitError(
                413,
                f"The body holds more than {self.max_json_values} values, of which a text, list, object or key counts "
                "as 8; send fewer inputs at once, or start the server with a larger --max-json-values.",
                ServerRefusalReason.JSON_VALUES,
            )

    def body_memory(self, scope: Scope) -> BodyMemory:
        """Returns the memory of the body of a request."""
        return BodyMemory(self, client_of(scope), self._bodies, self._dense_values)

    def hold_response(self, scope: Scope, size: AnswerSize, *, param: str, way_out: str) -> None:
        """Reserves memory for the response to a request, or for a further part of it.

        Args:
            scope: Of the request.
            size: About how large the response will be.
            param: The request field that makes it large.
            way_out: What the client can change.

        Raises:
            InvalidRequestError: It would be larger than any response may be.
            EngineOverloadedError: The memory is full, or the other responses of the client hold its share.
        """
        before = scope.get(_RESPONSE_SIZE)
        scope[_RESPONSE_SIZE] = total = size if before is None else size.plus(before)
        if total.written > MAX_RESPONSE_BYTES:
            raise InvalidRequestError(
                f"The answer would have about {total.written} bytes; the limit is {MAX_RESPONSE_BYTES}. {way_out}",
                param=param,
            )
        if total.written <= _SMALL_RESPONSE_BYTES:
            return
        client, held, memory = client_of(scope), scope.get(_RESPONSE_BYTES, 0), self.responses
        shortage = memory.shortage(client, total.held, held)
        if shortage is Shortage.FULL:
            raise EngineOverloadedError(
                f"The response memory is full: other responses hold {memory.used - held} bytes, the limit is "
                f"{memory.limit} (--answer-memory), and this one takes {total.held}. Please try again later. {way_out}",
                retry_after_s=_RETRY_AFTER_S,
                reason=ServerRefusalReason.RESPONSE_MEMORY,
            )
        if shortage is Shortage.CLIENT_SHARE:
            raise EngineOverloadedError(
                f"Your other responses hold {memory.used_by(client) - held} bytes, and this one takes {total.held}; "
                f"one client may hold {memory.limit // 2} bytes, half of --answer-memory. Read them, then try again. "
                f"{way_out}",
                retry_after_s=_RETRY_AFTER_S,
                reason=ServerRefusalReason.RESPONSE_MEMORY_SHARE,
            )
        scope[_RESPONSE_BYTES] = total.held
        memory.add(client, total.held - held)

    def release_response(self, scope: Scope) -> None:
        """Releases the memory that the response to a request holds, if any."""
        if held := scope.pop(_RESPONSE_BYTES, 0):
            self.responses.add(client_of(scope), -held)


def has_large_response(scope: Scope) -> bool:
    """Returns whether the response to a request is written a part at a time."""
    size: AnswerSize | None = scope.get(_RESPONSE_SIZE)
    return size is not None and size.is_large


class BodyMemory:
    """Memory that one body and its values hold until the response has been sent. Made by AdmissionController."""

    def __init__(
        self, admission: AdmissionController, client: str, bodies: SharedResource, dense_values: SharedResource
    ) -> None:
        self._admission = admission
        self._client = client
        self._bodies = bodies
        self._dense_values = dense_values
        self._num_bytes = self._num_held = self._num_dense = 0

    def add_bytes(self, num_bytes: int) -> None:
        """Counts bytes that have arrived. Raises LimitError 413 or 503."""
        self._num_bytes += num_bytes
        self._admission.check_body_bytes(self._num_bytes)
        self._num_held = self._hold(self._bodies, self._num_held, num_bytes)

    def add_values(self, num_values: int) -> None:
        """Reserves memory for the values of the body before it is parsed. Raises LimitError 503."""
        num_bytes = VALUE_BYTES * num_values
        self._num_held = self._hold(self._bodies, self._num_held, num_bytes)
        num_dense = max(num_bytes - VALUE_BYTES * self._num_bytes, 0)
        self._num_dense = self._hold(self._dense_values, self._num_dense, num_dense)

    def release(self) -> None:
        """Releases all memory."""
        self._bodies.add(self._client, -self._num_held)
        self._dense_values.add(self._client, -self._num_dense)

    def _hold(self, memory: SharedResource, held: int, num_more: int) -> int:
        shortage = memory.shortage(self._client, held + num_more, held)
        if shortage is Shortage.FULL:
            message = "The bodies of other requests fill the server's memory. Please try again later."
            raise LimitError(503, message, ServerRefusalReason.BODY_MEMORY, _TRY_AGAIN)
        if shortage is Shortage.CLIENT_SHARE:
            message = (
                f"The bodies of your requests hold {memory.used_by(self._client)} bytes of the server's memory for "
                f"bodies; one client may hold {memory.limit // 2}, half of it. Send large requests one after the other."
            )
            raise LimitError(503, message, ServerRefusalReason.BODY_MEMORY_SHARE, _TRY_AGAIN)
        memory.add(self._client, num_more)
        return held + num_more
