"""Where memory is short: who gets it, who gives it up, how chunks and batches shrink, and how they grow again."""

from __future__ import annotations

import pytest

from penstock.engine.protocol.config import SchedulerConfig
from penstock.engine.scheduling import Batch, QueuedSequence, Scheduler

from .pair import BLOCK, House, Pair
from .records import make_request, request_ids, run, tokens_of

NO_PREFIXES = House(prefixes=False, chunk_size=8)


def preempted(batch: Batch) -> list[int]:
    return [sequence.request.request_id for sequence, _ in batch.preempted]


# Who gets it


def test_those_whose_turns_are_latest_give_way_and_no_more_than_are_needed() -> None:
    pair = Pair(NO_PREFIXES)  # 160 tokens
    for priority in (3, 1, 2):
        pair.add(40, priority=priority)
        pair.step(0.0)
    assert len(pair.scheduler.prefill.requests) == 3
    pair.add(100)
    assert preempted(pair.step()) == [0, 2]
    pair.add(60, priority=1)  # later than the one that is left: it waits
    assert preempted(pair.step()) == []
    pair.run_all()


def test_nobody_gives_way_where_that_would_not_do() -> None:
    pair = Pair(NO_PREFIXES)
    pair.add(80)  # its turn is first
    pair.step(0.0)
    pair.add(60, priority=3)
    pair.step(0.0)
    pair.add(100, priority=1)  # 80 and 100 do not fit
    assert preempted(pair.step(0.0)) == []
    assert {name[0] for name in pair.scheduler.prefill.requests} == {0, 1}


def test_what_gave_way_keeps_its_turn_and_its_place_among_others() -> None:
    pair = Pair(NO_PREFIXES)
    pair.add(100, priority=1)
    pair.step(0.0)
    (sequence,) = pair.requests[0].sequences
    turn_s, order = sequence.turn_s, sequence.order
    pair.add(100, priority=1)  # as urgent, and later
    pair.add(100, priority=0)
    assert preempted(pair.step()) == [0]
    assert (sequence.turn_s, sequence.order) == (turn_s, order)
    ended, forgotten = [request.request_id for request in pair.requests], []
    while pair.scheduler.requests:
        batch = pair.step()
        forgotten += batch.ended
        ended += [chunk.sequence.request.request_id for chunk in batch.chunks if chunk.is_last]
    assert ended[-3:] == [2, 0, 1]
    assert sequence in forgotten


@pytest.mark.parametrize("budget", [32, 128])  # it would go on from batch to batch, and within one
def test_three_of_two_clients_do_not_take_memory_from_each_other_for_ever(budget: int) -> None:
    pair = Pair(House(prefixes=False, budget=budget, chunk_size=32))  # two of them have room
    pair.add(70, priority=2, client="a")
    pair.step()
    pair.add(70, priority=2, client="b")  # came after the first
    pair.step()
    pair.add(70, priority=-2, client="a")  # came after the second, and is more urgent than the first
    assert [number for batch in pair.run_all() for number in preempted(batch)] == [0, 1]


def test_a_client_is_charged_once_for_what_gave_way() -> None:
    pair = Pair(NO_PREFIXES)
    pair.add(100, priority=1, client="a")
    pair.add(*[100] * 3, priority=4, client="a")  # so that it always waits
    for _ in range(3):
        pair.step(0.0)
    waiting = pair.scheduler.waiting._clients
    assert waiting["a"].tokens == 100
    done = pair.requests[0].sequences[0].num_done
    assert done > 0
    pair.add(90, client="a")
    assert preempted(pair.step(0.0)) == [0]
    assert waiting["a"].tokens == done + 90  # what was done of it has been had
    while pair.requests[0].request_id in pair.scheduler.requests:
        pair.step(0.0)
    assert waiting["a"].tokens >= 190
    assert (waiting["a"].tokens - 190) % 100 == 0


# How chunks shrink


def test_the_pressure_is_that_of_the_device_where_that_is_known() -> None:
    sizes, pressures = [], []
    pair = Pair(House(num_blocks=100, prefixes=False))
    pair.add(200)
    pair.record(32, 0, 0.001)  # a chunk may have all of a batch
    for free_tokens in (None, 32, 100, 24, 8, 0):
        sizes.append(tokens_of(pair.step(0.0, free_tokens=free_tokens)))
        pressures.append(pair.scheduler.memory_pressure)
    assert pressures == [0.0, 0.0, 0.0, 0.25, 0.75, 1.0]
    assert sizes == [32, 32, 32, 24, 8, 1]


def test_a_budget_that_shrank_says_that_memory_is_short() -> None:
    pair = Pair(House(num_blocks=100, prefixes=False))
    pair.add(200)
    pair.shrink(24)
    pair.step(0.0)
    assert pair.scheduler.memory_pressure == 0.25


