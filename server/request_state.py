"""The state of one HTTP request, which the layers of the server share. Stored in the ASGI scope.

Each field names the layer that sets it. `state_of` returns the state of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from starlette.types import Scope

from penstock.engine.protocol.shared_resource import Reservation
from penstock.engine.protocol.tasks import ChunkPriority

if TYPE_CHECKING:
    from .admission import BodyMemory
    from .dialects import Dialect
    from .models.model_entry import ModelEntry
    from .response_size import ResponseSize
    from .routing import Access

_KEY: Final = "penstock"


@dataclass(slots=True, eq=False)
class RequestState:
    """The state of one HTTP request, from its head to the end of its response.

    Attributes:
        connection_lost: Connection: done when the connection has ended; None behind another ASGI server.
        discard_body: Connection: frees the received bytes of the body and discards later ones; None behind another
            ASGI server.
        slow_body: ConnectionLimits: the error message for a slow body. The next read of the body raises the error.
        request_id: RequestMiddleware: the client's x-request-id or a new one. The body may replace it.
        dialect: RouteTable: the dialect of the route. Keys of the body may replace it; see `dialect_of`.
        access: RouteTable: the key that the route needs.
        client: AuthMiddleware: the client in fair queueing; "" if clients are not distinguished.
        owner: AuthMiddleware: the owner of files and batches; "" without API keys.
        namespace: AuthMiddleware: only cached vectors and prefixes of this namespace may be used; "" without API keys.
        key_id: AuthMiddleware: id of the API key in the access log.
        timeout_s: JsonDispatcher: seconds until the deadline of the header; None if there is none.
        priority: JsonDispatcher: a ChunkPriority or another level from the header. Lower levels run first.
        is_batch_line: InternalClient: the request is a line of a batch, a request of the server itself. Its body is
            already in memory and is not counted again, it does not count as traffic of clients, and no recently used
            model is unloaded for it.
        ignored_fields: JsonReader: unknown fields of the body that the server ignored.
        models: ModelTable: the models that the request uses, until ModelTable.release.
        body_memory: AdmissionController: memory of the body.
        fetches: AdmissionController: the right to fetch images.
        response_size: AdmissionController: estimated size of the response.
        response_memory: AdmissionController: memory of a large response.
        rejected_by: Error handlers: the limit that rejected the request, for the metrics.
    """

    connection_lost: asyncio.Future[None] | None = None
    discard_body: Callable[[], None] | None = None
    slow_body: str | None = None
    request_id: str = ""
    dialect: Dialect | None = None
    access: Access | None = None
    client: str = ""
    owner: str = ""
    namespace: str = ""
    key_id: str | None = None
    timeout_s: float | None = None
    priority: int = ChunkPriority.NORMAL
    is_batch_line: bool = False
    ignored_fields: Sequence[str] = ()
    models: list[ModelEntry] = field(default_factory=list)
    body_memory: BodyMemory | None = None
    fetches: Reservation | None = None
    response_size: ResponseSize | None = None
    response_memory: Reservation | None = None
    rejected_by: str | None = None


def state_of(scope: Scope) -> RequestState:
    """Returns the state of a request. The first call for a scope creates it."""
    state: RequestState | None = scope.get(_KEY)
    if state is None:
        state = scope[_KEY] = RequestState()
    return state
