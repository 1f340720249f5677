"""Several processes refuse as one would: each rule, whichever of them is asked."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator

import pytest

from penstock.engine.client.admission import Admission
from penstock.engine.client.replicas.drain_rate import DrainRate
from penstock.engine.client.shared import admission as module
from penstock.engine.client.shared.admission import SharedAdmission, SharedStats
from penstock.engine.client.shared.load_board import LoadBoard, LoadPlace
from penstock.engine.client.stats import DispatcherStats
from penstock.engine.protocol.errors import EngineOverloadedError

NUM_PLACES = 4


class Processes:
    """The admission of several processes, and of the one that hears of the core."""

    def __init__(self, board: LoadBoard, max_tokens: int, max_queue_s: float = math.inf) -> None:
        self.board = board
        places = [LoadPlace(board, i) for i in range(NUM_PLACES)]
        self.all = [SharedAdmission(SharedStats(p), max_tokens, max_queue_s, board, p) for p in places]
        self.rate = DrainRate()
        self.keeper = SharedAdmission(DispatcherStats(), max_tokens, max_queue_s, board)

    def follow(self, num_tokens: int, seconds: float, budget: int) -> None:
        self.board.token_budget = budget
        self.rate.follow(num_tokens, seconds)
        self.board.tokens_per_s = self.rate.tokens_per_s


@pytest.fixture
def board() -> Iterator[LoadBoard]:
    board = LoadBoard.create(NUM_PLACES)
    yield board
    board.close()


def test_one_budget_is_for_all_of_them(board: LoadBoard) -> None:
    processes = Processes(board, 1_000)
    for i in range(10):
        processes.all[i % NUM_PLACES].enter(100)
    for admission in (*processes.all, processes.keeper):
        assert admission.is_full
        with pytest.raises(EngineOverloadedError, match="1000 tokens are under way"):
            admission.check()
    processes.all[0].leave(100)
    processes.all[3].check()
    assert processes.keeper.figures().num_tokens == 900
    assert processes.keeper.figures().num_requests == 9
    assert processes.all[1].figures().num_refused_total == 5 - 1  # the keeper has no place: it refuses nobody


def test_the_time_that_all_take_counts(board: LoadBoard) -> None:
    processes = Processes(board, 10**6, max_queue_s=2.0)
    processes.follow(1_000, 1.0, budget=100)
    assert processes.all[2].queue_s == 0.0
    for admission in processes.all:
        admission.enter(600)
    assert [a.queue_s for a in processes.all] == [pytest.approx(2.4)] * NUM_PLACES
    assert not processes.all[0].is_full  # each large request counts for a sixteenth of the limit
    for _ in range(6):
        for admission in processes.all:
            admission.enter(63)
    assert processes.all[1].is_full
    with pytest.raises(EngineOverloadedError, match="about 2 s of work"):
        processes.all[3].check()


def test_a_client_is_the_same_in_each_of_them(board: LoadBoard) -> None:
    processes = Processes(board, 1_000)
    processes.all[0].enter(600, "ab")
    processes.all[1].enter(450, "ab")
    for _ in range(2):
        processes.all[2].check("cd")
        processes.all[3].enter(250, "cd")
    for client, num_tokens in (("ab", 1_050), ("cd", 500)):
        with pytest.raises(EngineOverloadedError, match=f"2 API keys .* 500 tokens .* yours has {num_tokens}"):
            processes.all[2].check(client)


def test_they_decide_as_one_process_would(board: LoadBoard) -> None:
    """The same requests, asked anywhere: let in and refused alike, with the same words."""
    chance = random.Random(11)
    processes = Processes(board, 5_000, max_queue_s=2.0)
    stats = DispatcherStats()
    rate = DrainRate()
    alone = Admission(stats, 5_000, 2.0, [rate])
    under_way: list[tuple[int, int, str]] = []
    num_refused = 0
    for _ in range(4_000):
        if chance.random() < 0.1:
            tokens, seconds, budget = chance.randrange(50, 400), chance.uniform(0.05, 0.4), chance.randrange(20, 200)
            stats.token_budget = budget
            rate.follow(tokens, seconds)
            processes.follow(tokens, seconds, budget)
        if under_way and chance.random() < 0.4:
            place, size, client = under_way.pop(chance.randrange(len(under_way)))
            alone.leave(size, client)
            processes.all[place].leave(size, client)
            continue
        place, client = chance.randrange(NUM_PLACES), chance.choice(["", "a", "b"])
        size = chance.choice([chance.randrange(1, 60), chance.randrange(1, 1_500)])
        told = []
        for admission in (alone, processes.all[place]):
            with contextlib.suppress(EngineOverloadedError):
                try:
                    admission.enter(size, client)
                    told.append(None)
                except EngineOverloadedError as error:
                    told.append((error.message, error.retry_after_s))
        assert told[0] == told[1]
        num_refused += told[0] is not None
        if told[0] is None:
            under_way.append((place, size, client))
        assert alone.is_full == processes.all[0].is_full == processes.keeper.is_full
        assert alone.queue_s == processes.all[1].queue_s
    assert num_refused > 200
    assert processes.keeper.figures().num_refused_total == stats.num_refused_total
    assert processes.keeper.figures().num_tokens == stats.num_tokens


def test_a_place_without_room_refuses(board: LoadBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(board, 1_000)
    monkeypatch.setattr(LoadPlace, "has_room", False)
    monkeypatch.setattr(module, "MAX_REQUESTS", 7)
    with pytest.raises(EngineOverloadedError, match="has 7 requests under way"):
        processes.all[0].enter(1)
