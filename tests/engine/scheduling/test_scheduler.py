"""Batches of short and long sequences, their memory, and the token budget."""

import pytest

from penstock.engine.scheduling import Batch, Scheduler

from .checked import BLOCK, CheckedScheduler, Setup
from .records import make_request, request_ids, run, tokens_of

MAX_SEQ_LEN = 64
NO_PREFIXES = Setup(prefixes=False, chunk_size=8)  # 160 tokens
NO_MEMORY = MemoryError("no memory")


def make(budget: int = 128, max_num_seqs: int = 8, max_wait_s: float = 1.0, **options: int) -> Scheduler:
    """Returns a scheduler that runs every sequence whole."""
    options = {"max_seq_len": MAX_SEQ_LEN, **options}
    return Scheduler(max_num_seqs=max_num_seqs, max_wait_s=max_wait_s, token_budget=budget, **options)


def preempted(batch: Batch) -> list[int]:
    return [sequence.request.request_id for sequence, _ in batch.preempted_sequences]


def spans(batches: list[Batch], number: int) -> list[tuple[int, int]]:
    chunks = [chunk for batch in batches for chunk in batch.chunks]
    return [(chunk.start, chunk.end) for chunk in chunks if chunk.sequence.request.request_id == number]


def ended(batches: list[Batch]) -> list[int]:
    """Returns the request of each last chunk, in order."""
    return [chunk.sequence.request.request_id for batch in batches for chunk in batch.chunks if chunk.is_last]


# Short sequences


def test_similar_lengths_run_together() -> None:
    scheduler = make(budget=64)
    scheduler.add(make_request(1, [10, 60, 11, 59, 12, 58]))
    batches = [run(scheduler) for _ in range(4)]
    assert [[chunk.num_tokens for chunk in b.chunks] for b in batches] == [[10, 11, 12], [60], [59], [58]]


@pytest.mark.parametrize("max_wait_s", [0.0, 1.0])
def test_higher_priority_runs_first(max_wait_s: float) -> None:
    scheduler = make(budget=64, max_wait_s=max_wait_s)
    scheduler.add(make_request(1, [60]))
    scheduler.add(make_request(2, [60], priority=-1))
    assert request_ids(scheduler.schedule(0.0)) == {2}


@pytest.mark.parametrize("num_tokens", [0, MAX_SEQ_LEN + 1])
def test_request_with_an_impossible_sequence_is_rejected(num_tokens: int) -> None:
    scheduler = make()
    with pytest.raises(ValueError, match=f"{num_tokens} tokens"):
        scheduler.add(make_request(1, [5, num_tokens]))
    assert scheduler.waiting.num_seqs == 0


@pytest.mark.parametrize(("min_batch_tokens", "num_tokens"), [(1, 100), (159, 140), (160, 160)])
def test_lanes_divide_a_queue_of_short_sequences(min_batch_tokens: int, num_tokens: int) -> None:
    scheduler = make(512, 128, max_forwards=2, min_batch_tokens=min_batch_tokens)
    scheduler.add(make_request(0, [20] * 20))
    assert tokens_of(run(scheduler)) == num_tokens  # a quarter of the queue is 100


@pytest.mark.parametrize(("lengths", "is_large"), [([31], False), ([32], True), ([5], False), ([5, 5], True)])
def test_quarter_of_a_full_batch_is_a_large_batch(lengths: list[int], is_large: bool) -> None:
    scheduler = make(budget=128, max_num_seqs=8)
    scheduler.add(make_request(0, lengths))
    assert scheduler.has_large_batch is is_large
    assert (scheduler.has_work, scheduler.has_long) == (True, False)


# Long sequences beside short ones


@pytest.mark.parametrize(("chunk_size", "sizes"), [(1, [1] * 30), (7, [7, 7, 7, 7, 2])])
def test_long_sequence_runs_in_chunks_of_a_fixed_size(chunk_size: int, sizes: list[int]) -> None:
    checked = CheckedScheduler(Setup(chunk_size=chunk_size))
    checked.add(30)
    assert [end - start for start, end in spans(checked.run_all(), 0)] == sizes


