"""Who may ask for data: requests that carry an API key. Off without keys; then any Authorization header is ignored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors.handlers import refusal
from .api_keys import ApiKeys

# Clients probe these without a key (mteb never authenticates GET /v1/models).
OPEN_PATHS: Final = frozenset(
    {
        *("/health", "/health/live", "/health/ready", "/ping", "/metrics", "/version", "/info"),
        *("/models", "/v1/models", "/docs", "/redoc", "/openapi.json"),
    }
)
OPEN_PREFIXES: Final = ("/v1/models/", "/models/", "/docs/")


class AuthMiddleware:
    """Lets a request through that carries one of the keys as `Bearer KEY`, as `KEY`, or as `api-key: KEY`.

    It leaves the identity of the client in scope["api_client"].
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401 to requests for data without a key."""
        if scope["type"] != "http" or is_open(scope["method"], scope["path"]):
            await self.app(scope, receive, send)
            return
        client = self.keys.client_of(offered_keys(scope["headers"]))
        if client is not None:
            scope["api_client"] = client
            await self.app(scope, receive, send)
            return
        message = "The API key is missing or wrong; send it as the header 'Authorization: Bearer KEY'."
        response = refusal(scope["path"], 401, message, {"www-authenticate": "Bearer"})
        await response(scope, receive, send)


def is_open(method: str, path: str) -> bool:
    """True for what needs no key: the paths above, and the root path unless something is posted to it."""
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIXES) or (path == "/" and method in ("GET", "HEAD"))


def offered_keys(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """Yields what may be a key."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            yield rest.strip() if scheme.lower() == b"bearer" else value.strip()
        elif name == b"api-key":
            yield value.strip()
