"""What each of several processes has under way in one engine, in memory that all of them read.

Each process writes in its own place alone, and nobody waits for anybody: two that look at once may both let a request
in where there was room for one. What is under way decides, not what a request brings, so that a bound that is passed by
a request of each process is still a bound.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_REQUESTS: Final = 1 << 16
"""Requests of one process that find a place: each is a connection with an open file, or one of a few per connection."""
_WORD: Final = 8
_HEAD_WORDS: Final = 8
"""Of the board: the drain rate (float), nothing, the token budget, refusals of those that have gone. Of a place:
requests, tokens, refusals."""
_PLACE_WORDS: Final = _HEAD_WORDS + 2 * MAX_REQUESTS
_Key = tuple[str, int]


class LoadBoard:
    """The memory, as whoever reads all of it sees it. Its pages exist where something has been written.

    Args:
        descriptor: Of the memory, as `create` made it; the board closes it.
        num_places: Processes that may have requests under way.
    """

    def __init__(self, descriptor: int, num_places: int) -> None:
        self.descriptor = descriptor
        self.num_places = num_places
        self._memory = mmap.mmap(descriptor, _size(num_places))
        self._words = memoryview(self._memory).cast("q")
        self._floats = memoryview(self._memory).cast("d")
        self._starts = range(_HEAD_WORDS, _HEAD_WORDS + num_places * _PLACE_WORDS, _PLACE_WORDS)

    @classmethod
    def create(cls, num_places: int) -> LoadBoard:
        """Returns a new, empty board; a process that inherits its descriptor opens the same."""
        descriptor = os.memfd_create("penstock-load")
        os.ftruncate(descriptor, _size(num_places))
        return cls(descriptor, num_places)

    @property
    def num_requests(self) -> int:
        """Requests under way, of all."""
        return sum(self._words[start] for start in self._starts)

    @property
    def num_tokens(self) -> int:
        """Tokens under way, of all."""
        return sum(self._words[start + 1] for start in self._starts)

    @property
    def num_refused(self) -> int:
        """Requests that were refused, of all, those that have gone included."""
        return self._words[3] + sum(self._words[start + 2] for start in self._starts)

    @property
    def tokens_per_s(self) -> float:
        """The drain rate; nan until it is measured."""
        return self._floats[0] or math.nan

    @tokens_per_s.setter
    def tokens_per_s(self, value: float) -> None:
        """Belongs to one process."""
        self._floats[0] = value

    @property
    def token_budget(self) -> int:
        """The most tokens in one forward, at the last step; 0 before the first."""
        return self._words[2]

    @token_budget.setter
    def token_budget(self, value: int) -> None:
        """Belongs to one process."""
        self._words[2] = value

    def sizes(self, client: str | None = None) -> NDArray[np.int64]:
        """Returns the tokens of each request under way, of all or of one client."""
        mark = None if client is None else client_mark(client)
        parts = (entries[:, 1] if mark is None else entries[entries[:, 0] == mark, 1] for entries in self._entries())
        return np.concatenate(list(parts))

    def num_clients(self, client: str) -> int:
        """Returns how many clients have requests under way, `client` included in any case."""
        parts = [entries[:, 0] for entries in self._entries()]
        return len(np.unique(np.concatenate([*parts, np.array([client_mark(client)], np.int64)])))

    def clear(self, place: int) -> None:
        """Empties the place of a process that has ended; what it has refused still counts."""
        start = self._starts[place]
        self._words[3] += self._words[start + 2]
        self._words[start : start + _HEAD_WORDS] = memoryview(bytes(_HEAD_WORDS * _WORD)).cast("q")

    def close(self) -> None:
        """Lets go of the memory."""
        self._words.release()
        self._floats.release()
        self._memory.close()
        os.close(self.descriptor)

    def _entries(self) -> Iterator[NDArray[np.int64]]:
        for start in self._starts:
            end = start + _HEAD_WORDS + 2 * self._words[start]
            yield np.frombuffer(self._words[start + _HEAD_WORDS : end], np.int64).reshape(-1, 2)


class LoadPlace:
    """The place of one process on a board, which that process alone writes in.

    Args:
        board: The board.
        place: Which of its places.
    """

    def __init__(self, board: LoadBoard, place: int) -> None:
        self.board = board
        self._words = board._words
        self._start = board._starts[place]
        self._keys: list[_Key] = []
        self._places: dict[_Key, list[int]] = {}

    @property
    def has_room(self) -> bool:
        """Whether another request finds a place."""
        return len(self._keys) < MAX_REQUESTS

    def enter(self, client: str, num_tokens: int) -> None:
        """Writes down a request."""
        key, place = (client, num_tokens), len(self._keys)
        self._keys.append(key)
        self._places.setdefault(key, []).append(place)
        self._write(place, key)
        self._words[self._start] += 1
        self._words[self._start + 1] += num_tokens

    def leave(self, client: str, num_tokens: int) -> None:
        """Strikes a request out; the last one takes its line, so that the lines in use stay together."""
        key = (client, num_tokens)
        place = self._places[key].pop()
        if not self._places[key]:
            del self._places[key]
        last_key, last = self._keys.pop(), len(self._keys)
        if place != last:
            moved = self._places[last_key]
            moved[moved.index(last)] = place
            self._keys[place] = last_key
            self._write(place, last_key)
        self._words[self._start] -= 1
        self._words[self._start + 1] -= num_tokens

    def count_refusal(self) -> None:
        """Counts a request that was refused."""
        self._words[self._start + 2] += 1

    def _write(self, place: int, key: _Key) -> None:
        at = self._start + _HEAD_WORDS + 2 * place
        self._words[at], self._words[at + 1] = client_mark(key[0]), key[1]


def client_mark(client: str) -> int:
    """Returns the number by which processes tell clients apart; 0 where nobody is."""
    return int.from_bytes(blake2b(client.encode(), digest_size=_WORD).digest(), "little", signed=True) if client else 0


def _size(num_places: int) -> int:
    return _WORD * (_HEAD_WORDS + num_places * _PLACE_WORDS)
