"""Memory of a device: the free memory, the memory of forwards, and the largest possible chunk.

Activations grow at most in proportion to the tokens of a forward, so the memory of chunks of one size bounds the memory
of larger chunks. The largest measurement of each size counts, because later chunks of a prompt attend to more tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ...host import available_memory

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_USABLE: Final = 0.7
"""Share of the free memory that a chunk may use. Other processes allocate too, and later chunks need more."""
_GROWTH: Final = 2
"""A chunk may be at most this many times as large as a measured one."""


class MemoryGauge:
    """Reads the memory of a device: of the host, unless a subclass reads another."""

    def __init__(self) -> None:
        self._reports_peak = _can_reset_peak()
        self._before = 0

    def available(self) -> int:
        """Returns the bytes that can be allocated now."""
        return available_memory()

    def reset_peak(self) -> None:
        """Resets the peak; starts a measurement."""
        if self._reports_peak:
            _CLEAR_REFS.write_text(_RESET_PEAK)
            self._before = _resident("VmRSS")

    def peak_bytes(self) -> int | None:
        """Returns the peak of allocated bytes since `reset_peak`; None if the device does not report it."""
        return _resident("VmHWM") - self._before if self._reports_peak else None


class TokenMemoryEstimator:
    """Measures the memory of forwards with chunks.

    Args:
        token_bytes: Estimated bytes per token, used until a chunk was measured.
    """

    def __init__(self, gauge: MemoryGauge, token_bytes: int) -> None:
        self._gauge = gauge
        self._token_bytes = max(token_bytes, 1)
        self._taken: dict[int, tuple[int, int]] = {}  # bit length of a number of tokens -> most tokens, most bytes

    def begin(self) -> None:
        """Starts to measure a forward."""
        self._gauge.reset_peak()

    def end(self, num_tokens: int) -> None:
        """Records the memory of a forward of `num_tokens` tokens."""
        num_bytes = self._gauge.peak_bytes()
        if num_bytes is not None:
            known_tokens, known_bytes = self._taken.get(num_tokens.bit_length(), (0, 0))
            self._taken[num_tokens.bit_length()] = max(known_tokens, num_tokens), max(known_bytes, num_bytes)

    def free_tokens(self) -> int:
        """Returns the most tokens of a forward that fits into the free memory."""
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
                return num_tokens * usable // num_bytes  # an estimate: part of the memory does not depend on the tokens
        return largest


def _can_reset_peak() -> bool:
    """Whether the kernel lets this process reset its memory peak. Hardened containers may not."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:  # not writable, or not Linux
        return False
    return True


def _resident(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