def test_chunks_leave_half_of_a_batch_to_short_sequences() -> None:
    checked = CheckedScheduler(Setup(num_blocks=1_000, chunk_size=32, max_seq_len=4_000))
    checked.add(3_200)
    checked.add(8)
    assert [(c.sequence.request.request_id, c.num_tokens) for c in checked.step().chunks] == [(1, 8), (0, 16)]
    assert tokens_of(checked.step()) == 16  # others came a moment ago: more may follow
    assert {tokens_of(batch) for batch in checked.run_all()[:-1]} == {32}


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_short_sequences_run_soon_if_batches_are_small(max_num_seqs: int) -> None:
    checked = CheckedScheduler(Setup(max_num_seqs=max_num_seqs))
    for num_tokens in (150, 5, 5):
        checked.add(num_tokens)
    batches = checked.run_all()
    assert max(place for place, batch in enumerate(batches) if request_ids(batch) & {1, 2}) <= 4


def test_urgent_prompts_do_not_starve_others() -> None:
    checked = CheckedScheduler(Setup(num_blocks=25))
    checked.add(90, priority=3)
    for number in range(1, 400):
        if number % 5 == 1:  # the device just keeps up
            checked.add(80, token_id=number)
        if 0 in ended([checked.step(0.05)]):
            return
    pytest.fail("request 0 did not finish within 400 steps")


# Memory


def test_long_prompt_gets_memory_although_short_ones_overlap() -> None:
    checked = CheckedScheduler(Setup(num_blocks=20, chunk_size=32))
    scheduler, running = checked.scheduler, Batch()
    long: int | None = None
    for number in range(40):
        for _ in range(3):
            checked.add(16, last_row=True, token_id=1_000 + len(checked.requests))  # no prefix is cached
        if number == 2:
            long = checked.add(20 * BLOCK, last_row=True)
        batch = scheduler.schedule(0.1 * number)
        scheduler.allow_next_chunks(batch)
        for chunk in running.chunks:
            checked.write(chunk)
        scheduler.finish(running)
        running = batch
        if long is not None and long not in scheduler.requests:
            return
    pytest.fail("one of two overlapping batches always holds a block")


def test_last_arrived_are_preempted_and_no_more_than_needed() -> None:
    checked = CheckedScheduler(NO_PREFIXES)
    for priority in (30, 10, 20):
        checked.add(40, priority=priority)
        checked.step(0.0)
    assert len(checked.scheduler.prefill.sequences) == 3
    checked.add(100, priority=-50)
    assert preempted(checked.step()) == [0, 2]
    checked.add(60, priority=40)
    assert preempted(checked.step()) == []
    checked.run_all()


def test_long_request_does_not_preempt_a_shorter_one() -> None:
    checked = CheckedScheduler(NO_PREFIXES)
    checked.add(40, client="other")
    checked.step()
    checked.add(150)  # waits for memory
    checked.step()
    checked.add(60)
    batches = checked.run_all()
    assert [number for batch in batches for number in preempted(batch)] == []
    assert ended(batches) == [0, 2, 1]


@pytest.mark.parametrize(("gap_s", "expected"), [(0.0, []), (0.1, [0])])
def test_priority_preempts_only_later_requests_of_other_clients(gap_s: float, expected: list[int]) -> None:
    checked = CheckedScheduler(NO_PREFIXES)
    checked.add(100, priority=5, client="a")
    checked.requests[0].arrival_s = gap_s
    checked.step(0.0)
    checked.add(100, priority=-5, client="b")
    assert preempted(checked.step(0.0)) == expected
    checked.run_all()


def test_none_is_preempted_if_that_frees_too_little() -> None:
    checked = CheckedScheduler(NO_PREFIXES)
    checked.add(80)  # arrived first
    checked.step(0.0)
    checked.add(60, priority=3)
    checked.step(0.0)
    checked.add(100, priority=1)  # 80 and 100 do not fit
    assert preempted(checked.step(0.0)) == []
    assert {name[0] for name in checked.scheduler.prefill.sequences} == {0, 1}


def test_preemption_waits_for_chunks_that_run() -> None:
    checked = CheckedScheduler(NO_PREFIXES)
    checked.add(100, priority=5)
    running = checked.scheduler.schedule(0.0)
    checked.scheduler.allow_next_chunks(running)
    checked.add(100, priority=-5)
    waiting = checked.scheduler.schedule(0.0)
    assert (preempted(waiting), checked.scheduler.needs_idle_device) == ([], True)
    checked.scheduler.allow_next_chunks(waiting)
    for batch in (running, waiting):
        checked.scheduler.finish(batch)
    assert preempted(checked.step()) == [0]
    assert not checked.scheduler.needs_idle_device
    checked.run_all()


