"""The head of a request: path, request id, deadline and priority, and the check of content type and origin."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable
from typing import Final
from urllib.parse import quote as percent_encoded

from fastapi import HTTPException

from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.tasks import PriorityLevel

from ..errors import quote

MAX_PRIORITY: Final = 999
"""Cohere's maximum. One level counts like one second of waiting, so larger values would mean 'never' or 'now'."""
_LEVELS: Final = {level.name.lower(): level for level in PriorityLevel}
PRIORITY_NAMES: Final = ", ".join(_LEVELS)
"""Names of levels for the header, highest priority first."""
PRIORITY_PATTERN: Final = f"^(-?[0-9]{{1,{len(str(MAX_PRIORITY))}}}|{PRIORITY_NAMES.replace(', ', '|')})$"
TIMEOUT_PATTERN: Final = r"^([1-9][0-9]{0,14}(\.[0-9]{1,20})?|0\.[0-9]{0,19}[1-9][0-9]{0,19})$"
"""The format of the headers: numbers as in JSON, without the underscores that Python accepts."""
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_DOUBLED_VERSION: Final = re.compile(r"^/v[12](?=/v[12]/)")
_TIMEOUT: Final = b"x-request-timeout"
_PRIORITY: Final = b"x-priority"


def timeout_and_priority(headers: Iterable[tuple[bytes, bytes]]) -> tuple[float | None, int]:
    """Returns the values of the headers `x-request-timeout` in seconds (None without it) and `x-priority`.

    Raises:
        InvalidRequestError: x-request-timeout is not a positive number, or x-priority is neither an integer nor a
            level.
    """
    timeout_s = None
    priority = int(PriorityLevel.NORMAL)
    for name, value in headers:
        if name == _TIMEOUT:
            timeout_s = _seconds(value.decode("latin-1").strip())
        elif name == _PRIORITY:
            priority = _level(value.decode("latin-1").strip())
    return timeout_s, priority


def _seconds(text: str) -> float:
    if not re.fullmatch(TIMEOUT_PATTERN, text):
        raise InvalidRequestError(
            f"The header x-request-timeout is {text[:40]!r}; it must be seconds above 0 as a decimal number without an "
            "exponent, such as 2.5.",
            param="x-request-timeout",
        )
    return float(text)


def _level(text: str) -> int:
    if not re.fullmatch(PRIORITY_PATTERN, text):
        raise InvalidRequestError(
            f"The header x-priority is {text[:40]!r}; it must be a whole number from -{MAX_PRIORITY} to "
            f"{MAX_PRIORITY} (lower runs first), or {PRIORITY_NAMES}.",
            param="x-priority",
        )
    return _LEVELS[text] if text in _LEVELS else int(text)


class RequestIdGenerator:
    """Creates request ids: 32 random hexadecimal digits, without a system call for each."""

    def __init__(self) -> None:
        self._random = random.Random()  # noqa: S311 - an id is not secret, and uuid4 makes a system call for each id

    def of(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Returns the client's x-request-id, or a new one."""
        client_id = b""
        for name, value in headers:
            if name == b"x-request-id":
                client_id = value
                break
        return client_id if _REQUEST_ID.fullmatch(client_id) else b"%032x" % self._random.getrandbits(128)


def canonical_path(path: str, root_path: str = "") -> str:
    """Returns the path of a request without `root_path`, or the path that it is an alias of.

    `root_path` is removed if it is there: some proxies remove it and others forward it.
    A trailing slash is removed. `/v1/v2/rerank` becomes `/v2/rerank`: a Cohere client requests it if its base URL ends
    in /v1. Unprintable characters are quoted again: the router ignores a trailing newline in a path, but key checks
    and route tables do not.
    """
    if not path.isprintable():
        path = percent_encoded(path)
    if len(path) > 1 and path.endswith("/"):
        path = path.rstrip("/") or "/"
    if root_path and (path == root_path or path.startswith(f"{root_path}/")):
        path = path[len(root_path) :] or "/"
    return _DOUBLED_VERSION.sub("", path) if path.startswith(("/v1/v", "/v2/v")) else path


def check_content_type(
    content_type: str, headers: Iterable[tuple[bytes, bytes]], origins: Collection[str] = (), *, accepts_any: bool
) -> None:
    """Checks that the content type allows to read a body as JSON.

    Browsers send requests with some other types, or without a type, to any server without a CORS preflight. A web page
    of another origin must therefore send application/json, which needs a preflight, unless its origin is allowed.

    Args:
        content_type: Content-Type of the body; "" if there is none.
        headers: Headers of the request.
        origins: Allowed origins of web pages; "*" allows all.
        accepts_any: Whether other types are accepted.

    Raises:
        HTTPException: 415 for a type that is not allowed.
    """
    media = content_type.partition(";")[0].strip().lower()
    if media == "application/json" or (media.startswith("application/") and media.endswith("+json")):
        return
    problem = f"Content-Type is {quote(media)}" if media else "The request has no Content-Type"
    if is_from_other_origin(headers, origins):
        raise HTTPException(415, f"{problem}; a web page of another origin must send application/json.")
    if media and not accepts_any:
        raise HTTPException(415, f"{problem}; send application/json (curl -H 'Content-Type: application/json').")


def is_from_other_origin(headers: Iterable[tuple[bytes, bytes]], allowed: Collection[str]) -> bool:
    """Returns whether a browser sent the request for a web page of an origin that is not allowed.

    Sec-Fetch-Site has precedence if present, because a proxy may have changed Host. Otherwise Origin is compared with
    Host, without the scheme: behind a TLS proxy the server sees http although its pages use https.
    """
    host = b""
    origins: list[bytes] = []
    sites: list[bytes] = []
    for name, value in headers:
        if name == b"host":
            host = value.strip().lower()
        elif name == b"origin":
            origins.append(value.strip())
        elif name == b"sec-fetch-site":
            sites.append(value.strip().lower())
    if origins and ("*" in allowed or all(origin.decode("latin-1") in allowed for origin in origins)):
        return False
    if sites:
        return any(site not in (b"same-origin", b"none") for site in sites)
    return any(origin.lower().partition(b"://")[2] != host for origin in origins)
