"""Shares of clients, and waiting times on simulated devices of different speeds."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from penstock.engine.protocol.config import ChunkedPrefillConfig, SchedulerConfig
from penstock.engine.scheduling import KvCachePool, Scheduler, SequencePool
from penstock.engine.scheduling.fair_queue import SLOWDOWN

from .records import make_request, run, tokens_of

BUDGET = 256
MAX_SEQ_LEN = 128


class Load:
    """Keeps requests of several clients waiting, and counts the tokens of each client that ran."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(SchedulerConfig(max_num_seqs=16), token_budget=BUDGET, max_seq_len=MAX_SEQ_LEN)
        self.num_requests = 0
        self.now_s = 0.0
        self.tokens: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()

    def send(self, client: str, lengths: list[int], priority: int = 0) -> None:
        self.num_requests += 1
        self.waiting[client] += sum(lengths)
        self.scheduler.add(make_request(self.num_requests, lengths, self.now_s, priority, client=client))

    def step(self) -> list[str]:
        self.now_s += 0.1
        batch = run(self.scheduler, self.now_s)
        for chunk in batch.chunks:
            self.tokens[chunk.sequence.request.client] += chunk.num_tokens
            self.waiting[chunk.sequence.request.client] -= chunk.num_tokens
        return [chunk.sequence.request.client for chunk in batch.chunks]


large = st.lists(st.integers(20, MAX_SEQ_LEN), min_size=1, max_size=8)


@settings(max_examples=25)
@example(first=[20], second=[32], third=[21], priorities=(0, 1, 0))
@given(first=large, second=large, third=large, priorities=st.tuples(*[st.integers(-999, 999)] * 3))
def test_clients_that_always_wait_get_equal_shares(
    first: list[int], second: list[int], third: list[int], priorities: tuple[int, int, int]
) -> None:
    load = Load()
    requests = {"a": first * 5, "b": second * 2, "c": third}  # a sends many inputs at once, c few
    for _ in range(120):
        for (client, lengths), priority in zip(requests.items(), priorities, strict=True):
            while load.waiting[client] < 3 * BUDGET:
                load.send(client, lengths, priority)
        load.step()
    assert len(load.tokens) == 3
    assert max(load.tokens.values()) - min(load.tokens.values()) <= 5 * BUDGET  # a window and a step


def test_small_client_runs_before_the_backlog_of_another() -> None:
    load = Load()
    for _ in range(100):
        load.send("heavy", [60] * 50)
    for _ in range(20):
        load.step()
        load.send("light", [5])
        assert "light" in load.step()
        assert load.step() == ["heavy"] * 4


def test_pause_of_a_client_changes_no_shares() -> None:
    load = Load()
    load.send("a", [100] * 1_000)
    for _ in range(100):
        load.step()
    load.send("b", [100] * 1_000)
    load.tokens.clear()
    for _ in range(100):
        load.step()
    assert abs(load.tokens["a"] - load.tokens["b"]) <= BUDGET


def long_load(num_blocks: int) -> Scheduler:
    """Returns a scheduler that runs sequences of more than 64 tokens in chunks of 32."""
    return Scheduler(
        SchedulerConfig(max_num_seqs=16),
        token_budget=64,
        max_seq_len=4000,
        prefill=ChunkedPrefillConfig(chunk_size=32, threshold=64, min_chunk_size=16, is_dynamic=False),
        sequence_pool=SequencePool(kv=KvCachePool(num_blocks, 16)),
    )


def test_long_prompts_of_two_clients_get_equal_shares() -> None:
    scheduler, tokens = long_load(1_000), Counter[str]()
    for number in range(25):
        scheduler.add(make_request(number, [320 if number < 20 else 1280], client="a" if number < 20 else "b"))
    for step in range(60):
        for chunk in run(scheduler, 0.1 * step).chunks:
            tokens[chunk.sequence.request.client] += chunk.num_tokens
        assert abs(tokens["a"] - tokens["b"]) <= 64
    assert tokens.total() == 60 * 64


@pytest.mark.parametrize("num_blocks", [60, 1_000])  # for three of the prompts, and for all
@pytest.mark.parametrize("client", ["", "a"])
def test_priority_delays_only_prompts_of_the_same_client(client: str, num_blocks: int) -> None:
    def num_steps(priority: int) -> int:
        """Returns the steps of a prompt of `b` beside prompts of this priority."""
        scheduler = long_load(num_blocks)
        for number in range(100):
            scheduler.add(make_request(number, [320], 0.1 * number, priority, client=client))
            if number == 10:
                scheduler.add(make_request(1_000, [320], 1.0, client="b" if client else ""))
            run(scheduler, 0.1 * number)
            if number > 10 and 1_000 not in scheduler.requests:
                return number - 10
        return 100

    if client:
        assert num_steps(-999) <= num_steps(0) < 60
    else:
        assert num_steps(-999) == 100


def test_priority_preempts_only_prompts_of_the_same_client() -> None:
    scheduler = long_load(40)
    scheduler.add(make_request(1, [320], 0.0, 5, client="a"))
    scheduler.add(make_request(2, [320], 0.0, 5, client="b"))
    run(scheduler, 0.1)
    scheduler.add(make_request(3, [320], 0.2, -999, client="b"))
    batch = run(scheduler, 0.2)
    assert [sequence.request_id for sequence, _ in batch.preempted] == [(2, 0)]


# Waiting times

FORWARD_TOKENS = 2048
MAX_WAIT_S = SchedulerConfig().max_wait_s
LARGE, SMALL = [250] * 100, [8]
RATES = [200, 500, 1_000, 5_000, 100_000]
"""Tokens a second."""


