"""The state of one HTTP request, which the layers of the server share. Stored in the ASGI scope.

`state_of` returns the state of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from starlette.types import Scope

from penstock.engine.protocol.shared_resource import Reservation
from penstock.engine.protocol.tasks import PriorityLevel

if TYPE_CHECKING:
    from .admission import BodyMemory
    from .dialects import Dialect
    from .http.connection import ConnectionState
    from .models.model_entry import ModelEntry
    from .observability.request_record import RequestRecord
    from .response_size import ResponseSize
    from .routing import Access

_KEY: Final = "penstock"


@dataclass(slots=True, eq=False)
class RequestState:
    """The state of one HTTP request, from its head to the end of its response.

    The fields are grouped by the layer that sets them.

    Attributes:
        connections: The state of all connections of the server; None behind another ASGI server. RequestMiddleware
            reads from it whether the server ends.
        connection_lost: Done when the connection has ended; None behind another ASGI server. Read by DisconnectMonitor.
        discard_body: Frees the received bytes of the body and discards later ones; None behind another ASGI server.
            Called by RequestMiddleware before a rejection waits.
        slow_body: The error message for a slow body, set by ConnectionLimits. JsonReader raises the error at the next
            read of the body.
        request_id: The client's x-request-id or a new one. `request_id` in the body replaces it. Read by responses and
            logs.
        record: The record for metrics, traces and logs, until the end of the response. ModelTable and ModelCall add the
            model and the usage; deadlines are counted from its start. None in an application without this middleware.
        dialect: The dialect of the route. Keys of the body may replace it; see `dialect_of`.
        access: The key that the route needs. Read by AuthMiddleware.
        client: The client in fair queueing and in memory limits; "" if clients are not distinguished.
        owner: The owner of files and batches; "" without API keys.
        namespace: Only cached vectors and prefixes of this namespace may be used; "" without API keys. Read by
            ModelCall.
        key_id: Id of the API key in the access log.
        is_batch_line: The request is a line of a batch, a request of the server itself. Its body is already in memory
            and is not counted again, it does not count as traffic of clients, and no recently used model is unloaded
            for it.
        timeout_s: Seconds until the deadline of the header; None if there is none. Read by ServerContext.deadline.
        priority: A PriorityLevel or another level from the header. Lower levels run first. Read by ModelCall.options.
        ignored_fields: Unknown fields of the body that the server ignored. Read by the header of the response and logs.
        models: The models that the request uses, until ModelTable.release.
        body_memory: Memory of the body.
        fetches: The right to fetch images.
        response_size: Estimated size of the response. A large one is sent in parts.
        response_memory: Memory of a large response.
        rejected_by: The limit that rejected the request, for the metrics.
    """

    # Connection and ConnectionLimits
    connections: ConnectionState | None = None
    connection_lost: asyncio.Future[None] | None = None
    discard_body: Callable[[], None] | None = None
    slow_body: str | None = None
    # RequestMiddleware, or InternalClient for lines of batches
    request_id: str = ""
    record: RequestRecord | None = None
    # RouteTable.match
    dialect: Dialect | None = None
    access: Access | None = None
    # AuthMiddleware, or InternalClient for lines of batches
    client: str = ""
    owner: str = ""
    namespace: str = ""
    key_id: str | None = None
    is_batch_line: bool = False
    # JsonDispatcher
    timeout_s: float | None = None
    priority: int = PriorityLevel.NORMAL
    # BodyParser
    ignored_fields: Sequence[str] = ()
    # ModelTable
    models: list[ModelEntry] = field(default_factory=list)
    # AdmissionController
    body_memory: BodyMemory | None = None
    fetches: Reservation | None = None
    response_size: ResponseSize | None = None
    response_memory: Reservation | None = None
    # Error handlers
    rejected_by: str | None = None


def state_of(scope: Scope) -> RequestState:
    """Returns the state of a request. The first call for a scope creates it."""
    state: RequestState | None = scope.get(_KEY)
    if state is None:
        state = scope[_KEY] = RequestState()
    return state
