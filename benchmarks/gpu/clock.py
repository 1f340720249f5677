"""Measures time: with events on a CUDA device, with the clock of the process on a CPU.

Runs alternate between several buffers, so that the inputs of a run are not in the device's cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch

Run = Callable[[], object]

_HEAD_START_CYCLES: Final = 2_000_000
"""About a millisecond: the host is ahead of the device by that, so that its gaps between launches are not measured."""
_RUNS_OF_A_BURST: Final = 8
_MIN_RUNS: Final = 5
_MAX_RUNS: Final = 200
_MAX_BUFFERS: Final = 32


class Clock(Protocol):
    """Times runs on one device."""

    def median_us(self, runs: Sequence[Run], seconds: float, *, head_start: bool = True) -> float:
        """Returns the microseconds of one run: the median of the runs within `seconds`, at least 5.

        Args:
            runs: The same work on other buffers; they take turns.
            seconds: Roughly; the first runs, which may compile, come on top.
            head_start: Let the host get ahead of the device first. False includes the launch latency.
        """
        ...

    def num_buffers(self, num_bytes: int) -> int:
        """Returns how many buffers of that size fill the cache of the device several times over."""
        ...


class HostClock:
    """The clock of a CPU."""

    def median_us(self, runs: Sequence[Run], seconds: float, *, head_start: bool = True) -> float:
        """See Clock."""
        del head_start
        for run in runs[:2]:
            run()
        times_us: list[float] = []
        until_s = time.perf_counter() + seconds
        while len(times_us) < _MIN_RUNS or (time.perf_counter() < until_s and len(times_us) < _MAX_RUNS):
            began_ns = time.perf_counter_ns()
            runs[len(times_us) % len(runs)]()
            times_us.append((time.perf_counter_ns() - began_ns) / 1e3)
        return statistics.median(times_us)

    def num_buffers(self, num_bytes: int) -> int:
        """See Clock. Always two: on a CPU the benchmark tests the code, not the speed."""
        del num_bytes
        return 2


class EventClock:
    """Events on the current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size

    def median_us(self, runs: Sequence[Run], seconds: float, *, head_start: bool = True) -> float:
        """See Clock."""
        for run in (*runs, runs[0]):
            run()
        first_us = statistics.median(self._burst(runs, 0, 3, head_start=head_start))
        wanted = min(max(int(1e6 * seconds / max(first_us, 1.0)), _MIN_RUNS), _MAX_RUNS)
        times_us: list[float] = []
        while len(times_us) < wanted:
            times_us += self._burst(runs, len(times_us), _RUNS_OF_A_BURST, head_start=head_start)
        return statistics.median(times_us)

    def num_buffers(self, num_bytes: int) -> int:
        """See Clock."""
        return min(max(-(-3 * self._cache_bytes // max(num_bytes, 1)), 2), _MAX_BUFFERS)

    def _burst(self, runs: Sequence[Run], first: int, number: int, *, head_start: bool) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(number)]
        torch.cuda.synchronize()
        if head_start:
            torch.cuda._sleep(_HEAD_START_CYCLES)  # as torch's own tests do; there is no public name
        for index, (began, ended) in enumerate(events, first):
            began.record()
            runs[index % len(runs)]()
            ended.record()
        torch.cuda.synchronize()
        return [1e3 * began.elapsed_time(ended) for began, ended in events]


def make_clock(device: torch.device) -> Clock:
    """Returns the clock of a device."""
    return EventClock(device) if device.type == "cuda" else HostClock()
