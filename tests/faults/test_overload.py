"""Ten times more than the engine can do: what is admitted is answered at full speed, the rest comes back later.

The core is played by the test, so that nothing depends on the speed of a machine; test_under_load.py has the real one.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque

import numpy as np
import pytest

from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.protocol.config import SchedulerConfig
from penstock.engine.protocol.errors import EngineOverloadedError
from penstock.engine.protocol.messages import ClientMessage, Frame, StepLoad, unpack_client_message
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import RequestOptions, TokenizedInput

from ..engine.steps import Row, step_of

STEP_TOKENS = 1_000
"""Tokens. What the core does in a step, which takes a second."""
MAX_QUEUED_TOKENS = 8_000


class Core:
    """Runs what it is sent in order, so many tokens a step."""

    def __init__(self, dispatcher: Dispatcher, step_s: float = 1.0) -> None:
        self.dispatcher = dispatcher
        self.step_s = step_s
        self.waiting: deque[tuple[int, int, int]] = deque()
        dispatcher.replicas[0].connect(self.send)

    def send(self, turn: ClientMessage, frame: Frame) -> None:
        asked, cancelled = unpack_client_message(turn, frame), turn.cancels
        for each in asked:
            self.waiting.extend((each.request_id, index, len(tokens)) for index, tokens in enumerate(each.inputs))
        self.waiting = deque(entry for entry in self.waiting if entry[0] not in cancelled)

    def step(self) -> int:
        done = []
        num_tokens = 0
        while self.waiting and num_tokens + self.waiting[0][2] <= STEP_TOKENS:
            done.append(self.waiting.popleft())
            num_tokens += done[-1][2]
        rows = [Row(request_id, index, "embedding", np.zeros(1, np.float32)) for request_id, index, _ in done]
        num_left = len(self.waiting)
        load = StepLoad(len(done), STEP_TOKENS, num_left, sum(entry[2] for entry in self.waiting), num_left)
        self.dispatcher.replicas[0].receive_rows(*step_of(rows, num_tokens, self.step_s, load=load))
        return num_tokens


async def turn() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_ten_times_the_capacity() -> None:
    dispatcher, chance = Dispatcher(MAX_QUEUED_TOKENS), random.Random(0)
    core = Core(dispatcher)
    outcomes: Counter[str] = Counter()
    waits_s: list[float] = []

    async def ask(lengths: list[int]) -> None:
        inputs = [TokenizedInput(np.zeros(length, np.int32)) for length in lengths]
        try:
            async with dispatcher.open(RequestOptions()) as request:
                await request.run(inputs, PoolingParams())
        except EngineOverloadedError as error:
            outcomes["refused"] += 1
            waits_s.append(error.retry_after_s)
        else:
            outcomes["answered"] += 1

    tasks: list[asyncio.Task[None]] = []
    goodput: list[int] = []
    for _ in range(100):
        offered = 0
        while offered < 10 * STEP_TOKENS:
            lengths = [chance.randint(1, 50) for _ in range(chance.randint(1, 8))]
            offered += sum(lengths)
            tasks.append(asyncio.create_task(ask(lengths)))
        await turn()
        assert dispatcher.stats.num_tokens < MAX_QUEUED_TOKENS + 8 * 50
        goodput.append(core.step())
        await turn()
    while core.waiting:
        core.step()
        await turn()
    await asyncio.gather(*tasks)
    share = sum(goodput) / (len(goodput) * STEP_TOKENS)
    print(f"goodput {share:.1%} of the peak, {outcomes['answered']} answered, {outcomes['refused']} refused")
    assert share > 0.95
    assert 0.85 < outcomes["refused"] / len(tasks) < 0.95
    assert dispatcher.stats.num_refused_total == outcomes["refused"]
    assert min(waits_s) > 0
    assert max(waits_s[10:]) <= MAX_QUEUED_TOKENS / STEP_TOKENS + 1
    assert (dispatcher.stats.num_tokens, dispatcher.stats.num_requests) == (0, 0)


@pytest.mark.parametrize("tokens_per_s", [100, 300, 700])
@pytest.mark.parametrize("num_clients", [4, 8])
async def test_default_limits_admit_ordinary_clients_of_a_slow_model(tokens_per_s: int, num_clients: int) -> None:
    """Each client sends 8 documents of 300 tokens, and the next 8 after the answer, as to a 0.6B model on a CPU."""
    limits = SchedulerConfig()
    dispatcher = Dispatcher(limits.max_queued_tokens, limits.max_queue_s)
    core = Core(dispatcher, step_s=STEP_TOKENS / tokens_per_s)

    async def client() -> None:
        for _ in range(5):
            async with dispatcher.open(RequestOptions()) as request:
                await request.run([TokenizedInput(np.zeros(300, np.int32)) for _ in range(8)], PoolingParams())

    tasks = [asyncio.create_task(client()) for _ in range(num_clients)]
    longest_s = 0.0
    while not all(task.done() for task in tasks):
        await turn()
        core.step()
        longest_s = max(longest_s, dispatcher.admission.queue_s)
    await asyncio.gather(*tasks)
    print(
        f"{num_clients} clients at {tokens_per_s} tokens/s: up to {longest_s:.0f} s of work in the queue, none refused"
    )
    assert dispatcher.stats.num_refused_total == 0
