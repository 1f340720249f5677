"""JSON responses. Large ones are serialised in parts while the client reads.

orjson holds the GIL while it serialises a value, and JSON of vectors takes three times the memory of the arrays. A
large response is serialised while it is sent: other requests are served between two parts, and for a slow client
only the arrays are in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import orjson
from fastapi import Response
from numpy.typing import NDArray
from starlette.types import Receive, Scope, Send

JSON_HEADERS: Final = {"content-type": "application/json"}
PART_BYTES: Final = 64 * 1024
_PART_VALUES: Final = 8_192
"""Numbers per part."""
_ENTRIES_PER_PART: Final = 64
"""Entries of a list of texts or numbers per part."""
_PART_CHARS: Final = 32_768
"""Characters per part."""


class LazyJsonArray:
    """Rows of an array that are serialised in parts.

    Args:
        rows: [N, D], or [D], which is written as a whole.
        write: Serialises some of the rows, [n, D] or [D].
        start: Bytes before the first part.
        between: Bytes between two parts.
        end: Bytes after the last part.
    """

    def __init__(
        self,
        rows: NDArray[np.float32],
        write: Callable[[NDArray[np.float32]], bytes],
        *,
        start: bytes = b"",
        between: bytes = b"",
        end: bytes = b"",
    ) -> None:
        self._rows = rows
        self._write = write
        self._start = start
        self._between = between
        self._end = end

    def parts(self) -> Iterator[bytes]:
        """Yields the serialised parts."""
        yield self._start
        if self._rows.ndim < 2:
            yield self._write(self._rows)
        else:
            # A multiple of three rows gives complete base64 groups at every width.
            step = 3 * max(_PART_VALUES // (3 * max(self._rows.shape[1], 1)), 1)
            for first in range(0, len(self._rows), step):
                if first:
                    yield self._between
                yield self._write(self._rows[first : first + step])
        yield self._end


def json_array(rows: NDArray[Any], convert: Callable[[NDArray[Any]], NDArray[Any]] | None = None) -> LazyJsonArray:
    """Returns an array that is serialised as JSON numbers.

    Args:
        rows: [N, D] or [D].
        convert: Converts some rows before they are written.
    """

    def write(part: NDArray[Any]) -> bytes:
        values = np.ascontiguousarray(part if convert is None else convert(part))
        written = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
        return written if rows.ndim < 2 else written[1:-1]

    return (
        LazyJsonArray(rows, write) if rows.ndim < 2 else LazyJsonArray(rows, write, start=b"[", between=b",", end=b"]")
    )


def json_bytes(value: Any) -> bytes:
    """Returns the JSON of a value as one bytes object. See `iter_json` for the types of values."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY, default=_default)


def _default(value: Any) -> Any:
    if isinstance(value, Iterator):
        return list(value)
    if isinstance(value, LazyJsonArray):
        return orjson.Fragment(b"".join(value.parts()))
    if isinstance(value, np.ndarray):  # not contiguous
        return np.ascontiguousarray(value)
    raise TypeError(type(value).__name__)


def iter_json(value: Any) -> Iterator[bytes]:
    """Yields the JSON of a value in parts, which are small if its texts and its innermost lists are small.

    Args:
        value: A value for orjson; its objects and lists may hold arrays, LazyJsonArray, and iterators as lists.
    """
    if isinstance(value, dict):
        opening = b"{"
        for key, entry in value.items():
            yield opening + orjson.dumps(key) + b":"
            yield from _iter_entry(entry)
            opening = b","
        yield b"{}" if opening == b"{" else b"}"
    elif isinstance(value, list) and len(value) > _ENTRIES_PER_PART and isinstance(value[0], int | str):
        yield b"["
        for start in range(0, len(value), _ENTRIES_PER_PART):
            yield from _iter_entries(value[start : start + _ENTRIES_PER_PART], b"," if start else b"")
        yield b"]"
    elif isinstance(value, list | tuple | Iterator):
        opening = b"["
        for entry in value:
            yield opening
            yield from _iter_entry(entry)
            opening = b","
        yield b"[]" if opening == b"[" else b"]"
    elif isinstance(value, LazyJsonArray):
        yield from value.parts()
    elif isinstance(value, np.ndarray) and value.size > _PART_VALUES:
        yield from json_array(value).parts()
    elif isinstance(value, str) and len(value) > _PART_CHARS:
        yield b'"'
        for start in range(0, len(value), _PART_CHARS):
            yield orjson.dumps(value[start : start + _PART_CHARS])[1:-1]
        yield b'"'
    else:
        yield json_bytes(value)


def _iter_entries(entries: list[Any], before: bytes) -> Iterator[bytes]:
    """Yields some entries of a list, serialised in one call unless a text is large."""
    if any(isinstance(entry, str) and len(entry) > _PART_CHARS // _ENTRIES_PER_PART for entry in entries):
        for i, entry in enumerate(entries):
            yield b"," if i else before
            yield from iter_json(entry)
    else:
        yield before + json_bytes(entries)[1:-1]


def _iter_entry(value: Any) -> Iterator[bytes]:
    """Yields an entry of a list or an object, serialised in one call if it is small."""
    if isinstance(value, dict) and not any(map(_is_written_in_parts, value.values())):
        yield json_bytes(value)
    else:
        yield from iter_json(value)


def _is_written_in_parts(value: Any) -> bool:
    """Returns whether a value is long, or holds other values, whose sizes are not known here."""
    if isinstance(value, str):
        return len(value) > _PART_CHARS
    if isinstance(value, np.ndarray):
        return value.size > _PART_VALUES
    return isinstance(value, dict | list | tuple | Iterator | LazyJsonArray)


class IncrementalResponse(Response):
    """A response whose body is serialised while it is sent.

    Args:
        parts: The body, in parts of any size.
    """

    def __init__(self, parts: Iterator[bytes], headers: Mapping[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self._parts = parts
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response. Stops if the client disconnects."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        disconnect = asyncio.create_task(wait_for_disconnect(receive))
        try:
            for part in _merge_parts(self._parts):
                await send({"type": "http.response.body", "body": part, "more_body": True})
                await asyncio.sleep(0)
                if disconnect.done():
                    return
            await send({"type": "http.response.body", "body": b""})
        finally:
            disconnect.cancel()


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _merge_parts(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yields the same bytes in parts of about PART_BYTES."""
    waiting: list[bytes] = []
    num_bytes = 0
    for part in parts:
        waiting.append(part)
        num_bytes += len(part)
        if num_bytes >= PART_BYTES:
            yield b"".join(waiting)
            waiting.clear()
            num_bytes = 0
    if waiting:
        yield b"".join(waiting)


def json_response(content: Any, *, incremental: bool = False) -> Response:
    """Returns a JSON response. numpy arrays and numbers are serialised directly, without Python lists.

    Args:
        content: A value for `iter_json`.
        incremental: Serialise and send the body in parts.
    """
    return IncrementalResponse(iter_json(content), JSON_HEADERS) if incremental else JsonResponse(json_bytes(content))


class JsonResponse(Response):
    """A response with a JSON body. Starlette's class takes twice as long to make the headers."""

    def __init__(self, body: bytes) -> None:
        self.status_code = 200
        self.background = None
        self.body = body
        self.raw_headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
