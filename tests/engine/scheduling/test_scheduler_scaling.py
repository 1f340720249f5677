"""The cost of a batch does not grow with the queue behind it. The tests count lines of code and bytes, not seconds."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from penstock.engine.protocol.config import ChunkedPrefillConfig, SchedulerConfig
from penstock.engine.scheduling import Scheduler

from .records import make_request, run

NUM_STEPS = 8
LENGTHS = (3, 9, 5, 8, 2, 9, 7, 4, 6)


def num_lines(call: Callable[[], object]) -> int:
    """Returns the number of lines that run inside a call; a comprehension counts each of its rounds."""
    count = 0

    def follow(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return follow

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def cost_of_steps(num_seqs: int, num_inputs: int, num_clients: int) -> tuple[float, int]:
    """Returns the lines per sequence that runs, and the bytes that the largest step allocates."""
    prefill = ChunkedPrefillConfig(chunk_size=64)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=16), token_budget=64, max_seq_len=64, prefill=prefill)
    for number in range(num_seqs // num_inputs):
        lengths = [LENGTHS[(number * num_inputs + index) % len(LENGTHS)] for index in range(num_inputs)]
        scheduler.add(make_request(number, lengths, number * 1e-6, client=str(number % num_clients)))
    for _ in range(num_seqs // 50):
        run(scheduler, 1.0)
    num_run, peak_bytes = 0, 0

    def steps() -> None:
        nonlocal num_run
        for _ in range(NUM_STEPS):
            num_run += len(run(scheduler, 1.0).chunks)

    count = num_lines(steps)
    assert num_run > 8 * NUM_STEPS
    assert scheduler.waiting.num_seqs > 200
    tracemalloc.start()
    try:
        for _ in range(NUM_STEPS):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            run(scheduler, 1.0)
            peak_bytes = max(peak_bytes, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    return count / num_run, peak_bytes


@pytest.mark.parametrize(("num_inputs", "num_clients"), [(1, 3), (4, 1), (10, 2)])
def test_step_costs_the_same_for_a_deep_queue(num_inputs: int, num_clients: int) -> None:
    lines, peak_bytes = cost_of_steps(600, num_inputs, num_clients)
    deep_lines, deep_peak_bytes = cost_of_steps(10_000, num_inputs, num_clients)
    assert deep_lines < 1.25 * lines
    assert deep_peak_bytes < peak_bytes + 16_000  # a list of the whole queue has 80,000 bytes
