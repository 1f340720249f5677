"""How many tokens of a long prompt find memory on the device, from what is free and what past chunks have taken.

Activations grow no faster than in proportion to the tokens of a forward, so that what chunks of one size have taken
bounds what larger ones will take. The largest figure of each size counts, as what a chunk takes grows with what it
looks back on.
"""

from __future__ import annotations

from typing import Final, Protocol

_USABLE: Final = 0.7
"""Part of what is free that a chunk may take: others allocate too, and what is behind a prompt grows."""
_GROWTH: Final = 2
"""A chunk may be so many times as large as one whose memory is known."""


class MemoryGauge(Protocol):
    """Reads the memory of one device."""

    def available(self) -> int:
        """Returns the Bytes that could be allocated now."""
        ...

    def begin(self) -> None:
        """Starts to watch what is taken."""

    def taken(self) -> int | None:
        """Returns the most Bytes that were taken at once since `begin`; None where the device does not tell."""
        ...


class MemoryMeter:
    """Measures forwards with chunks in them; others are left alone.

    Args:
        gauge: Of the device.
        token_bytes: Bytes that a token is taken to need before a chunk was measured.
    """

    def __init__(self, gauge: MemoryGauge, token_bytes: int) -> None:
        self._gauge = gauge
        self._token_bytes = max(token_bytes, 1)
        self._taken: dict[int, tuple[int, int]] = {}  # bits of a number of tokens -> largest number, most Bytes

    def begin(self) -> None:
        """Starts to watch a forward."""
        self._gauge.begin()

    def end(self, num_tokens: int) -> None:
        """Records what a forward of so many tokens has taken."""
        num_bytes = self._gauge.taken()
        if num_bytes is not None:
            known_tokens, known_bytes = self._taken.get(num_tokens.bit_length(), (0, 0))
            self._taken[num_tokens.bit_length()] = max(known_tokens, num_tokens), max(known_bytes, num_bytes)

    def free_tokens(self) -> int:
        """Returns the tokens of a forward for which there is memory now."""
        usable = int(self._gauge.available() * _USABLE)
        if not self._taken:
            return usable // self._token_bytes
        largest = 0
        for num_tokens, num_bytes in sorted(self._taken.values()):
            if num_bytes <= usable:
                largest = num_tokens * (_GROWTH if num_bytes * _GROWTH <= usable else 1)
            elif largest:
                return min(largest, num_tokens - 1)
            else:
                return num_tokens * usable // num_bytes  # a guess: part of it does not depend on the tokens
        return largest
