"""What a client owes: the part of an exchange that its connection waits for. `Connection.owed` says what it is now."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Part(StrEnum):
    """What a connection waits for its client to send or to take."""

    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"


class Owed(NamedTuple):
    """What a client owes.

    Attributes:
        part: Which part of an exchange.
        request: Of which request; compared by identity.
        progress: Changes whenever the client does something about it.
    """

    part: Part
    request: object
    progress: int
