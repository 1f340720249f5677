"""Batch outputs are mapped to requests; cancelled ones are skipped."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine.core.core import not_finite, results_of
from penstock.engine.protocol.batch_outputs import ArrayBlock, BatchOutputs
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.scheduling import PrefillChunk, QueuedSequence, Request


def chunk(request: Request, index: int = 0, *, num_tokens: int = 3, end: int = 3) -> PrefillChunk:
    """A chunk that is under way, from the first token."""
    sequence = QueuedSequence(
        request_id=(request.request_id, index), prompt=range(num_tokens), num_tokens=num_tokens, request=request,
        index=index,
    )  # fmt: skip
    sequence.chunk = PrefillChunk(sequence, 0, end)
    return sequence.chunk


def rows(num_rows: int, *, indices: list[int] | None = None) -> ArrayBlock:
    values = np.arange(2 * num_rows, dtype=np.float32).reshape(num_rows, 2)
    return ArrayBlock(name="embedding", values=values, indices=indices)


def test_rows_carry_request_and_input() -> None:
    first, second = Request(7, PoolingParams()), Request(9, PoolingParams())
    chunks = [chunk(first, 0), chunk(second), chunk(first, 1, num_tokens=5)]
    (results,) = results_of(chunks, BatchOutputs.of(3, [rows(3)]), 1.5)
    assert results.request_ids == [7, 9, 7]
    assert results.indices == [0, 0, 1]
    assert results.is_last == [True, True, False]
    assert (first.started_s, second.started_s) == (1.5, 1.5)


def test_cancelled_requests_are_skipped() -> None:
    kept, gone = Request(1, PoolingParams()), Request(2, PoolingParams())
    chunks = [chunk(gone), chunk(kept)]
    chunks[0].sequence.chunk = None
    (results,) = results_of(chunks, BatchOutputs.of(2, [rows(2)]), 1.0)
    assert results.request_ids == [1]
    assert results.block.values.tolist() == [[2.0, 3.0]]
    assert gone.started_s is None


def test_blocks_hold_the_sequences_they_name() -> None:
    requests = [Request(i, PoolingParams()) for i in range(4)]
    blocks = [rows(2, indices=[3, 1]), rows(1, indices=[0])]
    found = results_of([chunk(r) for r in requests], BatchOutputs.of(4, blocks), 1.0)
    assert [results.request_ids for results in found] == [[3, 1], [0]]


def test_block_of_cancelled_requests_is_dropped() -> None:
    chunks = [chunk(Request(1, PoolingParams()))]
    chunks[0].sequence.chunk = None
    assert results_of(chunks, BatchOutputs.of(1, [rows(1)]), 1.0) == []


def test_start_is_recorded_once() -> None:
    request = Request(1, PoolingParams(), started_s=0.5)
    results_of([chunk(request)], BatchOutputs.of(1, [rows(1)]), 1.0)
    assert request.started_s == 0.5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_outputs_are_found_except_cancelled(value: float) -> None:
    block = rows(3)
    block.values[1:, 0] = value
    chunks = [chunk(Request(i, PoolingParams())) for i in range(3)]
    outputs = BatchOutputs.of(3, [block])
    assert [s.request.request_id for s in not_finite(chunks, outputs)] == [1, 2]
    found = not_finite(chunks, outputs)
    assert next(found) is chunks[1].sequence
    chunks[2].sequence.chunk = None  # cancelled together with the first one
    assert list(found) == []
