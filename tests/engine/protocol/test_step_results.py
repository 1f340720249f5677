"""What a step gives is what arrives, without a copy of its values where all of them are wanted."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine.protocol.batch_outputs import (
    ArrayBlock,
    FinishedRequests,
    ResultBlock,
    pack_results,
    unpack_results,
)
from penstock.engine.protocol.messages import StepResults

from ..steps import Row, ended_of, rows_of, step_of

BLOCKS = [
    ArrayBlock(name="embedding", values=np.arange(12, dtype=np.float32).reshape(4, 3), widths=[3, 1, 2, 3]),
    ArrayBlock(name="token_scores", values=np.arange(10, dtype=np.float32).reshape(5, 2), row_lens=[2, 0, 3]),
    ArrayBlock(name="scores", values=np.ones((1, 1), np.float32)),
    ArrayBlock(name="sparse", values=np.zeros((0, 2), np.float32), row_lens=[0, 0], widths=[2, 1]),
]


def answers(block: ArrayBlock) -> ResultBlock:
    count = np.arange(len(block.split()))
    return ResultBlock(block, count + (1 << 41), count * 3, count % 2)


def test_blocks_of_any_shape_survive_their_frames() -> None:
    sent = [answers(block) for block in BLOCKS]
    heads, frames = pack_results(sent, FinishedRequests.of([(7, 0.5, 2.0), (1 << 50, 0.0, 1e-9)]))
    assert [len(frame) for frame in frames[1:]] == [block.values.nbytes for block in BLOCKS]
    message = StepResults(heads, 1, 0.1, num_ended=2)
    received, ended = unpack_results(message, [bytes(frame) for frame in frames])
    for theirs, ours in zip(sent, received, strict=True):
        assert ours.block.name == theirs.block.name
        for column in ("request_ids", "indices", "is_last"):
            np.testing.assert_array_equal(getattr(ours, column), getattr(theirs, column))
        for before, after in zip(theirs.block.split(), ours.block.split(), strict=True):
            assert after.dtype == np.float32
            assert after.shape == before.shape
            np.testing.assert_array_equal(after, before)
    assert [column.tolist() for column in ended] == [[7, 1 << 50], [0.5, 0.0], [2.0, 1e-9]]
    for block, frame in zip(BLOCKS[:3], frames[1:], strict=False):
        assert np.shares_memory(np.frombuffer(frame, np.float32), block.values)


@pytest.mark.parametrize("block", BLOCKS)
def test_some_sequences_of_a_block_are_those_that_were_picked(block: ArrayBlock) -> None:
    whole = answers(block)
    everything = np.arange(len(whole.request_ids))
    assert whole.pick(everything) is whole
    for places in (everything[1:], everything[::2], everything[:0]):
        part = whole.pick(places)
        assert part.indices.tolist() == (places * 3).tolist()
        expected = [block.split()[place] for place in places]
        for ours, theirs in zip(part.block.split(), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_message_without_rows_brings_none() -> None:
    assert rows_of(StepResults([], 0, 0.0), [b""]) == []
    message, frames = step_of([], ended=[(1, 0.25, 0.5)])
    assert (rows_of(message, frames), ended_of(message, frames)) == ([], {1: (0.25, 0.5)})
    message, frames = step_of([Row(1, 0, "x", np.ones(3))])
    assert rows_of(message, frames)[0].array.dtype == np.float32
