"""What `penstock embed` asks the engine for at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from .input import BadRow, InputFile, Row

PIECE_ROWS: Final = 32
PIECE_CHARS: Final = 8_000
"""About what one forward on a CPU holds, so that an answer never waits for many."""
_NONE: Final = (math.inf, math.inf)


class Piece(NamedTuple):
    """Rows that the engine is asked for at once.

    Attributes:
        start: Number of the first one, counted from 0.
        rows: Consecutive rows.
    """

    start: int
    rows: list[Row]


def rows_to_do(
    source: InputFile, done: Sequence[tuple[int, int]], skip: Callable[[str], None]
) -> Iterator[tuple[int, Row]]:
    """Yields the good rows that are left to do, with their numbers, counted from 0 over all rows.

    Args:
        source: All rows.
        done: Ranges of those that are done, in order; see Journal.
        skip: Called with the text of each of them.
    """
    ranges = iter(tuple(done))
    start, end = next(ranges, _NONE)
    for number, row in enumerate(source.rows()):
        if number == end:
            start, end = next(ranges, _NONE)
        if isinstance(row, BadRow):
            continue
        if start <= number:
            skip(row.text)
        else:
            yield number, row


def pieces_of(rows: Iterable[tuple[int, Row]], most_rows: int) -> Iterator[Piece]:
    """Yields numbered rows in pieces of at most `most_rows`, PIECE_ROWS and PIECE_CHARS; a longer row stands alone."""
    most_rows = min(most_rows, PIECE_ROWS)
    piece, num_chars = Piece(0, []), 0
    for number, row in rows:
        fits = len(piece.rows) < most_rows and num_chars + len(row.text) <= PIECE_CHARS
        if piece.rows and not (fits and number == piece.start + len(piece.rows)):
            yield piece
            piece, num_chars = Piece(0, []), 0
        if not piece.rows:
            piece = Piece(number, [])
        piece.rows.append(row)
        num_chars += len(row.text)
    if piece.rows:
        yield piece
