"""Large JSON built in slices, between which others are served: orjson holds the interpreter for a text as a whole.

What stands between two commas of one list is JSON when it is put into brackets. So lists and objects that are larger
than a slice are filled run by run, each parsed by orjson; strings that are larger are read piece by piece.
"""

from __future__ import annotations

import io
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import orjson

from .json_marks import SLICE_BYTES, InvalidJsonError, Level, Marks

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields where others may be served, and returns a T."""

_BLANKS: Final = b" \t\n\r"
_LONGEST_ESCAPE: Final = 12
"""Bytes. A character beyond U+FFFF is written as two escapes."""
_CLOSINGS: Final = {ord("["): ord("]"), ord("{"): ord("}")}


@dataclass(slots=True, eq=False)
class _Open:
    """A list or an object that is being filled.

    Attributes:
        value: It.
        level: Its marks, among those of others.
        start: Bytes before its first entry.
        at: Bytes before the entry that comes next.
        end: Bytes before its closing bracket.
    """

    value: list[Any] | dict[str, Any]
    level: Level
    start: int
    at: int
    end: int

    def next_end(self, slice_bytes: int) -> int:
        """Returns where the entries of the next slice end, or the next entry where that is larger."""
        limit = self.at + slice_bytes
        if self.end <= limit:
            return self.end
        commas = self.level.commas
        last = int(np.searchsorted(commas, limit, "right")) - 1
        if last >= 0 and commas[last] >= self.at:
            return int(commas[last])
        return min(int(commas[last + 1]), self.end) if last + 1 < len(commas) else self.end

    def add(self, run: bytes) -> None:
        """Adds entries, which `next_end` has found. Raises orjson.JSONDecodeError."""
        is_whole = self.at == self.start and self.at + len(run) == self.end
        if not is_whole and not run.strip(_BLANKS):
            raise InvalidJsonError("expected a value", self.at)
        if isinstance(self.value, list):
            self.value += orjson.loads(b"[%b]" % run)
        else:
            self.value.update(orjson.loads(b"{%b}" % run))


def build(text: bytes | bytearray, marks: Marks, slice_bytes: int = SLICE_BYTES) -> Steps[Any]:
    """Returns the value of a text, as orjson.loads does; yields between its slices.

    Args:
        text: JSON in UTF-8.
        marks: See `find_marks`.
        slice_bytes: Bytes, 64 at least.

    Raises:
        InvalidJsonError: It is not valid.
    """
    root: list[Any] = []
    opened = [_Open(root, marks.by_level[0], 0, 0, len(text))]
    with memoryview(text) as view:
        while opened:
            top = opened[-1]
            end = top.next_end(slice_bytes)
            if end - top.at <= slice_bytes:
                try:
                    top.add(bytes(view[top.at : end]))
                except orjson.JSONDecodeError as error:
                    raise InvalidJsonError(error.msg, top.at + max(error.pos - 1, 0)) from None
            else:
                entry = yield from _large_entry(view, top, end, marks, len(opened), slice_bytes)
                if entry is not None:
                    opened.append(entry)
            top.at = end + 1
            while opened and opened[-1].at > opened[-1].end:
                opened.pop()
            yield
    if len(root) != 1:
        raise InvalidJsonError("expected one value", 0)
    return root[0]


def _large_entry(
    view: memoryview, parent: _Open, end: int, marks: Marks, depth: int, slice_bytes: int
) -> Steps[_Open | None]:
    """Adds one entry that is larger than a slice; returns it where it is a list or an object, still empty."""
    start, end = yield from _trimmed(view, parent.at, end, slice_bytes)
    key = ""
    if isinstance(parent.value, dict):
        colons = parent.level.colons
        colon = int(np.searchsorted(colons, start))
        if colon == len(colons) or colons[colon] >= end:
            raise InvalidJsonError("expected a key and a value", start)
        key_end = int(colons[colon])
        key = _key(view, *(yield from _trimmed(view, start, key_end, slice_bytes)), slice_bytes)
        start, end = yield from _trimmed(view, key_end + 1, end, slice_bytes)
    first = view[start] if start < end else 0
    value: Any
    entry = None
    if first in _CLOSINGS:
        level = marks.by_level[depth]
        closing = int(level.closings[np.searchsorted(level.closings, start)])
        if closing != end - 1 or view[closing] != _CLOSINGS[first]:
            raise InvalidJsonError("unexpected character", min(closing, end - 1))
        value = [] if first == ord("[") else {}
        entry = _Open(value, level, start + 1, start + 1, closing)
    elif first == ord('"') and view[end - 1] == first and end - start > 1:
        value = yield from _string(view, start + 1, end - 1, slice_bytes)
    elif end - start <= slice_bytes:
        value = _loaded(bytes(view[start:end]), start)
    else:
        raise InvalidJsonError("expected a value", start)
    if isinstance(parent.value, dict):
        parent.value[key] = value
    else:
        parent.value.append(value)
    return entry


def _key(view: memoryview, start: int, end: int, slice_bytes: int) -> str:
    if end - start > slice_bytes:
        raise InvalidJsonError(f"a key of {end - start} bytes", start)
    key = _loaded(bytes(view[start:end]), start)
    if not isinstance(key, str):
        raise InvalidJsonError("a key that is no string", start)
    return key


def _loaded(value: bytes, start: int) -> Any:
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise InvalidJsonError(error.msg, start + error.pos) from None


def _trimmed(view: memoryview, start: int, end: int, slice_bytes: int) -> Steps[tuple[int, int]]:
    """Returns where a value begins and ends without the blanks around it."""
    while start < end:
        part = bytes(view[start : min(start + slice_bytes, end)])
        rest = part.lstrip(_BLANKS)
        start += len(part) - len(rest)
        if rest:
            break
        yield
    while start < end:
        part = bytes(view[max(end - slice_bytes, start) : end])
        rest = part.rstrip(_BLANKS)
        end -= len(part) - len(rest)
        if rest:
            break
        yield
    return start, end


def _string(view: memoryview, start: int, end: int, slice_bytes: int) -> Steps[str]:
    """Returns a string whose characters stand from `start` to `end`."""
    text = io.StringIO(newline="")
    while start < end:
        cut = end if end - start <= slice_bytes else _cut(view, start, start + slice_bytes)
        try:
            text.write(orjson.loads(b'"%b"' % bytes(view[start:cut])))
        except orjson.JSONDecodeError as error:
            raise InvalidJsonError(error.msg, start + max(error.pos - 1, 0)) from None
        start = cut
        yield
    return text.getvalue()


def _cut(view: memoryview, start: int, end: int) -> int:
    """Returns a place near `end` that is between two characters of a string; `start` is such a place."""
    tail = bytes(view[end - _LONGEST_ESCAPE : end])
    slash = tail.rfind(b"\\")
    if slash < 0:
        while view[end] & 0xC0 == 0x80 and end > start:
            end -= 1
        return end
    slash += end - len(tail)
    # An escape begins where a row of backslashes does, or behind every second of them.
    before = bytes(view[start : slash + 1])
    row = slash + 1 - (len(before) - len(before.rstrip(b"\\")))
    if row == start:
        return start + (slash + 1 - start) // 2 * 2
    is_second = bytes(view[row : row + 3]).lower() == b"\\ud" and bytes(view[row + 3 : row + 4]).lower() in (
        *(b"c", b"d", b"e", b"f"),
    )
    return row - _LONGEST_ESCAPE // 2 if is_second else row
