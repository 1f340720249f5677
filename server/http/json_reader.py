"""Reads JSON bodies, and rejects bodies with too many values.

A few megabytes of `[],[],...` take a hundred times as much memory as Python objects. The values of a large or dense
body are therefore counted before it is parsed, in slices, so that the event loop can serve other requests. Then one
`orjson.loads` parses it, which takes about 2.5 ms per MiB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

import orjson
from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from starlette.types import Receive, Scope

from ..admission import SMALL_BODY_BYTES, AdmissionController, LimitError, ServerRejectionReason
from ..request_state import state_of

WEIGHT: Final = 8
"""Weight of a text, list, object or key. Each takes more memory and time than a number, which has weight 1."""
SLICE_BYTES: Final = 128 * 1024
"""Number of bytes per slice. Other requests are served between two slices."""
_MAX_WEIGHT_PER_BYTE: Final = WEIGHT // 2
"""Maximum weight per byte of valid JSON: `[]`, `{}` and `""` have two bytes and count as WEIGHT."""
_NUMBERS: Final = frozenset((int, float))


class JsonReader:
    """Reads the bodies of one application. Used by one event loop.

    Args:
        admission: Limits the values of a body. Numbers, true, false and null count as 1, a text, list, object or key
            as WEIGHT.
        max_entries: Maximum number of entries of a list, unless it is a list of numbers.
    """

    def __init__(self, admission: AdmissionController, max_entries: int) -> None:
        self._admission = admission
        self._max_entries = max_entries
        self._uncounted_bytes = min(SMALL_BODY_BYTES, admission.max_json_values // _MAX_WEIGHT_PER_BYTE)

    async def read(self, scope: Scope, receive: Receive) -> Any:
        """Returns the value of a body.

        A body of more than SMALL_BODY_BYTES reserves memory until AdmissionController.release.

        Raises:
            RequestValidationError: The body is missing or is not valid JSON.
            HTTPException: 408 if the body is too slow, 413 or 503 from AdmissionController, 400 if the client has
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
            else:  # append in place: joining the parts of a large body takes long
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
            problem, position = _json_problem(body, error)
            invalid = {"type": "json_invalid", "loc": ("body", position), "input": {}, "ctx": {"error": problem}}
            raise RequestValidationError([invalid]) from error

    def check_entries(self, body: Any, tag: str) -> None:
        """Checks the length of lists that are fields of a parsed body, or of an object in it, before validation.

        A flat list of numbers is the token ids of one input and may be longer.

        Args:
            body: A JSON value.
            tag: Tag of its dialect.

        Raises:
            RequestValidationError: A list has too many entries.
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

    def _check_list(self, entries: list[Any], location: tuple[str, ...]) -> None:
        if len(entries) > self._max_entries and not _NUMBERS.issuperset(map(type, entries)):
            message = f"has {len(entries)} entries; the limit is {self._max_entries}"
            raise RequestValidationError([{"type": "value_error", "loc": location, "msg": message, "input": None}])

    def _must_count(self, body: bytes | bytearray) -> bool:
        """Returns whether a body may have more values than the limit, or more than admission assumes for its size."""
        if len(body) > SLICE_BYTES:
            return True
        max_weight = WEIGHT * (body.count(b"[") + body.count(b"{") + body.count(b'"') // 2) + body.count(b",")
        return max_weight > min(len(body), self._admission.max_json_values)


def _json_problem(body: bytes | bytearray, error: orjson.JSONDecodeError) -> tuple[str, int]:
    """Returns why a body is not valid JSON, and at which byte. orjson has no position for other encodings."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as wrong:
        return f"byte 0x{body[wrong.start]:02x} is not UTF-8; send the body in UTF-8", wrong.start
    if b"\0" in body[:4]:
        return "it has NUL bytes, as UTF-16 and UTF-32 have; send the body in UTF-8", body.index(0)
    return error.msg, error.pos


def count_values(text: bytes | bytearray, slice_bytes: int = SLICE_BYTES) -> Iterator[int]:
    """Yields after each slice the number of values so far, weighted by WEIGHT.

    Brackets, commas and colons inside strings do not count. The count is exact for valid JSON.

    Args:
        text: JSON in UTF-8.
        slice_bytes: Bytes per slice, at least 2.
    """
    num_values = start = 0
    in_string = False  # whether the slice starts inside a string
    while start < len(text):
        part = text[start : start + slice_bytes]
        if (len(part) - len(part.rstrip(b"\\"))) % 2 and start + len(part) < len(text):
            part = part[:-1]  # do not split an escape sequence
        start += len(part)
        segments = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        unquoted = b"".join(segments[in_string::2])
        num_quotes = len(segments) - 1
        num_values += unquoted.count(b",") + unquoted.count(b":")
        num_values += WEIGHT * (unquoted.count(b"[") + unquoted.count(b"{")) + WEIGHT * num_quotes // 2
        in_string ^= bool(num_quotes % 2)
        yield num_values


async def receive_part(scope: Scope, receive: Receive) -> tuple[bytes, bool]:
    """Returns the next part of a body, and whether more parts follow.

    Raises HTTPException: 408 if ConnectionLimits found the body too slow, 400 if the client has disconnected.
    """
    message = await receive()
    if (slow_body := state_of(scope).slow_body) is not None:
        text = f"{slow_body} Please send it again over a faster connection, or in smaller requests."
        raise LimitError(408, text, ServerRejectionReason.SLOW_TRANSFER, {"connection": "close"})
    if message["type"] != "http.request":
        raise HTTPException(400, "The body is incomplete.")
    return message.get("body", b""), message.get("more_body", False)
