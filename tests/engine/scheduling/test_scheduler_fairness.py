"""Shares of clients that send requests all the time."""

from collections import Counter

import pytest
from hypothesis import example, given, settings, strategies as st

from penstock.engine.protocol.config import ChunkedPrefillConfig
from penstock.engine.scheduling import KvCachePool, Scheduler, SequencePool

from .records import make_request, run

BUDGET = 256
MAX_SEQ_LEN = 128


class Load:
    """Keeps requests of several clients waiting, and counts the tokens of each client that ran."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(max_num_seqs=16, max_wait_s=0.5, token_budget=BUDGET, max_seq_len=MAX_SEQ_LEN)
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
        max_num_seqs=16,
        max_wait_s=0.5,
        token_budget=64,
        max_seq_len=4000,
        prefill_config=ChunkedPrefillConfig(chunk_size=32, threshold=64, min_chunk_size=16, is_dynamic=False),
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
