"""A core that records its messages and answers on demand, and requests for it."""

import asyncio
from collections.abc import Sequence

import numpy as np

from penstock.engine.client.dispatcher import Dispatcher, Replica
from penstock.engine.protocol.batch_outputs import Arrays
from penstock.engine.protocol.messages import ClientMessage, Frame, SubmitRequest, TokenizedInput
from penstock.engine.protocol.params import PoolingParams, RequestOptions

from ...waiting import loop_iterations
from ..steps import Row, step_of, unpacked


class FakeCore:
    """Answers with the sum of the tokens of each input."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.messages: list[ClientMessage] = []
        self.requests: list[SubmitRequest] = []
        self.waiting: dict[int, Sequence[TokenizedInput]] = {}
        self.cancelled: list[int] = []
        self.resets: list[int] = []
        replica.connect(self.send)

    def send(self, first: bytes, frames: Sequence[Frame]) -> None:
        message, requests = unpacked(first, frames)
        self.messages.append(message)
        self.requests += requests
        self.waiting |= {each.request_id: each.inputs for each in requests}
        self.cancelled += message.cancels
        self.resets += message.resets

    def answer(self, *inputs: tuple[int, int], seconds: float = 0.0) -> None:
        """Sends the results of inputs, by request and index, in one message; by default of all that wait."""
        every = [(request_id, index) for request_id, each in self.waiting.items() for index in range(len(each))]
        rows = [
            Row(number, index, "embedding", np.array([self.waiting[number][index].token_ids.sum()], np.float32))
            for number, index in inputs or every
        ]
        finished = [] if inputs else [(number, seconds, seconds) for number in self.waiting]
        self.replica.receive(*step_of(rows, 10, ended=finished))
        if not inputs:
            self.waiting = {}


def tokens(*lengths: int) -> list[TokenizedInput]:
    """Returns one input for each length. Input n consists of the token n, counted from 1."""
    return [TokenizedInput(np.full(n, place + 1, np.int32)) for place, n in enumerate(lengths)]


async def run(dispatcher: Dispatcher, *lengths: int, timeout_s: float | None = None) -> list[Arrays]:
    async with dispatcher.open(RequestOptions(timeout_s=timeout_s)) as request:
        return await request.run(tokens(*lengths), PoolingParams())


async def begin(dispatcher: Dispatcher, *lengths: int, timeout_s: float | None = None) -> asyncio.Task[list[Arrays]]:
    """Starts a request and returns when the core has received it."""
    task = asyncio.create_task(run(dispatcher, *lengths, timeout_s=timeout_s))
    await loop_iterations(3)
    return task


def values(outputs: list[Arrays]) -> list[float]:
    return [float(output["embedding"][0]) for output in outputs]
