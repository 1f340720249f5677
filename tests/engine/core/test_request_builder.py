"""Messages become requests with sequences, block keys and deadlines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.engine.core.core import RequestBuilder
from penstock.engine.protocol.messages import SubmitRequest
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import TokenizedInput
from penstock.engine.protocol.tasks import PoolingTask, PoolingType
from penstock.engine.scheduling import Status, block_keys

from .fake_runner import PARAMS, model

INPUTS = [TokenizedInput(np.arange(n, dtype=np.int32)) for n in (40, 5)]


def test_message_becomes_a_request_with_a_sequence_per_input() -> None:
    request = RequestBuilder(model(), None, "seed").build(SubmitRequest(7, PARAMS, INPUTS, -2, 1.5, "me"), 100.0)
    assert (request.request_id, request.params, request.arrival_s) == (7, PARAMS, 100.0)
    assert (request.priority, request.deadline_s, request.client) == (-2, 101.5, "me")
    for index, (sequence, tokens) in enumerate(zip(request.sequences, INPUTS, strict=True)):
        assert (sequence.request_id, sequence.index, sequence.num_tokens) == ((7, index), index, len(tokens))
        assert sequence.prompt is tokens
        assert sequence.request is request
        assert sequence.status is Status.WAITING
        assert sequence.block_keys == ()
    assert RequestBuilder(model(), None, "seed").build(SubmitRequest(7, PARAMS, INPUTS), 100.0).deadline_s is None


def test_block_keys_depend_on_model_and_tokens() -> None:
    first, second = RequestBuilder(model(), 16, "a").build(SubmitRequest(7, PARAMS, INPUTS), 0.0).sequences
    assert first.block_keys == block_keys(INPUTS[0].token_ids, 16, b"a")
    assert len(first.block_keys) == 2
    assert second.block_keys == []
    (other, _) = RequestBuilder(model(), 16, "b").build(SubmitRequest(7, PARAMS, INPUTS), 0.0).sequences
    assert not set(first.block_keys) & set(other.block_keys)


def test_block_keys_differ_between_namespaces() -> None:
    builder = RequestBuilder(model(), 16, "a")
    names = [
        builder.build(SubmitRequest(7, PARAMS, INPUTS, namespace=n), 0.0).sequences[0].block_keys
        for n in ("", "b", "c")
    ]
    assert len({key for keys in names for key in keys}) == 6
    assert (
        RequestBuilder(model(), 16, "ab").build(SubmitRequest(7, PARAMS, INPUTS), 0.0).sequences[0].block_keys
        not in names
    )


@pytest.mark.parametrize(
    ("pooling", "task", "expected"),
    [
        ((PoolingType.LAST,), PoolingTask.EMBED, True),
        ((PoolingType.LAST,), PoolingTask.CLASSIFY, True),
        ((PoolingType.LAST,), PoolingTask.TOKEN_EMBED, False),
        ((PoolingType.LAST,), PoolingTask.TOKEN_CLASSIFY, False),
        ((PoolingType.MEAN,), PoolingTask.EMBED, False),
        ((PoolingType.LAST, PoolingType.MEAN), PoolingTask.EMBED, False),
    ],
)
def test_only_last_row_pooling_may_read_rows_from_the_cache(
    pooling: tuple[PoolingType, ...], task: PoolingTask, expected: bool
) -> None:
    builder = RequestBuilder(replace(model(), sequence_pooling=pooling), 16, "a")
    request = builder.build(SubmitRequest(7, PoolingParams(task=task), INPUTS), 0.0)
    assert request.needs_last_row is expected
