"""Reads JSON bodies and refuses those with too many values.

A few megabytes of `[],[],...` would take a hundred times as much memory as Python objects. So the values of a body that
is large or dense are counted before it is parsed, slice by slice, so that the event loop serves other requests. Then
one `orjson.loads` parses it, which takes about 2.5 ms for each MiB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

import orjson
from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from starlette.types import Receive, Scope

from ..admission import SMALL_BODY_BYTES, AdmissionController, LimitError, ServerRefusalReason
from ..errors import shown
from .connection import SLOW_BODY

WEIGHT: Final = 8
"""Values that a text, a list, an object or a key counts as: it takes more memory and time than a number."""
SLICE_BYTES: Final = 128 * 1024
"""Bytes that are counted before other requests are served."""
_MOST_PER_BYTE: Final = 3
"""Values that one byte of valid JSON counts as at most: each byte of `"",` counts as three."""


class JsonReader:
    """Reads the bodies of one application. Belongs to one event loop.

    Args:
        admission: Limits the values of a body: numbers and words count as one, a text, a list, an object or a key as
            WEIGHT.
        max_entries: Entries of a list, unless it is a list of numbers.
    """

    def __init__(self, admission: AdmissionController, max_entries: int) -> None:
        self._admission = admission
        self._max_entries = max_entries
        self._uncounted_bytes = min(SMALL_BODY_BYTES, admission.max_json_values // _MOST_PER_BYTE)

    async def read(self, scope: Scope, receive: Receive) -> Any:
        """Returns the value of a body.

        A body of more than SMALL_BODY_BYTES holds memory until AdmissionController.release.

        Args:
            scope: Of the request.
            receive: ASGI messages of the body.

        Raises:
            RequestValidationError: There is no body, or it is not valid JSON.
            HTTPException: 408, the body comes too slowly; 413 or 503, see AdmissionController; 400, the client has
                disconnected.
        """
        memory = self._admission.body_memory(scope)
        body: bytes | bytearray = b""
        has_more = True
        while has_more:
            part, has_more = await receive_part(scope, receive)
            if memory is not None:
                memory.add_bytes(len(part))
            if not body:
                body = part
            elif isinstance(body, bytearray):
                body += part
            else:  # a large body grows in place: joining its parts would take long
                body = bytearray(body)
                body += part
        if not body:
            detail = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
            raise RequestValidationError([detail])
        if len(body) > self._uncounted_bytes and self._must_count(body):
            num_values = 0
            for num_values in count_values(body):
                self._admission.check_json_values(num_values)
                await asyncio.sleep(0)
            if memory is not None:
                memory.add_values(num_values)
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            context = {"error": error.msg}
            invalid = {"type": "json_invalid", "loc": ("body", error.pos), "input": {}, "ctx": context}
            raise RequestValidationError([invalid]) from error

    def check_entries(self, body: Any, tag: str) -> None:
        """Counts the entries of the lists of a parsed body before they are validated.

        A flat list of numbers is the token ids of one input and may be longer.

        Args:
            body: A JSON value.
            tag: Of its dialect.

        Raises:
            RequestValidationError: A list has too many.
        """
        if not isinstance(body, dict):
            return
        for name, value in body.items():
            if isinstance(value, list):
                self._check_list(value, ("body", tag, name))
            elif isinstance(value, dict):
                for inner, entry in value.items():
                    if isinstance(entry, list):
                        self._check_list(entry, ("body", tag, name, inner))

    def _check_list(self, entries: list[Any], place: tuple[str, ...]) -> None:
        if len(entries) > self._max_entries and type(entries[0]) not in (int, float):
            message = f"has {len(entries)} entries; the limit is {self._max_entries}"
            raise RequestValidationError([{"type": "value_error", "loc": place, "msg": message, "input": None}])

    def _must_count(self, body: bytes | bytearray) -> bool:
        """Returns whether a body may hold more values than are allowed, or more than its bytes account for."""
        if len(body) > SLICE_BYTES:
            return True
        most = WEIGHT * (body.count(b"[") + body.count(b"{") + body.count(b'"') // 2) + body.count(b",")
        return most > min(len(body), self._admission.max_json_values)


def count_values(text: bytes | bytearray, slice_bytes: int = SLICE_BYTES) -> Iterator[int]:
    """Yields after each slice how many values the text holds so far, by WEIGHT.

    Brackets, commas and colons inside strings do not count. The count is exact for valid JSON.

    Args:
        text: JSON in UTF-8.
        slice_bytes: Bytes of a slice, 2 at least.
    """
    num_values = start = 0
    is_inside = False  # a string, at the start of the slice
    while start < len(text):
        part = text[start : start + slice_bytes]
        if (len(part) - len(part.rstrip(b"\\"))) % 2 and start + len(part) < len(text):
            part = part[:-1]  # an escape is not cut
        start += len(part)
        runs = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(runs[is_inside::2])
        num_quotes = len(runs) - 1
        num_values += outside.count(b",") + outside.count(b":")
        num_values += WEIGHT * (outside.count(b"[") + outside.count(b"{")) + WEIGHT * num_quotes // 2
        is_inside ^= bool(num_quotes % 2)
        yield num_values


async def receive_part(scope: Scope, receive: Receive) -> tuple[bytes, bool]:
    """Returns the next part of a body, and whether more parts follow.

    Raises HTTPException: 408, ConnectionLimits found the body too slow; 400, the client has disconnected.
    """
    message = await receive()
    if SLOW_BODY in scope:
        text = f"{scope[SLOW_BODY]} Please send it again over a faster connection, or in smaller requests."
        raise LimitError(408, text, ServerRefusalReason.SLOW_TRANSFER, {"connection": "close"})
    if message["type"] != "http.request":
        raise HTTPException(400, "The body has not come whole.")
    return message.get("body", b""), message.get("more_body", False)


def check_media(
    content_type: str, headers: Iterable[tuple[bytes, bytes]], origins: Collection[str] = (), *, takes_any: bool
) -> None:
    """Checks that a body may be read as JSON.

    Browsers send requests of some other types, or of none, to any server without a CORS preflight. A web page of
    another origin must therefore send application/json, which needs a preflight, unless its origin is allowed.

    Args:
        content_type: Of the body; "" if there is none.
        headers: Of the request.
        origins: Allowed origins of web pages; "*" allows all.
        takes_any: Other types are accepted too.

    Raises:
        HTTPException: 415, the body may not be read.
    """
    media = content_type.partition(";")[0].strip().lower()
    if media == "application/json" or (media.startswith("application/") and media.endswith("+json")):
        return
    found = f"Content-Type is {shown(media)}" if media else "The request has no Content-Type"
    if is_from_other_origin(headers, origins):
        raise HTTPException(415, f"{found}; a web page of another origin must send application/json.")
    if media and not takes_any:
        raise HTTPException(415, f"{found}; send application/json.")


def is_from_other_origin(headers: Iterable[tuple[bytes, bytes]], allowed: Collection[str]) -> bool:
    """Returns whether a browser sent the request for a page of another origin that is not allowed.

    Sec-Fetch-Site decides if there is one: a proxy may have changed Host. Without it Origin is compared with Host, but
    not the schemes: behind a TLS proxy the server sees http while its pages have https.
    """
    host, origins, sites = b"", list[bytes](), list[bytes]()
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
