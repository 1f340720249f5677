"""Results of a step survive their message, without a copy of the values if all of them are kept."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine.protocol.batch_outputs import (
    ArrayBlock,
    ResultBlock,
    pack_results,
    unpack_results,
)
from penstock.engine.protocol.messages import StepResults, decode_from_core, encode

from ..steps import Row, finished_of, rows_of, step_of

BLOCKS = [
    ArrayBlock(name="embedding", values=np.arange(12, dtype=np.float32).reshape(4, 3), widths=[3, 1, 2, 3]),
    ArrayBlock(name="token_scores", values=np.arange(10, dtype=np.float32).reshape(5, 2), row_lens=[2, 0, 3]),
    ArrayBlock(name="scores", values=np.ones((1, 1), np.float32)),
    ArrayBlock(name="sparse", values=np.zeros((0, 2), np.float32), row_lens=[0, 0], widths=[2, 1]),
]


def answers(block: ArrayBlock) -> ResultBlock:
    numbers = range(len(block.split()))
    return ResultBlock(
        block, [(1 << 41) + n for n in numbers], [3 * n for n in numbers], [bool(n % 2) for n in numbers]
    )


def test_blocks_of_any_shape_survive_their_frames() -> None:
    sent = [answers(block) for block in BLOCKS]
    headers, frames = pack_results(sent)
    assert [len(frame) for frame in frames] == [block.values.nbytes for block in BLOCKS]
    message = StepResults(headers, 1, 0.1, finished=[(7, 0.5, 2.0), (1 << 50, 0.0, 1e-9)])
    decoded = decode_from_core(encode(message))
    assert isinstance(decoded, StepResults)
    assert decoded == message
    received = unpack_results(decoded, [bytes(frame) for frame in frames])
    for theirs, ours in zip(sent, received, strict=True):
        assert ours.block.name == theirs.block.name
        for column in ("request_ids", "indices", "is_last"):
            assert getattr(ours, column) == getattr(theirs, column)
        for before, after in zip(theirs.block.split(), ours.block.split(), strict=True):
            assert after.dtype == np.float32
            assert after.shape == before.shape
            np.testing.assert_array_equal(after, before)
    for block, frame in zip(BLOCKS[:3], frames, strict=False):
        assert np.shares_memory(np.frombuffer(frame, np.float32), block.values)


@pytest.mark.parametrize("block", BLOCKS)
def test_some_sequences_of_a_block_are_those_that_were_picked(block: ArrayBlock) -> None:
    whole = answers(block)
    everything = range(len(whole.request_ids))
    assert whole.pick(everything) is whole
    for places in (everything[1:], everything[::2], everything[:0]):
        part = whole.pick(places)
        assert part.indices == [3 * place for place in places]
        expected = [block.split()[place] for place in places]
        for ours, theirs in zip(part.block.split(), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_message_without_rows_brings_none() -> None:
    assert rows_of(StepResults([], 0, 0.0), []) == []
    message, frames = step_of([], ended=[(1, 0.25, 0.5)])
    assert (rows_of(message, frames), finished_of(message)) == ([], {1: (0.25, 0.5)})
    message, frames = step_of([Row(1, 0, "x", np.ones(3))])
    assert rows_of(message, frames)[0].array.dtype == np.float32