@pytest.mark.parametrize("budget", [32, 128])  # a cycle would go on from batch to batch, or within one
def test_sequences_of_two_clients_do_not_preempt_in_a_cycle(budget: int) -> None:
    checked = CheckedScheduler(Setup(prefixes=False, budget=budget, chunk_size=32))  # two of three fit
    checked.add(70, priority=20, client="a")
    checked.step()
    checked.add(70, priority=20, client="b")
    checked.step()
    checked.add(70, priority=-20, client="a")
    assert [number for batch in checked.run_all() for number in preempted(batch)] == [0, 1]


def test_client_is_charged_once_for_a_preempted_sequence() -> None:
    checked = CheckedScheduler(NO_PREFIXES)
    queue = checked.scheduler.waiting
    checked.add(100, priority=10, client="a")
    (sequence,) = checked.requests[0].sequences
    start = queue.sort_key(sequence)[0]
    for _ in range(3):
        checked.step(0.0)
    checked.add(100, client="a")
    assert preempted(checked.step(0.0)) == [0]
    checked.run_all()
    assert queue.sort_key(sequence)[0] == start + 200


def test_preempted_prompt_continues_after_its_cached_blocks() -> None:
    checked = CheckedScheduler(Setup(num_blocks=30))
    checked.add(100, priority=1)
    for _ in range(3):
        checked.step(0.0)
    num_computed = checked.requests[0].sequences[0].num_computed_tokens
    checked.add(48, token_id=1)
    batch = checked.step(0.0)
    assert (preempted(batch), request_ids(batch)) == ([0], {1})
    start, _ = spans(checked.run_all(), 0)[0]
    assert start == num_computed // BLOCK * BLOCK


def test_preempted_ssm_sequence_continues_after_its_last_chunk() -> None:
    checked = CheckedScheduler(Setup(num_blocks=0, num_slots=1))
    checked.add(100, priority=1)
    num_computed = [checked.step(0.0) for _ in range(2)][-1].chunks[0].end
    checked.add(40)
    assert [(s.sequence_id, s.num_pooled_tokens) for s, _ in checked.step(0.0).preempted_sequences] == [
        ((0, 0), num_computed)
    ]
    assert spans(checked.run_all(), 0)[0][0] == num_computed


# Failures


@pytest.mark.parametrize(("num_tokens", "num_steps"), [(16, 0), (100, 0), (100, 1)])
def test_chunk_out_of_memory_runs_again_in_smaller_chunks(num_tokens: int, num_steps: int) -> None:
    checked = CheckedScheduler()
    checked.add(num_tokens)
    for _ in range(num_steps):
        checked.step()
    batch = checked.scheduler.schedule(0.1)
    (failed,) = batch.chunks
    checked.lower_budget(4)
    assert checked.scheduler.retry(failed, NO_MEMORY)
    checked.scheduler.finish(batch)
    again = spans(checked.run_all(), 0)
    assert again[0][0] == failed.start
    assert max(end - start for start, end in again) <= 4
    assert again[-1][1] == num_tokens


def test_chunk_that_fails_without_end_is_given_up() -> None:
    checked = CheckedScheduler()
    checked.add(100)
    for attempt in range(100):
        batch = checked.scheduler.schedule(0.1 * attempt)
        if not checked.scheduler.retry(batch.chunks[0], NO_MEMORY):
            break
        checked.scheduler.finish(batch)
    else:
        pytest.fail("it is retried without end")
    checked.cancel(0)
    checked.scheduler.finish(batch)
    checked.add(1)
    one_token = checked.scheduler.schedule(11.0).chunks[0]
    assert not checked.scheduler.retry(one_token, NO_MEMORY)


@pytest.mark.parametrize("num_tokens", [12, 100])
def test_failed_chunks_add_nothing_to_the_prefix_cache(num_tokens: int) -> None:
    checked = CheckedScheduler(Setup(num_blocks=100))
    prefixes = checked.sequence_pool.prefix_cache
    assert prefixes is not None
    checked.add(num_tokens, last_row=True)
    batch = checked.step(failing=[0])
    assert len(batch.chunks) == 1
    assert prefixes.num_cached == 0
    checked.step()
    assert prefixes.num_cached == checked.requests[0].sequences[0].num_computed_tokens // BLOCK
    checked.run_all()
    checked.add(100, token_id=1)
    num_cached = prefixes.num_cached
    checked.step()
    assert prefixes.num_cached > num_cached
    checked.cancel(1, drop_cached_blocks=True)
    assert prefixes.num_cached == num_cached


