"""How long forwards take. On CUDA a forward may still run when the call that started it has returned."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch


class ForwardTime(NamedTuple):
    """A forward that has ended.

    Attributes:
        chunk_tokens: Tokens of chunks of long sequences.
        whole_tokens: Other tokens.
        seconds: Seconds that it took on the device.
    """

    chunk_tokens: int
    whole_tokens: int
    seconds: float


class ForwardClock:
    """Times one forward after the other, and lets at most one be under way.

    Args:
        device: Where they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._began_s = 0.0
        self._began: torch.cuda.Event | None = None
        self._under_way: tuple[torch.cuda.Event, torch.cuda.Event, int, int] | None = None
        self._times: list[ForwardTime] = []

    def begin(self) -> None:
        """Waits for the last forward and starts the time of the next."""
        if self._is_cuda:
            self._wait()
            self._began = torch.cuda.Event(enable_timing=True)
            self._began.record(torch.cuda.current_stream(self._device))
        self._began_s = time.perf_counter()

    def end(self, chunk_tokens: int, whole_tokens: int) -> None:
        """Says that everything of a forward has been asked of the device; see ForwardTime."""
        if self._began is None:
            self._times.append(ForwardTime(chunk_tokens, whole_tokens, time.perf_counter() - self._began_s))
            return
        ended = torch.cuda.Event(enable_timing=True)
        ended.record(torch.cuda.current_stream(self._device))
        self._under_way = (self._began, ended, chunk_tokens, whole_tokens)

    def take(self) -> list[ForwardTime]:
        """Returns the forwards that were seen to end since the last call."""
        if self._under_way is not None and self._under_way[1].query():
            self._wait()
        times, self._times = self._times, []
        return times

    def _wait(self) -> None:
        if self._under_way is None:
            return
        began, ended, chunk_tokens, whole_tokens = self._under_way
        ended.synchronize()
        self._times.append(ForwardTime(chunk_tokens, whole_tokens, began.elapsed_time(ended) / 1000))
        self._under_way = None