@dataclass
class Device:
    """Simulates a device that runs `rate` tokens a second."""

    rate: float
    scheduler: Scheduler = field(
        default_factory=lambda: Scheduler(SchedulerConfig(), token_budget=FORWARD_TOKENS, max_seq_len=512)
    )
    now_s: float = 0.0
    forwards: list[tuple[float, int, int]] = field(default_factory=list)  # end, tokens, sequences that were left
    arrivals: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)  # from the arrival of a request to its end
    coming: list[tuple[float, int, list[int]]] = field(default_factory=list)

    def send(self, lengths: list[int], at_s: float) -> int:
        number = len(self.arrivals)
        self.arrivals[number] = at_s
        self.coming.append((at_s, number, lengths))
        return number

    def step(self) -> None:
        """Adds the requests that have arrived, and runs a forward."""
        self.coming.sort()
        if not self.scheduler.requests and self.coming:
            self.now_s = max(self.now_s, self.coming[0][0])
        while self.coming and self.coming[0][0] <= self.now_s:
            at_s, number, lengths = self.coming.pop(0)
            self.scheduler.add(make_request(number, lengths, at_s))
        batch = self.scheduler.schedule(self.now_s)
        step_s = tokens_of(batch) / self.rate + 0.001
        self.now_s += step_s
        self.forwards.append((self.now_s, tokens_of(batch), batch.num_left))
        for request in self.scheduler.finish(batch):
            self.seconds[request.request_id] = self.now_s - request.arrival_s
        self.scheduler.chunk_sizes.record(0, tokens_of(batch), step_s)

    def num_forwards(self, number: int) -> int:
        """Returns the forwards that ended between the arrival of a request and its end."""
        begin_s = self.arrivals[number]
        return sum(begin_s < ended_s <= begin_s + self.seconds[number] + 1e-9 for ended_s, *_ in self.forwards)


def play(device: Device, larges: list[float], num_small: int = 1, share: float = 0.0) -> list[int]:
    """Runs large requests beside `num_small` clients that send one small request after the other.

    Further small requests arrive at random, and bring `share` of the tokens that the device can run.
    """
    chance = random.Random(0)
    device.send([64] * 32, 0.0)
    while device.scheduler.requests or device.coming:  # measures the speed
        device.step()
    begin_s = device.now_s
    numbers = [device.send(list(LARGE), begin_s + after_s) for after_s in larges]
    forward_s = FORWARD_TOKENS / device.rate
    smalls = [device.send(SMALL, begin_s + chance.random() * forward_s) for _ in range(num_small)]
    running, next_s = set(smalls), begin_s
    while not all(number in device.seconds for number in numbers):
        while share and next_s < device.now_s + forward_s:
            next_s += chance.expovariate(share * device.rate / SMALL[0])
            smalls.append(device.send(SMALL, next_s))
        device.step()
        for number in [number for number in running if number in device.seconds]:
            running.remove(number)
            ended_s = device.arrivals[number] + device.seconds[number]
            running.add(device.send(SMALL, ended_s + chance.random() * forward_s))
            smalls.append(max(running))
    return [number for number in smalls if number in device.seconds]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(("larges", "num_small", "share"), [([0, 1, 2], 8, 0.0), ([0, 0, 1, 2], 1, 0.4)])
def test_small_requests_do_not_wait_for_large_ones(
    rate: float, larges: list[float], num_small: int, share: float
) -> None:
    device = Device(rate)
    waits = [device.num_forwards(number) for number in play(device, larges, num_small, share)]
    # Sequences of similar length may run before others for max_wait_s.
    most = max(3, 2 + math.ceil(MAX_WAIT_S * rate / FORWARD_TOKENS))
    assert np.percentile(waits, 99) <= most, f"{max(waits)} forwards at most"
    full = device.scheduler.chunk_sizes.forward_tokens(FORWARD_TOKENS)
    sizes = [num_tokens for _, num_tokens, num_left in device.forwards[2:] if num_left]
    assert min(sizes) > 0.95 * full - max(LARGE)  # no sequence waits beside free tokens


@pytest.mark.parametrize("rate", [500, 20_000])
def test_equal_large_requests_end_in_order_of_arrival(rate: float) -> None:
    device = Device(rate)
    play(device, [0, 0.1, 0.2, 0.3])
    ends = [device.arrivals[number] + device.seconds[number] for number in range(1, 5)]
    assert ends == sorted(ends)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("num_large", [1, 20])
def test_all_texts_of_a_small_request_run_together(rate: float, num_large: int) -> None:
    device = Device(rate)
    for _ in range(num_large):
        device.send(list(LARGE), 0.0)
    small = device.send([64] * 8, 1.5 * FORWARD_TOKENS / rate)
    while small not in device.seconds:
        device.step()
    assert device.num_forwards(small) <= 3


@pytest.mark.parametrize("rate", [500, 20_000])
def test_large_request_ends_under_an_overload_of_small_ones(rate: float) -> None:
    """Small requests bring 1.5 times the tokens that the device can run; a full queue of 8 s refuses the rest."""
    device, chance, next_s = Device(rate), random.Random(0), 0.0
    number = device.send(list(LARGE), 4.0)
    while number not in device.seconds:
        while next_s < device.now_s + 1:
            next_s += chance.expovariate(1.5 * rate / 64)
            if device.scheduler.waiting.num_tokens < 8 * rate + sum(LARGE):
                device.send([64], next_s)
        device.step()
        assert device.now_s < 4.0 + (SLOWDOWN + 1) * sum(LARGE) / rate + 3 * 8
