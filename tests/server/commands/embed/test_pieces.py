"""What is asked at once: rows that are left, in pieces that answer soon."""

from collections.abc import Iterator

import pytest

from penstock.server.commands.embed.input import InputFile, Row
from penstock.server.commands.embed.pieces import PIECE_CHARS, PIECE_ROWS, pieces_of, rows_to_do


class Texts(InputFile):
    """Texts that lie in no file."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def rows(self) -> Iterator[Row]:
        return (Row(number, text, {}) for number, text in enumerate(self.texts, 1))


@pytest.mark.parametrize(
    ("done", "left"),
    [
        ((), [0, 1, 2, 3, 4, 5]),
        (((0, 2),), [2, 3, 4, 5]),
        (((1, 2), (4, 6)), [0, 2, 3]),
        (((0, 1), (3, 4)), [1, 2, 4, 5]),
        (((0, 6),), []),
    ],
)
def test_rows_that_are_done_are_skipped(done: tuple, left: list[int]) -> None:
    skipped: list[str] = []
    assert [number for number, _ in rows_to_do(Texts(*"abcdef"), done, skipped.append)] == left
    assert skipped == [letter for number, letter in enumerate("abcdef") if number not in left]


def shape(rows: list[tuple[int, int]], most_rows: int = 1000) -> list[tuple[int, int]]:
    """First row and number of rows of the pieces of (row, characters)."""
    pieces = pieces_of(((number, Row(number, "a" * length, {})) for number, length in rows), most_rows)
    return [(piece.start, len(piece.rows)) for piece in pieces]


def test_a_piece_is_bounded_in_rows_and_characters() -> None:
    assert shape([(i, 1) for i in range(PIECE_ROWS + 3)]) == [(0, PIECE_ROWS), (PIECE_ROWS, 3)]
    assert shape([(i, 1) for i in range(5)], most_rows=2) == [(0, 2), (2, 2), (4, 1)]
    half = PIECE_CHARS // 2
    assert shape([(0, half), (1, half), (2, 1), (3, PIECE_CHARS + 1), (4, 1)]) == [(0, 2), (2, 1), (3, 1), (4, 1)]
    assert shape([]) == []


def test_a_piece_has_no_gap() -> None:
    assert shape([(0, 1), (1, 1), (4, 1), (5, 1)]) == [(0, 2), (4, 2)]
