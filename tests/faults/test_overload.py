"""Ten times the capacity of an engine: admitted requests run at full speed, the others are refused.

The test plays the core, so that it does not depend on the speed of a machine.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.protocol.errors import EngineOverloadedError
from penstock.engine.protocol.messages import Frame, StepLoad
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import RequestOptions, TokenizedInput

from ..engine.steps import Row, step_of, unpacked
from ..waiting import turns

STEP_TOKENS = 1_000
"""Tokens of a step, which takes one second."""
MAX_QUEUED_TOKENS = 8_000


class Core:
    """Runs inputs in order of arrival."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.replica = dispatcher.replicas[0]
        self.replica.connect(self.receive)
        self.waiting: deque[tuple[int, int, int]] = deque()

    def receive(self, first: bytes, frames: Sequence[Frame]) -> None:
        message, requests = unpacked(first, frames)
        for request in requests:
            lengths = map(len, request.inputs)
            self.waiting.extend((request.request_id, index, length) for index, length in enumerate(lengths))
        self.waiting = deque(entry for entry in self.waiting if entry[0] not in message.cancels)

    def step(self) -> int:
        done, num_tokens = [], 0
        while self.waiting and num_tokens + self.waiting[0][2] <= STEP_TOKENS:
            done.append(self.waiting.popleft())
            num_tokens += done[-1][2]
        rows = [Row(request_id, index, "embedding", np.zeros(1, np.float32)) for request_id, index, _ in done]
        num_left = len(self.waiting)
        load = StepLoad(len(done), STEP_TOKENS, num_left, sum(entry[2] for entry in self.waiting), num_left)
        self.replica.receive(*step_of(rows, num_tokens, 1.0, load=load))
        return num_tokens


async def test_overload_keeps_goodput_and_refuses_the_rest() -> None:
    dispatcher, chance = Dispatcher(MAX_QUEUED_TOKENS), random.Random(0)
    core, outcomes, waits_s = Core(dispatcher), Counter[str](), []

    async def run(lengths: list[int]) -> None:
        inputs = [TokenizedInput(np.zeros(length, np.int32)) for length in lengths]
        try:
            async with dispatcher.open(RequestOptions()) as request:
                await request.run(inputs, PoolingParams())
        except EngineOverloadedError as error:
            outcomes["refused"] += 1
            waits_s.append(error.retry_after_s)

    tasks: list[asyncio.Task[None]] = []
    goodput = 0
    for _ in range(100):
        offered = 0
        while offered < 10 * STEP_TOKENS:
            lengths = [chance.randint(1, 50) for _ in range(chance.randint(1, 8))]
            offered += sum(lengths)
            tasks.append(asyncio.create_task(run(lengths)))
        await turns(4)
        assert dispatcher.stats.num_tokens < MAX_QUEUED_TOKENS + 8 * 50
        goodput += core.step()
        await turns(4)
    while core.waiting:
        core.step()
        await turns(4)
    await asyncio.gather(*tasks)
    assert goodput > 0.95 * 100 * STEP_TOKENS
    assert 0.85 < outcomes["refused"] / len(tasks) < 0.95
    assert dispatcher.stats.num_refused_total == outcomes["refused"]
    assert min(waits_s) > 0
    assert max(waits_s[10:]) <= MAX_QUEUED_TOKENS / STEP_TOKENS + 1
    assert (dispatcher.stats.num_tokens, dispatcher.stats.num_requests) == (0, 0)
