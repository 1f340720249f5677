"""API keys. Off without keys; then any Authorization header is ignored."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import status_response

# Clients probe these without a key (mteb never authenticates GET /v1/models).
OPEN_PATHS: Final = frozenset(
    {
        *("/health", "/health/live", "/health/ready", "/ping", "/metrics", "/version", "/info"),
        *("/models", "/v1/models", "/docs", "/openapi.json"),
    }
)
OPEN_PREFIXES: Final = ("/v1/models/", "/models/", "/docs/")


class AuthMiddleware:
    """Lets a request through that carries one of the keys as `Bearer KEY`, as `KEY`, or as `api-key: KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self.keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401 to requests for data without a key."""
        if scope["type"] != "http" or is_open(scope["path"]) or self._is_allowed(scope["headers"]):
            await self.app(scope, receive, send)
            return
        message = "The API key is missing or wrong; send it as the header 'Authorization: Bearer KEY'."
        response = status_response(401, message, {"www-authenticate": "Bearer"})
        await response(scope, receive, send)

    def _is_allowed(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        offered = []
        for name, value in headers:
            if name == b"authorization":
                scheme, _, rest = value.strip().partition(b" ")
                offered.append(rest.strip() if scheme.lower() == b"bearer" else value.strip())
            elif name == b"api-key":
                offered.append(value.strip())
        # NOTE: every key is compared with every offer, so that the time does not tell which one matched.
        return sum(hmac.compare_digest(key, offer) for key in self.keys for offer in offered) > 0


def is_open(path: str) -> bool:
    """True for paths that need no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIXES)
