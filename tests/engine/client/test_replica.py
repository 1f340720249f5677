"""Runs whose answer is awaited: whose memory the answers are."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.engine.client.dispatcher import Dispatcher
from penstock.engine.core.device.stream import stream_of
from penstock.engine.pooling.output import OutputBlock, PoolerOutput
from penstock.engine.protocol.batch_outputs import ResultBlock, pack_results
from penstock.engine.protocol.messages import ClientMessage, Frame, StepResults
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import RequestOptions, TokenizedInput

from ..device.pretend_cuda import DEVICE, Pinned, pretend_cuda
from ..steps import Row, step_of

ROWS = torch.arange(24.0).reshape(8, 3)
ROW_LENS = (2, 5, 1)


class OneByOne:
    """A core, and a request for each of its inputs."""

    def __init__(self, count: int) -> None:
        self.dispatcher = Dispatcher(max_queued_tokens=100)
        self.dispatcher.replicas[0].connect(self._send)
        self.tasks = [asyncio.create_task(self._ask()) for _ in range(count)]

    def _send(self, turn: ClientMessage, frame: Frame) -> None:
        """What is asked is known."""

    async def _ask(self) -> np.ndarray:
        inputs = [TokenizedInput(np.arange(3, dtype=np.int32))]
        async with self.dispatcher.open(RequestOptions()) as request:
            (output,) = await request.run(inputs, PoolingParams())
        return output["token_embeddings"]

    async def answered(self, message: StepResults, frames: list[Frame]) -> list[np.ndarray]:
        await asyncio.sleep(0)
        self.dispatcher.replicas[0].receive_rows(message, frames)
        return await asyncio.gather(*self.tasks)


async def test_rows_of_tokens_are_their_own_memory() -> None:
    parts = [part.numpy() for part in ROWS.split(ROW_LENS)]
    message, frames = step_of([Row(number, 0, "token_embeddings", part) for number, part in enumerate(parts)])
    answers = await OneByOne(len(parts)).answered(message, frames)
    for answer, part in zip(answers, parts, strict=True):
        assert np.array_equal(answer, part)
        assert answer.base is None
        assert not np.shares_memory(answer, np.frombuffer(frames[0], np.float32))


async def test_parts_that_wait_for_the_rest_are_their_own_memory() -> None:
    dispatcher = OneByOne(1).dispatcher
    await asyncio.sleep(0)
    message, frames = step_of([Row(0, 0, "token_embeddings", ROWS.numpy(), is_last=False)])
    dispatcher.replicas[0].receive_rows(message, frames)
    (run,) = dispatcher.replicas[0]._runs.values()
    (part,) = run.parts[0, "token_embeddings"]
    assert np.array_equal(part, ROWS.numpy())
    assert part.base is None


@pytest.mark.parametrize("kept", range(len(ROW_LENS)))
async def test_who_keeps_one_answer_keeps_no_pinned_memory(kept: int) -> None:
    """Through the engine in this process, on CUDA: from the device to the caller."""
    with pretend_cuda() as mode, mode.watched():
        values = ROWS.pin_memory().to(DEVICE, non_blocking=True)
        output = PoolerOutput(3, [OutputBlock(name="token_embeddings", values=values, row_lens=ROW_LENS)])
        copy = output.begin_copy(stream_of(DEVICE).to_host)
    (block,) = copy.arrived().blocks
    assert isinstance(copy.values[0], Pinned)
    pinned = StorageWeakRef(copy.values[0].untyped_storage())
    heads, frames = pack_results([ResultBlock(block, [0, 1, 2], [0] * 3, [True] * 3)])
    answers = await OneByOne(3).answered(StepResults(heads, 8, 0.1), frames)
    answer = answers[kept]
    del output, copy, block, frames, answers
    gc.collect()
    assert pinned.expired()
    assert np.array_equal(answer, ROWS.split(ROW_LENS)[kept].numpy())
