"""Reads JSON bodies and refuses those with too many values.

A few megabytes of `[],[],...` would take a hundred times as much memory as Python objects. So the values of a body that
is large or dense are counted before it is parsed, slice by slice, so that the event loop serves other requests. Then
one `orjson.loads` parses it, which takes about 2.5 ms for each MiB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson
from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from starlette.types import Receive

from .limit_errors import LimitError, ServerRefusalReason

BODY_ROOM: Final = "penstock.body_room"
"""The key of a request's scope that holds a function of bytes: it reserves memory for the values of the body until the
response has been sent."""
WEIGHT: Final = 8
"""Values that a text, a list, an object or a key counts as: it takes more memory and time than a number."""
BYTES_PER_VALUE: Final = 8
"""Bytes of memory that are reserved for each value, and for each byte of any body."""
SMALL_BYTES: Final = 4_096
"""Bodies up to this size are not counted: the connections are bounded, and counting would cost every small request."""
SLICE_BYTES: Final = 128 * 1024
"""Bytes that are counted before other requests are served."""
_MOST_PER_BYTE: Final = 3
"""Values that one byte of valid JSON counts as at most: each byte of `"",` counts as three."""


class JsonReader:
    """Reads the bodies of one application. Belongs to one event loop.

    Args:
        max_values: Numbers and words that a body may hold; a text, a list, an object or a key counts as WEIGHT.
        max_entries: Entries of a list, unless it is a list of numbers.
    """

    def __init__(self, max_values: int, max_entries: int) -> None:
        self._max_values = max_values
        self._max_entries = max_entries

    async def read(self, receive: Receive, hold: Callable[[int], None] = lambda _: None) -> Any:
        """Returns the value of a body.

        Args:
            receive: ASGI messages of the body.
            hold: Called with the bytes that the values of a large or dense body take, before it is parsed.

        Raises:
            RequestValidationError: There is no body, or it is not valid JSON.
            HTTPException: 413, it holds too many values; 400, the client has gone.
        """
        body = await _whole(receive)
        if not body:
            detail = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
            raise RequestValidationError([detail])
        if self._must_count(body):
            num_values = 0
            for num_values in count_values(body):
                if num_values > self._max_values:
                    raise LimitError(413, self._too_many(), ServerRefusalReason.JSON_VALUES)
                await asyncio.sleep(0)
            hold(BYTES_PER_VALUE * num_values)
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            context = {"error": error.msg}
            invalid = {"type": "json_invalid", "loc": ("body", error.pos), "input": {}, "ctx": context}
            raise RequestValidationError([invalid]) from error

    def check_entries(self, body: Any, tag: str) -> None:
        """Counts the entries of the lists of a parsed body, before anybody looks into them.

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
            told = f"has {len(entries)} entries; the limit is {self._max_entries}"
            raise RequestValidationError([{"type": "value_error", "loc": place, "msg": told, "input": None}])

    def _must_count(self, body: bytes | bytearray) -> bool:
        """Returns whether a body may hold more values than are allowed, or more than its bytes account for."""
        if len(body) > SLICE_BYTES:
            return True
        if len(body) <= SMALL_BYTES and _MOST_PER_BYTE * len(body) <= self._max_values:
            return False
        most = WEIGHT * (body.count(b"[") + body.count(b"{") + body.count(b'"') // 2) + body.count(b",")
        return most > min(len(body), self._max_values)

    def _too_many(self) -> str:
        return (
            f"The body holds more than {self._max_values} values, of which a text, list, object or key counts as "
            f"{WEIGHT}; send fewer inputs at once, or start the server with a larger --max-json-values."
        )


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


async def _whole(receive: Receive) -> bytes | bytearray:
    """Returns a whole body, which mostly comes in one piece. A large one grows in place: to join it would take long."""
    body: bytes | bytearray = b""
    while (message := await receive())["type"] == "http.request":
        piece: bytes = message.get("body", b"")
        if not body:
            body = piece
        elif isinstance(body, bytearray):
            body += piece
        else:
            body = bytearray(body)
            body += piece
        if not message.get("more_body", False):
            return body
    raise HTTPException(400, "The body has not come whole.")
