"""What one process writes on the board, another reads."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from penstock.engine.client.shared import load_board
from penstock.engine.client.shared.load_board import LoadBoard, LoadPlace

WRITER = """
import sys
from penstock.engine.client.shared.load_board import LoadBoard, LoadPlace
board = LoadBoard(int(sys.argv[1]), 3)
place = LoadPlace(board, 1)
place.enter("somebody", 30)
place.enter("", 5)
place.count_refusal()
"""


@pytest.fixture
def board() -> Iterator[LoadBoard]:
    board = LoadBoard.create(3)
    yield board
    board.close()


def test_a_board_begins_empty(board: LoadBoard) -> None:
    assert (board.num_requests, board.num_tokens, board.num_refused, board.token_budget) == (0, 0, 0, 0)
    assert math.isnan(board.tokens_per_s)
    assert board.sizes().tolist() == []


def test_what_another_process_writes_is_read_here(board: LoadBoard) -> None:
    LoadPlace(board, 0).enter("somebody", 7)
    command = [sys.executable, "-P", "-c", WRITER, str(board.descriptor)]
    subprocess.run(command, pass_fds=[board.descriptor], check=True)
    assert (board.num_requests, board.num_tokens, board.num_refused) == (3, 42, 1)
    assert sorted(board.sizes("somebody").tolist()) == [7, 30]
    assert board.sizes("").tolist() == [5]
    assert sorted(board.sizes().tolist()) == [5, 7, 30]
    board.clear(1)  # its process has ended without a word
    assert (board.num_requests, board.num_tokens) == (1, 7)
    assert board.num_refused == 1


def test_the_lines_in_use_stay_together(board: LoadBoard) -> None:
    chance, places, books = random.Random(5), [LoadPlace(board, i) for i in range(3)], [Counter() for _ in range(3)]
    for _ in range(3000):
        i = chance.randrange(3)
        if books[i] and chance.random() < 0.48:
            key = chance.choice(list(books[i].elements()))
            places[i].leave(*key)
            books[i][key] -= 1
            books[i] += Counter()
        else:
            key = (chance.choice(["", "a", "b"]), chance.randrange(1, 9))
            places[i].enter(*key)
            books[i][key] += 1
    everything = sum(books, Counter())
    assert board.num_requests == everything.total()
    assert sorted(board.sizes().tolist()) == sorted(size for _, size in everything.elements())
    for client in ("", "a", "b"):
        assert sorted(board.sizes(client).tolist()) == sorted(n for name, n in everything.elements() if name == client)


def test_a_place_says_when_it_is_full(board: LoadBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_board, "MAX_REQUESTS", 2)
    place = LoadPlace(board, 2)
    for _ in range(2):
        assert place.has_room
        place.enter("", 1)
    assert not place.has_room
    place.leave("", 1)
    assert place.has_room


def test_the_memory_goes_with_the_last_who_has_it() -> None:
    board = LoadBoard.create(1)
    descriptor = board.descriptor
    board.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)
