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
    """A transfer that waits for its client.

    Attributes:
        part: The part of an exchange.
        request: The request, compared by identity.
        progress: Bytes that the client has sent or taken so far.
    """

    part: Part
    request: object
    progress: int