@pytest.mark.parametrize("is_late", [True, False])
def test_long_and_short_inputs_of_a_request_end_together(is_late: bool) -> None:
    checked = CheckedScheduler(Setup(num_blocks=60, max_num_seqs=4, chunk_size=8))
    number = checked.add(10, 120, 9, 80, 70, 8, *[5] * 20, timeout_s=1.0)
    other = checked.add(30, 5)
    for _ in range(3):
        checked.step()
    sequences = checked.requests[number].sequences
    kinds = {(each.is_complete, each.is_queued, each.is_long) for each in sequences}
    assert kinds == {(True, False, False), (False, True, False), (False, False, True), (False, True, True)}
    if is_late:
        assert checked.step(1.0).expired_requests == [checked.requests[number]]
    else:
        checked.cancel(number)
    assert not any(sequence.is_queued for sequence in sequences)
    assert checked.requests[number].sequences == []  # no reference cycle
    assert all(sequence.chunk is None and sequence.allocation is None for sequence in sequences)
    while checked.scheduler.requests:
        assert request_ids(checked.step()) == {other}


# Prefix cache


def test_short_sequence_starts_after_its_cached_prefix() -> None:
    checked = CheckedScheduler()
    checked.add(14, last_row=True)
    checked.run_all()
    checked.add(14, last_row=True)
    assert spans(checked.run_all(), 1) == [(12, 14)]
    checked.add(14)
    checked.add(12, last_row=True)
    batches = checked.run_all()
    assert (spans(batches, 2), spans(batches, 3)) == ([(0, 14)], [(8, 12)])


def test_cancelled_sequence_holds_its_memory_until_its_forward_ends() -> None:
    checked = CheckedScheduler()
    checked.add(16, last_row=True)
    checked.run_all()
    checked.add(16, last_row=True)
    batch = checked.scheduler.schedule(0.0)
    checked.cancel(1)
    assert checked.sequence_pool.usage > 0.0
    assert checked.scheduler.finish(batch) == []
    checked.check()
    assert checked.sequence_pool.usage == 0.0


def test_only_uncached_tokens_count_in_the_budget() -> None:
    checked = CheckedScheduler(Setup(num_blocks=100, max_num_seqs=64))
    for num_tokens in (16, 12, 8):
        checked.add(num_tokens, last_row=True)
    checked.run_all()
    checked.add(*[16] * 20, last_row=True)  # all but the last block of each is cached
    assert [(chunk.start, chunk.end) for chunk in checked.step().chunks] == [(12, 16)] * 8
    checked.lower_budget(14)
    assert [(chunk.start, chunk.end) for chunk in checked.step().chunks] == [(12, 16)] * 3
    checked.run_all()


# Memory pressure and token budget


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
    checked.lower_budget(24)
    checked.step(0.0)
    assert checked.scheduler.memory_pressure == 0.25


def test_pool_usage_is_pressure_while_a_sequence_waits() -> None:
    checked = CheckedScheduler(Setup(prefixes=False))
    checked.add(120)
    checked.step(0.0)
    assert checked.sequence_pool.usage == 0.75
    assert checked.scheduler.memory_pressure == 0.0
    checked.scheduler.chunk_sizes.record(32, 0, 0.001)
    checked.add(60)
    batch = checked.step(2.0)
    assert checked.scheduler.memory_pressure == 0.375
    assert [chunk.num_tokens for chunk in batch.chunks] == [20]
    checked.cancel(1)
    checked.step(0.0)
    assert checked.scheduler.memory_pressure == 0.0


def test_lowered_budget_doubles_after_32_forwards() -> None:
    scheduler = make(max_seq_len=32)
    scheduler.add(make_request(0, [32] * 500))
    scheduler.lower_budget(40)
    budgets = []
    for _ in range(31):
        budgets.append(scheduler.token_budget)
        run(scheduler)
        scheduler.finish(Batch())  # an empty batch is no forward
    scheduler.lower_budget(100)  # above the budget: only the count of forwards starts again
    for _ in range(70):
        budgets.append(scheduler.token_budget)
        run(scheduler)
    assert budgets == [40] * 63 + [80] * 32 + [128] * 6


def test_budget_has_a_lower_bound() -> None:
    checked = CheckedScheduler(Setup(budget=128, chunk_size=64))
    checked.lower_budget(1)
    assert checked.scheduler.token_budget == 4
    whole = make(budget=1)
    assert whole.token_budget == MAX_SEQ_LEN
    whole.lower_budget(3)
    assert whole.token_budget == MAX_SEQ_LEN
    checked.add(100)
    for _ in range(19):
        checked.add(1)
        checked.step()
    assert checked.requests[0].sequences[0].num_computed_tokens >= 4 * 9  # chunks and short sequences take turns
