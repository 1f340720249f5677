"""Requests, inputs and queries survive a ClientMessage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from penstock.engine.protocol.messages import (
    ClientMessage,
    ClientMessageBuilder,
    SubmitRequest,
    decode_to_core,
    encode,
    first_request_id,
    unpack_client_message,
)
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import TokenizedInput
from penstock.engine.protocol.tasks import PoolingTask

PARAMS = [PoolingParams(task=task) for task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.EMBED)]
IDS = st.integers(0, first_request_id(2**20))


@st.composite
def requests(draw: st.DrawFn) -> SubmitRequest:
    inputs = [
        TokenizedInput(np.arange(n, dtype=np.int32) + n, draw(st.integers(0, n)), draw(st.integers(0, n)))
        if draw(st.booleans())
        else TokenizedInput(np.arange(n, dtype=np.int32) - n)
        for n in draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    ]
    return SubmitRequest(
        draw(IDS),
        draw(st.sampled_from(PARAMS)),
        inputs,
        draw(st.integers(-(2**63), 2**63 - 1)),
        draw(st.none() | st.floats(0, 1e9)),
        draw(st.sampled_from(["", "me", "you"])),
        draw(st.sampled_from(["", "mine", "yours"])),
    )


def sent(
    *asked: SubmitRequest, cancels: tuple[int, ...] = (), clears: tuple[int, ...] = ()
) -> tuple[ClientMessage, bytes]:
    outgoing = ClientMessageBuilder(cancels=[*cancels], clears=[*clears])
    assert outgoing.is_empty == (not (cancels or clears))
    for each in asked:
        outgoing.requests.append(each)
    packed, frame = outgoing.pack()
    message = decode_to_core(encode(packed))
    assert isinstance(message, ClientMessage)
    assert message == packed
    return message, bytes(frame)


@given(st.lists(requests(), max_size=12), st.lists(IDS, max_size=5), st.lists(IDS, min_size=1, max_size=3))
def test_requests_survive_their_frame(asked: list[SubmitRequest], cancels: list[int], clears: list[int]) -> None:
    message, frame = sent(*asked, cancels=(*cancels,), clears=(*clears,))
    assert message.clears == clears
    assert len(message.params) == len({id(each.params) for each in asked})
    received = unpack_client_message(message, frame)
    assert message.cancels == cancels
    for theirs, ours in zip(asked, received, strict=True):
        assert ours._replace(inputs=()) == theirs._replace(inputs=())
        assert ours.params is message.params[list({id(each.params): 0 for each in asked}).index(id(theirs.params))]
        for before, after in zip(theirs.inputs, ours.inputs, strict=True):
            assert after.token_ids.dtype == np.int32
            assert after.token_ids.tolist() == before.token_ids.tolist()
            assert (after.type_boundary, after.num_prompt_tokens) == (before.type_boundary, before.num_prompt_tokens)
            assert (after.num_hidden, after.query) == (0, None)


def test_queries_of_inputs_survive_and_are_sent_once() -> None:
    queries = [np.random.default_rng(n).normal(size=(n, 4)).astype(np.float32) for n in (3, 7)]
    order = [queries[0], None, queries[1], queries[0]]
    inputs = [TokenizedInput(np.arange(2, dtype=np.int32), num_hidden=i, query=q) for i, q in enumerate(order)]
    message, frame = sent(SubmitRequest(1, PARAMS[0], inputs))
    (asked,) = unpack_client_message(message, frame)
    received = asked.inputs
    assert [got.num_hidden for got in received] == [0, 1, 2, 3]
    for got, query in zip(received, order, strict=True):
        assert got.query is None if query is None else np.array_equal(got.query, query)
    assert received[0].query is received[3].query
    assert len(frame) == 4 * (2 * 4 + (3 + 7) * 4)


def test_message_names_its_client() -> None:
    number = first_request_id(5)
    assert sent(SubmitRequest(number, PARAMS[0], [TokenizedInput(np.ones(1, np.int32))]))[0].client_number == 5
    assert sent(cancels=(number,))[0].client_number == sent(clears=(number,))[0].client_number == 5


def test_a_number_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        sent(SubmitRequest(1, PARAMS[0], [TokenizedInput(np.ones(1, np.int32))], priority=2**64))
