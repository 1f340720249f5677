"""Several frontends of one core: how they come and go, and how the id of a request says whose it is.

Frontend 0 is the process that started the core. The number of another is given once, and never to the one after it.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

_COUNTED_BITS: Final = 40
"""Bits of an id that a frontend counts up; those above them are its number."""


class Attach(msgspec.Struct, tag=True, frozen=True):
    """Frontend to core, before all that it asks: its number. What it asked for is cancelled when its socket closes."""

    frontend: int


def first_request_id(frontend: int) -> int:
    """Returns the id of the first request of a frontend; the next ones count up from there."""
    return frontend << _COUNTED_BITS


def frontend_of(request_id: int) -> int:
    """Returns the number of the frontend that a request came from."""
    return request_id >> _COUNTED_BITS


def frontends_of(request_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the numbers of the frontends that requests came from."""
    return request_ids >> _COUNTED_BITS
