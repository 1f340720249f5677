"""Bodies on their way in: read, parsed, and refused where they hold more than any sensible request.

A few megabytes of `[],[],...` would take a hundred times as much memory, and seconds in which nobody else is served. So
what a body holds that is large, or may take more than eight times its bytes, is counted before it is parsed, and it is
parsed in slices between which others are served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import orjson
from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from starlette.types import Receive

from .json_marks import SLICE_BYTES, WEIGHT, InvalidJsonError, TooManyValuesError, find_marks
from .json_slices import Steps, T, build
from .limit_errors import LimitError, ServerRefusalReason

BODY_ROOM: Final = "penstock.body_room"
"""Where the scope of a request has what holds room for its values: a function of bytes, until its answer has gone."""
BYTES_PER_VALUE: Final = 8
"""What a list, an object or a text takes, by the WEIGHT that it has; also what any body may take for each byte."""
SMALL_BYTES: Final = 4_096
"""Bodies that are not counted: connections are bounded, too, and counting would cost every small request."""
_MOST_PER_BYTE: Final = 3
"""Values that a byte of valid JSON can count for: of `"",` each has three."""


class JsonReader:
    """Reads the bodies of one application. Belongs to one event loop.

    Args:
        max_values: Numbers and words that a body may hold; a text, a list, an object or a key counts for WEIGHT.
        max_entries: Entries of a list that is not one of numbers.
    """

    def __init__(self, max_values: int, max_entries: int) -> None:
        self._max_values = max_values
        self._max_entries = max_entries
        # One large body after the other: what they take while they are parsed does not add up.
        self._turn = asyncio.Lock()

    async def read(self, receive: Receive, hold: Callable[[int], None] = lambda _: None) -> Any:
        """Returns the value of a body.

        Args:
            receive: Gives the body.
            hold: Told how many bytes the values of a large or dense body take, before there are any; see BODY_ROOM.

        Raises:
            RequestValidationError: There is none, or it is not valid JSON.
            HTTPException: 413, it holds too many values; 400, the client has gone.
        """
        body = await _whole(receive)
        if not body:
            detail = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
            raise RequestValidationError([detail])
        try:
            is_short = len(body) <= SLICE_BYTES and _MOST_PER_BYTE * len(body) <= self._max_values
            if is_short and (len(body) <= SMALL_BYTES or _most_values(body) <= len(body)):
                return orjson.loads(body)
            async with self._turn:
                return await self._parse_in_turns(body, hold)
        except orjson.JSONDecodeError as error:
            raise _invalid(error.msg, error.pos) from error
        except InvalidJsonError as error:
            raise _invalid(error.reason, error.position) from error
        except TooManyValuesError:
            raise LimitError(413, self._too_many(), ServerRefusalReason.JSON_VALUES) from None

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

    async def _parse_in_turns(self, body: bytes | bytearray, hold: Callable[[int], None]) -> Any:
        marks = await _in_turns(find_marks(body, self._max_values))
        hold(BYTES_PER_VALUE * marks.num_values)
        return await _in_turns(build(body, marks))

    def _too_many(self) -> str:
        return (
            f"The body holds more than {self._max_values} values, of which a text, list, object or key counts as "
            f"{WEIGHT}; send fewer inputs at once, or start the server with a larger --max-json-values."
        )


def _most_values(body: bytes | bytearray) -> int:
    """Returns how many values a body holds at the most: what stands in its texts is counted, too."""
    return WEIGHT * (body.count(b"[") + body.count(b"{") + body.count(b'"') // 2) + body.count(b",")


async def _in_turns(steps: Steps[T]) -> T:
    """Takes all steps, and lets others run between them."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: T = end.value
            return value
        await asyncio.sleep(0)


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


def _invalid(reason: str, position: int) -> RequestValidationError:
    detail = {"type": "json_invalid", "loc": ("body", position), "input": {}, "ctx": {"error": reason}}
    return RequestValidationError([detail])
