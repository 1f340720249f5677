"""Small requests beside large ones on devices of every speed, played by a clock: no test here depends on a machine."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from penstock.engine.protocol.config import SchedulerConfig
from penstock.engine.scheduling import Scheduler
from penstock.engine.scheduling.fair_queue import SLOWDOWN

from .records import make_request, tokens_of

BUDGET = 2048
MAX_WAIT_S = SchedulerConfig().max_wait_s
LARGE, SMALL = [250] * 100, [8]
RATES = [200, 500, 1_000, 2_000, 5_000, 20_000, 100_000]
"""Tokens a second."""


@dataclass
class Device:
    """A scheduler over a device that does so many tokens a second, and what became of each request."""

    rate: float
    scheduler: Scheduler = field(
        default_factory=lambda: Scheduler(SchedulerConfig(), token_budget=BUDGET, max_seq_len=512)
    )
    knows_rate: bool = True
    now_s: float = 0.0
    forwards: list[tuple[float, int, int]] = field(default_factory=list)
    """When each ended, its tokens, and the sequences that found no place in it."""
    arrivals: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    """From the arrival of a request to its end."""
    coming: list[tuple[float, int, list[int], int, str]] = field(default_factory=list)
    """Arrival, number, lengths, priority, client."""

    def send(self, lengths: list[int], at_s: float, priority: int = 0, client: str = "") -> int:
        number = len(self.arrivals)
        self.arrivals[number] = at_s
        self.coming.append((at_s, number, lengths, priority, client))
        return number

    def step(self) -> None:
        """Take in what has come by now, and run a forward."""
        self.coming.sort()
        if not self.scheduler.requests and self.coming:
            self.now_s = max(self.now_s, self.coming[0][0])
        while self.coming and self.coming[0][0] <= self.now_s:
            at_s, number, lengths, priority, client = self.coming.pop(0)
            self.scheduler.add(make_request(number, lengths, at_s, priority, client=client))
        batch = self.scheduler.schedule(self.now_s)
        step_s = tokens_of(batch) / self.rate + 0.001
        self.now_s += step_s
        self.forwards.append((self.now_s, tokens_of(batch), batch.num_left))
        for request in self.scheduler.finish(batch):
            self.seconds[request.request_id] = self.now_s - request.arrival_s
        if self.knows_rate:
            long = sum(chunk.num_tokens for chunk in batch.chunks if chunk.sequence.is_long)
            self.scheduler.chunk_sizes.record(long, tokens_of(batch) - long, step_s)

    def num_forwards(self, number: int) -> int:
        """Forwards that ended while a request waited and ran: with that under way when it came, and its own."""
        begin_s = self.arrivals[number]
        return sum(begin_s < ended_s <= begin_s + self.seconds[number] + 1e-9 for ended_s, *_ in self.forwards)


def play(device: Device, larges: list[int], num_small: int = 1, share: float = 0.0) -> list[int]:
    """Run large requests to their end beside clients that ask for little, one request after the other.

    Those of whom nobody waits for an answer bring `share` of what the device can do.
    """
    chance = random.Random(0)
    device.send([64] * 32, 0.0)
    while device.scheduler.requests or device.coming:  # so that its speed is known
        device.step()
    begin_s = device.now_s
    numbers = [device.send(list(LARGE), begin_s + after_s) for after_s in larges]
    smalls = [device.send(SMALL, begin_s + chance.random() * BUDGET / device.rate) for _ in range(num_small)]
    under_way, next_s = set(smalls), begin_s
    while not all(number in device.seconds for number in numbers):
        while share and next_s < device.now_s + BUDGET / device.rate:
            next_s += chance.expovariate(share * device.rate / SMALL[0])
            smalls.append(device.send(SMALL, next_s))
        device.step()
        for number in [number for number in under_way if number in device.seconds]:
            under_way.remove(number)
            pause_s = chance.random() * BUDGET / device.rate
            under_way.add(device.send(SMALL, device.arrivals[number] + device.seconds[number] + pause_s))
            smalls.append(max(under_way))
    return [number for number in smalls if number in device.seconds]


def bound(rate: float) -> float:
    """Forwards: three, or as many as fit in the time for which likes may go before others, and two."""
    return max(3, 2 + math.ceil(MAX_WAIT_S * rate / BUDGET))


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(
    ("larges", "num_small", "share"),
    [([0], 1, 0.0), ([0], 8, 0.0), ([0, 1, 2], 1, 0.0), ([0] * 5, 4, 0.0), ([0], 1, 0.4), ([0, 1, 2, 3], 1, 0.4)],
)
def test_small_requests_do_not_wait_for_large_ones(
    rate: float, larges: list[int], num_small: int, share: float
) -> None:
    device = Device(rate)
    smalls = play(device, larges, num_small, share)
    waits = [device.num_forwards(number) for number in smalls]
    assert np.percentile(waits, 99) <= bound(rate), f"{max(waits)} forwards at most"
    full = device.scheduler.chunk_sizes.forward_tokens(BUDGET)
    sizes = [num_tokens for _, num_tokens, num_left in device.forwards[2:] if num_left]
    assert min(sizes) > 0.95 * full - max(LARGE)  # else one more had found room


@pytest.mark.parametrize("rate", [500, 20_000])
def test_equal_large_requests_run_in_the_order_of_arrival(rate: float) -> None:
    device = Device(rate)
    play(device, [0, 0.1, 0.2, 0.3])
    ends = [device.arrivals[number] + device.seconds[number] for number in range(1, 5)]
    assert ends == sorted(ends)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("num_large", [1, 5, 20])
def test_all_texts_of_a_small_request_run_at_once(rate: float, num_large: int) -> None:
    """Eight texts of 64 tokens beside large requests wait for one forward, and for their own."""
    device = Device(rate)
    for _ in range(num_large):
        device.send(list(LARGE), 0.0)
    small = device.send([64] * 8, 1.5 * BUDGET / rate)
    while small not in device.seconds:
        device.step()
    assert device.num_forwards(small) <= 3


@pytest.mark.parametrize("rate", [500, 20_000])
def test_a_large_request_ends_under_an_overload_of_small_ones(rate: float) -> None:
    """Small requests bring 1.5 times what the device can do; a full queue of 8 s refuses the rest."""
    device, chance, next_s = Device(rate), random.Random(0), 0.0
    large = device.send(list(LARGE), 4.0)
    while large not in device.seconds:
        while next_s < device.now_s + 1:
            next_s += chance.expovariate(1.5 * rate / 64)
            if device.scheduler.waiting.num_tokens < 8 * rate + sum(LARGE):
                device.send([64], next_s)
        device.step()
        assert device.now_s < 4.0 + (SLOWDOWN + 1) * sum(LARGE) / rate + 3 * 8
