"""Where the structure of a large JSON text is: its brackets, commas and colons, found before anything is built of it.

This is the first stage of simdjson (Langdale and Lemire, arXiv 1902.08318) in numpy, slice by slice: what a text holds
is counted outside its strings, where prose has commas too, and a text that holds too much costs no object at all.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]

SLICE_BYTES: Final = 256 * 1024
"""What is built before others are served: at most about 20 ms."""
_LOOK_BYTES: Final = 64 * 1024
"""What is looked at before others are served: every byte may be a mark, which takes numpy 50 bytes for a while."""
WEIGHT: Final = 8
"""Numbers and words that a text, a list, an object or a key counts for: it takes more memory, and more time."""
MAX_DEPTH: Final = 1024
"""That of orjson."""

_QUOTE, _COMMA, _COLON = b'",:'
_OPENING, _CLOSING = b"[{", b"]}"
_KINDS: Final = np.zeros(256, np.uint8)
_KINDS[list(b'",:[]{}')] = list(b'",:[]{}')


class InvalidJsonError(ValueError):
    """A text is not valid JSON.

    Attributes:
        reason: Why.
        position: Bytes before the place of the fault.
    """

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(f"{reason} (byte {position})")
        self.reason = reason
        self.position = position


class TooManyValuesError(ValueError):
    """A text holds more values than are taken."""


@dataclass(slots=True, frozen=True, eq=False)
class Level:
    """The marks of all lists and objects that are nested equally deep, in their order.

    Attributes:
        commas: Bytes before each comma between their entries.
        colons: Bytes before each colon behind their keys.
        closings: Bytes before each of their closing brackets.
    """

    commas: Positions
    colons: Positions
    closings: Positions


@dataclass(eq=False)
class Marks:
    """The marks of structure in a text, which may still be invalid in every other way.

    Attributes:
        positions: [M] bytes before each mark.
        kinds: [M] uint8: the marks themselves.
        levels: [M] int16: in how many lists and objects each stands, the one that it opens or closes included.
        num_values: Numbers and words; what else there is counts for WEIGHT of them.
    """

    positions: Positions
    kinds: NDArray[np.uint8]
    levels: NDArray[np.int16]
    num_values: int = 0

    @cached_property
    def by_level(self) -> list[Level]:
        """The marks of each level; the first stands for the text as a whole and has none."""
        order = np.argsort(self.levels, kind="stable")
        ends = np.cumsum(np.bincount(self.levels, minlength=1))
        return [self._level(part) for part in np.split(order, ends[:-1])]

    def _level(self, own: NDArray[np.intp]) -> Level:
        positions, kinds = self.positions[own], self.kinds[own]
        return Level(positions[kinds == _COMMA], positions[kinds == _COLON], positions[np.isin(kinds, list(_CLOSING))])


def find_marks(
    text: bytes | bytearray, max_values: int, slice_bytes: int = _LOOK_BYTES
) -> Generator[None, None, Marks]:
    """Returns the marks of a text; yields between its slices.

    Args:
        text: JSON in UTF-8.
        max_values: Numbers and words that it may hold; what else there is counts for WEIGHT of them.
        slice_bytes: Bytes, 16 at least.

    Raises:
        InvalidJsonError: Brackets or quotes do not match.
        TooManyValuesError: It holds more.
    """
    found: list[tuple[Positions, NDArray[np.uint8], NDArray[np.int16]]] = []
    start = depth = num_values = 0
    is_inside = False
    with memoryview(text) as view:
        while start < len(text):
            part = _part(view, start, slice_bytes)
            positions, kinds, num_quotes = _outside(part, is_inside=is_inside)
            is_inside ^= bool(num_quotes % 2)
            opens, closes = np.isin(kinds, list(_OPENING)), np.isin(kinds, list(_CLOSING))
            num_values += len(kinds) - int(closes.sum()) + (WEIGHT - 1) * int(opens.sum()) + WEIGHT * num_quotes // 2
            if num_values > max_values:
                raise TooManyValuesError
            nested = depth + np.cumsum(opens.astype(np.int8) - closes, dtype=np.int64)
            levels = nested + closes
            if len(levels):
                depth = int(nested[-1])
                if levels.min() < 1 or levels.max() > MAX_DEPTH:
                    wrong = int(np.argmax((levels < 1) | (levels > MAX_DEPTH)))
                    reason = "unexpected character" if levels[wrong] < 1 else "depth limit exceeded"
                    raise InvalidJsonError(reason, start + int(positions[wrong]))
                found.append((positions + start, kinds, levels.astype(np.int16)))
            start += len(part)
            yield
    if is_inside or depth:
        raise InvalidJsonError("unexpected end of data", len(text))
    if not found:
        return Marks(np.empty(0, np.int64), np.empty(0, np.uint8), np.empty(0, np.int16))
    all_positions, all_kinds, all_levels = zip(*found, strict=True)
    positions, kinds, all_depths = map(np.concatenate, (all_positions, all_kinds, all_levels))
    return Marks(positions, kinds, all_depths, num_values)


def _part(view: memoryview, start: int, slice_bytes: int) -> bytes:
    """Returns the next slice, which does not end within an escape."""
    part = bytes(view[start : start + slice_bytes])
    num_slashes = len(part) - len(part.rstrip(b"\\"))
    return part[:-1] if num_slashes % 2 and start + len(part) < len(view) else part


def _outside(part: bytes, *, is_inside: bool) -> tuple[Positions, NDArray[np.uint8], int]:
    """Returns the places and kinds of the marks outside strings, and how many quotes there are."""
    if b"\\" in part:
        part = part.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    all_kinds = _KINDS[np.frombuffer(part, np.uint8)]
    positions = np.flatnonzero(all_kinds)
    kinds = all_kinds[positions]
    is_quote = kinds == _QUOTE
    is_mark = ~is_quote & ((np.cumsum(is_quote) + is_inside) % 2 == 0)
    return positions[is_mark], kinds[is_mark], int(is_quote.sum())
