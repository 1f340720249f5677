"""Where memory is short: who gets it, who gives it up, how chunks and batches shrink, and how they grow again."""

from __future__ import annotations

import pytest

from penstock.engine.protocol.config import SchedulerConfig
from penstock.engine.scheduling import Batch, QueuedSequence, Scheduler

from .checked import BLOCK, CheckedScheduler, Setup
from .records import make_request, request_ids, run, tokens_of

NO_PREFIXES = Setup(prefixes=False, chunk_size=8)


def preempted(batch: Batch) -> list[int]:
    return [sequence.request.request_id for sequence, _ in batch.preempted]


# Who gets it


def test_a_long_prompt_gets_memory_that_short_ones_hold_in_turn() -> None:
    checked = CheckedScheduler(Setup(num_blocks=20, chunk_size=32))
    scheduler, running = checked.scheduler, Batch()
    long: int | None = None
    for number in range(40):
        for _ in range(3):
            checked.add(16, last_row=True, text=1_000 + len(checked.requests))  # none finds a prefix
        if number == 2:
            long = checked.add(20 * BLOCK, last_row=True)
        batch = scheduler.schedule(0.1 * number)
        scheduler.allow_next_chunks(batch)
        scheduler.finish(running)
        running = batch
        if long is not None and long not in scheduler.requests:
            return
    pytest.fail("batches overlap, and one of two always holds a block")


def test_the_last_arrived_are_preempted_and_no_more_than_needed() -> None:
    checked = CheckedScheduler(NO_PREFIXES)  # 160 tokens
    for priority in (30, 10, 20):
        checked.add(40, priority=priority)
        checked.step(0.0)
    assert len(checked.scheduler.prefill.requests) == 3
    checked.add(100, priority=-50)
    assert preempted(checked.step()) == [0, 2]
    checked.add(60, priority=40)
    assert preempted(checked.step()) == []
    checked.run_all()


def test_a_long_request_does_not_preempt_a_shorter_one() -> None:
    checked = CheckedScheduler(NO_PREFIXES)  # 160 tokens
    checked.add(40)
    checked.step()
    checked.add(150)  # waits for memory
    checked.step()
    checked.add(100)
    batches = checked.run_all()
    assert [number for batch in batches for number in preempted(batch)] == []
    ended = [chunk.sequence.request.request_id for batch in batches for chunk in batch.chunks if chunk.is_last]
    assert ended == [0, 2, 1]


def test_none_is_preempted_if_that_is_not_enough() -> None:
    checked = CheckedScheduler(NO_PREFIXES)
    checked.add(80)  # its turn is first
    checked.step(0.0)
    checked.add(60, priority=3)
    checked.step(0.0)
    checked.add(100, priority=1)  # 80 and 100 do not fit
    assert preempted(checked.step(0.0)) == []
    assert {name[0] for name in checked.scheduler.prefill.requests} == {0, 1}


def test_a_preempted_sequence_keeps_its_place_in_the_queue() -> None:
    checked = CheckedScheduler(NO_PREFIXES)
    checked.add(100, priority=1)
    checked.step(0.0)
    (sequence,) = checked.requests[0].sequences
    due = sequence.request.due
    checked.add(100, priority=1)
    checked.add(100, priority=-5)
    assert preempted(checked.step()) == [0]
    assert sequence.request.due == due
    ended, finished = [], []
    while checked.scheduler.requests:
        batch = checked.step()
        finished += batch.finished
        ended += [chunk.sequence.request.request_id for chunk in batch.chunks if chunk.is_last]
    assert ended == [2, 0, 1]
    assert sequence in finished


@pytest.mark.parametrize("budget", [32, 128])  # it would go on from batch to batch, and within one
def test_sequences_of_two_clients_do_not_preempt_in_a_circle(budget: int) -> None:
    checked = CheckedScheduler(Setup(prefixes=False, budget=budget, chunk_size=32))  # two of them have room
    checked.add(70, priority=20, client="a")
    checked.step()
    checked.add(70, priority=20, client="b")  # came after the first
    checked.step()
    checked.add(70, priority=-20, client="a")  # came after the second, and is more urgent than the first
    assert [number for batch in checked.run_all() for number in preempted(batch)] == [0, 1]


def test_a_client_is_charged_once_for_a_preempted_sequence() -> None:
    checked = CheckedScheduler(NO_PREFIXES)
    queue = checked.scheduler.waiting
    checked.add(100, priority=10, client="a")
    (sequence,) = checked.requests[0].sequences
    start = queue.order(sequence)[0]
    for _ in range(3):
        checked.step(0.0)
    checked.add(100, client="a")
    assert preempted(checked.step(0.0)) == [0]
    checked.run_all()
    assert queue.order(sequence)[0] == start + 200


# How chunks shrink