def test_the_use_of_the_pool_counts_while_a_sequence_waits_for_it() -> None:
    pair = Pair(House(prefixes=False))  # 40 blocks of 4
    pair.add(120)
    pair.step(0.0)
    assert pair.sequence_pool.usage == 0.75
    assert pair.scheduler.memory_pressure == 0.0
    pair.record(32, 0, 0.001)
    pair.add(100)
    batch = pair.step(2.0)  # the other's chunks are due later now, and yet it does not give way
    assert pair.scheduler.memory_pressure == 0.375
    assert [chunk.num_tokens for chunk in batch.chunks] == [20]
    pair.cancel(1)
    pair.step(0.0)
    assert pair.scheduler.memory_pressure == 0.0


def test_a_budget_that_was_lowered_is_doubled_after_every_32_forwards() -> None:
    scheduler = Scheduler(SchedulerConfig(), token_budget=128, max_seq_len=32)
    scheduler.add(make_request(0, [32] * 500))
    scheduler.shrink(40)
    budgets = []
    for _ in range(70):
        budgets.append(scheduler.token_budget)
        run(scheduler)
    assert budgets == [40] * 32 + [80] * 32 + [128] * 6


def test_a_shortage_begins_the_count_again() -> None:
    scheduler = Scheduler(SchedulerConfig(), token_budget=128, max_seq_len=32)
    scheduler.add(make_request(0, [32] * 500))
    scheduler.shrink(64)
    for _ in range(31):
        run(scheduler)
    scheduler.shrink(100)  # more than it is: it stays
    assert scheduler.token_budget == 64
    for _ in range(31):
        run(scheduler)
    assert scheduler.token_budget == 64
    run(scheduler)
    assert scheduler.token_budget == 128


def test_a_budget_falls_to_a_thirty_second_of_itself_and_no_further() -> None:
    pair = Pair(House(budget=128))
    pair.shrink(1)
    assert pair.scheduler.token_budget == 4


# Repeated texts


def test_batches_keep_to_the_budget_whatever_is_found_of_them() -> None:
    pair = Pair(House(num_blocks=100, max_num_seqs=64))
    for num_tokens in (16, 12, 8):
        pair.add(num_tokens, last_row=True)
    pair.run_all()
    pair.add(*[16] * 20, last_row=True)  # all but the last block of each is there
    batch = pair.step()
    assert [(chunk.start, chunk.end) for chunk in batch.chunks] == [(12, 16)] * 8
    pair.shrink(14)
    batch = pair.step()
    assert [(chunk.start, chunk.end) for chunk in batch.chunks] == [(12, 16)] * 3
    pair.run_all()


def test_a_text_of_one_block_leaves_the_cache_alone() -> None:
    pair = Pair(House(num_blocks=100))
    for num_tokens, starts in ((7, [0]), (7, [0]), (8, [0]), (8, [4]), (7, [0])):
        pair.add(num_tokens, last_row=True)
        assert [chunk.start for chunk in pair.step().chunks] == starts


@pytest.mark.parametrize("num_tokens", [12, 100])
def test_what_a_failed_chunk_left_is_not_found_by_others(num_tokens: int) -> None:
    pair = Pair(House(num_blocks=100))
    assert pair.sequence_pool.prefixes is not None
    pair.add(num_tokens, last_row=True)
    batch = pair.step(failing=[0])
    assert len(batch.chunks) == 1
    assert pair.sequence_pool.prefixes.num_cached == 0
    pair.step()
    assert pair.sequence_pool.prefixes.num_cached == pair.requests[0].sequences[0].num_done // BLOCK
    pair.run_all()


# Requests of many sequences


@pytest.mark.parametrize("is_late", [True, False])
def test_a_request_of_long_and_short_ones_ends_as_a_whole(is_late: bool) -> None:
    pair = Pair(House(num_blocks=60, max_num_seqs=4, chunk_size=8))
    number = pair.add(10, 120, 9, 80, 70, 8, *[5] * 20, timeout_s=1.0)
    other = pair.add(30, 5)
    for _ in range(3):
        pair.step()
    sequences = pair.requests[number].sequences
    kinds = {(str(sequence.status), sequence.is_long) for sequence in sequences}
    assert kinds == {("ended", False), ("waiting", False), ("running", True), ("waiting", True)}
    if is_late:
        assert pair.step(1.0).expired == [pair.requests[number]]
    else:
        pair.cancel(number)
    assert {sequence.status for sequence in sequences} == {"ended"}
    assert not any(held(sequence) for sequence in sequences)
    while pair.scheduler.requests:
        assert request_ids(pair.step()) == {other}


def held(sequence: QueuedSequence) -> bool:
    return sequence.chunk is not None or sequence.allocation is not None
