"""The head of a request: its path, its id, and its deadline and priority."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from starlette.types import Scope

from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.tasks import ChunkPriority

MAX_PRIORITY: Final = 999
"""Cohere's largest; a level is worth a second of waiting, so that more would mean nothing but 'never' or 'now'."""
_LEVELS: Final = {level.name.lower(): level for level in ChunkPriority}
PRIORITY_NAMES: Final = ", ".join(_LEVELS)
"""Levels that the header may call by name, the first to go first."""
PRIORITY_PATTERN: Final = f"^(-?[0-9]{{1,{len(str(MAX_PRIORITY))}}}|{PRIORITY_NAMES.replace(', ', '|')})$"
TIMEOUT_PATTERN: Final = r"^([1-9][0-9]{0,14}(\.[0-9]{1,20})?|0\.[0-9]{0,19}[1-9][0-9]{0,19})$"
"""The format of the headers: numbers as in JSON, without the underscores that Python accepts."""
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_DOUBLED_VERSION: Final = re.compile(r"^/v[12](?=/v[12]/)")
_TIMEOUT: Final = b"x-request-timeout"
_PRIORITY: Final = b"x-priority"


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Deadline, priority and client of a request.

    Attributes:
        timeout_s: Seconds until its deadline; None: the request sets none.
        priority: A ChunkPriority or another level; lower goes first.
        client: The client in fair queueing; "" where clients are not told apart.
        namespace: Cached vectors and prefixes of this namespace alone may be used; "" without API keys.
    """

    timeout_s: float | None = None
    priority: int = ChunkPriority.NORMAL
    client: str = ""
    namespace: str = ""


LIMITS: Final = "penstock.limits"
"""The key of a request's scope that holds its RequestLimits, if it runs a model."""


def limits_of(scope: Scope) -> RequestLimits:
    """Returns the limits in the headers of a request: `x-request-timeout` in seconds, and `x-priority`.

    Raises:
        InvalidRequestError: A header holds neither such a number nor, of a priority, its name.
    """
    timeout_s, priority = None, int(ChunkPriority.NORMAL)
    for name, value in scope["headers"]:
        if name == _TIMEOUT:
            timeout_s = _seconds(value.decode("latin-1").strip())
        elif name == _PRIORITY:
            priority = _level(value.decode("latin-1").strip())
    return RequestLimits(timeout_s, priority, scope.get("api_client", ""), scope.get("api_namespace", ""))


def _seconds(text: str) -> float:
    if not re.fullmatch(TIMEOUT_PATTERN, text):
        raise InvalidRequestError(
            f"The header x-request-timeout is {text[:40]!r}; it must be seconds above 0, such as 2.5.",
            param="x-request-timeout",
        )
    return float(text)


def _level(text: str) -> int:
    if not re.fullmatch(PRIORITY_PATTERN, text):
        raise InvalidRequestError(
            f"The header x-priority is {text[:40]!r}; it must be a whole number from -{MAX_PRIORITY} to "
            f"{MAX_PRIORITY}, of which the lower goes first, or {PRIORITY_NAMES}.",
            param="x-priority",
        )
    return _LEVELS[text] if text in _LEVELS else int(text)


class RequestIds:
    """Makes the ids of requests."""

    def __init__(self) -> None:
        self._random = random.Random()  # noqa: S311 - an id is no secret, and uuid4 asks the kernel each time

    def of(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Returns the client's x-request-id, or a new one."""
        given = b""
        for name, value in headers:
            if name == b"x-request-id":
                given = value
                break
        return given if _REQUEST_ID.fullmatch(given) else b"%032x" % self._random.getrandbits(128)


def canonical_path(path: str) -> str:
    """Returns the path that `path` is an alias of, or `path`.

    A trailing slash is dropped, and `/v1/v2/rerank`, which a Cohere client makes of a base URL that ends in /v1, is
    `/v2/rerank`. Unprintable characters are quoted again: the router takes a path with a line end behind it for the
    path itself, which keys and tables do not.
    """
    if not path.isprintable():
        path = quote(path)
    if len(path) > 1 and path.endswith("/"):
        path = path.rstrip("/") or "/"
    return _DOUBLED_VERSION.sub("", path) if path.startswith(("/v1/v", "/v2/v")) else path