def test_pressure_follows_the_free_memory_of_the_device() -> None:
    sizes, pressures = [], []
    checked = CheckedScheduler(Setup(num_blocks=100, prefixes=False))
    checked.add(200)
    checked.scheduler.chunk_sizes.record(32, 0, 0.001)  # a chunk may have all of a batch
    for free_tokens in (None, 32, 100, 24, 8, 0):
        sizes.append(tokens_of(checked.step(0.0, free_tokens=free_tokens)))
        pressures.append(checked.scheduler.memory_pressure)
    assert pressures == [0.0, 0.0, 0.0, 0.25, 0.75, 1.0]
    assert sizes == [32, 32, 32, 24, 8, 1]


def test_a_lowered_budget_is_memory_pressure() -> None:
    checked = CheckedScheduler(Setup(num_blocks=100, prefixes=False))
    checked.add(200)
    checked.shrink(24)
    checked.step(0.0)
    assert checked.scheduler.memory_pressure == 0.25


def test_pool_usage_is_pressure_while_a_sequence_waits() -> None:
    checked = CheckedScheduler(Setup(prefixes=False))  # 40 blocks of 4
    checked.add(120)
    checked.step(0.0)
    assert checked.sequence_pool.usage == 0.75
    assert checked.scheduler.memory_pressure == 0.0
    checked.scheduler.chunk_sizes.record(32, 0, 0.001)
    checked.add(100)
    batch = checked.step(2.0)  # the other's chunks are due later now, and yet it does not give way
    assert checked.scheduler.memory_pressure == 0.375
    assert [chunk.num_tokens for chunk in batch.chunks] == [20]
    checked.cancel(1)
    checked.step(0.0)
    assert checked.scheduler.memory_pressure == 0.0


def test_a_lowered_budget_is_doubled_after_32_forwards() -> None:
    scheduler = Scheduler(SchedulerConfig(), token_budget=128, max_seq_len=32)
    scheduler.add(make_request(0, [32] * 500))
    scheduler.shrink(40)
    budgets = []
    for _ in range(70):
        budgets.append(scheduler.token_budget)
        run(scheduler)
    assert budgets == [40] * 32 + [80] * 32 + [128] * 6


def test_a_shortage_restarts_the_count_of_forwards() -> None:
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


def test_a_budget_is_lowered_to_a_32nd_at_most() -> None:
    checked = CheckedScheduler(Setup(budget=128))
    checked.shrink(1)
    assert checked.scheduler.token_budget == 4


# Repeated texts


def test_cached_batches_keep_to_the_budget() -> None:
    checked = CheckedScheduler(Setup(num_blocks=100, max_num_seqs=64))
    for num_tokens in (16, 12, 8):
        checked.add(num_tokens, last_row=True)
    checked.run_all()
    checked.add(*[16] * 20, last_row=True)  # all but the last block of each is there
    batch = checked.step()
    assert [(chunk.start, chunk.end) for chunk in batch.chunks] == [(12, 16)] * 8
    checked.shrink(14)
    batch = checked.step()
    assert [(chunk.start, chunk.end) for chunk in batch.chunks] == [(12, 16)] * 3
    checked.run_all()


def test_texts_of_one_block_do_not_use_the_prefix_cache() -> None:
    checked = CheckedScheduler(Setup(num_blocks=100))
    for num_tokens, starts in ((7, [0]), (7, [0]), (8, [0]), (8, [4]), (7, [0])):
        checked.add(num_tokens, last_row=True)
        assert [chunk.start for chunk in checked.step().chunks] == starts


@pytest.mark.parametrize("num_tokens", [12, 100])
def test_failed_chunks_add_nothing_to_the_prefix_cache(num_tokens: int) -> None:
    checked = CheckedScheduler(Setup(num_blocks=100))
    assert checked.sequence_pool.prefixes is not None
    checked.add(num_tokens, last_row=True)
    batch = checked.step(failing=[0])
    assert len(batch.chunks) == 1
    assert checked.sequence_pool.prefixes.num_cached == 0
    checked.step()
    assert checked.sequence_pool.prefixes.num_cached == checked.requests[0].sequences[0].num_done // BLOCK
    checked.run_all()


# Requests of many sequences


@pytest.mark.parametrize("is_late", [True, False])
def test_a_request_with_long_and_short_inputs_ends_whole(is_late: bool) -> None:
    checked = CheckedScheduler(Setup(num_blocks=60, max_num_seqs=4, chunk_size=8))
    number = checked.add(10, 120, 9, 80, 70, 8, *[5] * 20, timeout_s=1.0)
    other = checked.add(30, 5)
    for _ in range(3):
        checked.step()
    sequences = checked.requests[number].sequences
    kinds = {(str(sequence.status), sequence.is_long) for sequence in sequences}
    assert kinds == {("finished", False), ("waiting", False), ("running", True), ("waiting", True)}
    if is_late:
        assert checked.step(1.0).expired == [checked.requests[number]]
    else:
        checked.cancel(number)
    assert {sequence.status for sequence in sequences} == {"finished"}
    assert not any(held(sequence) for sequence in sequences)
    while checked.scheduler.requests:
        assert request_ids(checked.step()) == {other}


def held(sequence: QueuedSequence) -> bool:
    return sequence.chunk is not None or sequence.allocation is not None
