"""Messages between the client and the core survive encoding and decoding."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from penstock.engine.protocol import messages as m
from penstock.engine.protocol.config import EngineConfig, PoolerConfig
from penstock.engine.protocol.images import ImagePatches
from penstock.engine.protocol.messages import (
    ClientMessage,
    ClientMessageBuilder,
    SubmitRequest,
    TokenizedInput,
    decode_to_core,
    encode,
    first_request_id,
    unpack_client_message,
)
from penstock.engine.protocol.model_info import TokenizerSpec
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingTask, PoolingType
from penstock.engine.protocol.templates import ChatTemplate

from ..model_infos import make_info

PARAMS = [PoolingParams(task=task) for task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.EMBED)]
IDS = st.integers(0, first_request_id(2**20))


@st.composite
def requests(draw: st.DrawFn) -> SubmitRequest:
    inputs = [
        TokenizedInput(np.arange(n, dtype=np.int32) + n, draw(st.integers(0, n)), draw(st.integers(0, n)))
        if draw(st.booleans())
        else TokenizedInput.of_image(ImagePatches(np.arange(n * size, dtype=np.uint8).reshape(n, size), (1, n)), n % 2)
        if (size := draw(st.integers(0, 9)))
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


def send(
    *requests: SubmitRequest, cancels: tuple[int, ...] = (), resets: tuple[int, ...] = ()
) -> tuple[ClientMessage, bytes]:
    outgoing = ClientMessageBuilder(cancels=[*cancels], resets=[*resets])
    assert outgoing.is_empty == (not (cancels or resets))
    outgoing.requests.extend(requests)
    packed, frame = outgoing.pack()
    message = decode_to_core(encode(packed))
    assert isinstance(message, ClientMessage)
    assert message == packed
    return message, bytes(frame)


@given(st.lists(requests(), max_size=12), st.lists(IDS, max_size=5), st.lists(IDS, min_size=1, max_size=3))
def test_requests_survive_a_client_message(
    submitted: list[SubmitRequest], cancels: list[int], resets: list[int]
) -> None:
    message, frame = send(*submitted, cancels=(*cancels,), resets=(*resets,))
    assert message.resets == resets
    assert message.params == list(dict.fromkeys(each.params for each in submitted))
    received = unpack_client_message(message, frame)
    assert message.cancels == cancels
    for theirs, ours in zip(submitted, received, strict=True):
        assert ours._replace(inputs=()) == theirs._replace(inputs=())
        assert ours.params is message.params[message.params.index(theirs.params)]
        for before, after in zip(theirs.inputs, ours.inputs, strict=True):
            assert after.token_ids.dtype == np.int32
            assert after.token_ids.tolist() == before.token_ids.tolist()
            assert (after.type_boundary, after.num_skipped_tokens) == (before.type_boundary, before.num_skipped_tokens)
            assert (after.num_masked, after.query_vectors) == (0, None)
            for image, sent in zip(after.images, before.images, strict=True):
                assert image.grid == sent.grid
                assert np.array_equal(image.pixels, sent.pixels)


def test_inputs_share_and_repeat_images() -> None:
    images = [ImagePatches(np.full((n, 3), n, np.uint8), (1, n)) for n in (2, 5)]
    order = [(images[0], images[1], images[0]), (), (images[1],)]
    inputs = [TokenizedInput(np.arange(2, dtype=np.int32), images=own) for own in order]
    message, frame = send(SubmitRequest(1, PARAMS[0], inputs))
    assert len(message.grids) == 2
    (received,) = unpack_client_message(message, frame)
    assert [[len(image.pixels) for image in own.images] for own in received.inputs] == [[2, 5, 2], [], [5]]


def test_equal_queries_of_inputs_are_sent_once() -> None:
    queries = [np.random.default_rng(n).normal(size=(n, 4)).astype(np.float32) for n in (3, 7)]
    order = [queries[0], None, queries[1], queries[0]]
    inputs = [TokenizedInput(np.arange(2, dtype=np.int32), num_masked=i, query_vectors=q) for i, q in enumerate(order)]
    message, frame = send(SubmitRequest(1, PARAMS[0], inputs))
    (received_request,) = unpack_client_message(message, frame)
    received = received_request.inputs
    assert [got.num_masked for got in received] == [0, 1, 2, 3]
    for got, query in zip(received, order, strict=True):
        assert got.query_vectors is None if query is None else np.array_equal(got.query_vectors, query)
    assert received[0].query_vectors is received[3].query_vectors
    assert len(frame) == 4 * (2 * 4 + (3 + 7) * 4)


def test_message_names_its_client() -> None:
    number = first_request_id(5)
    assert send(SubmitRequest(number, PARAMS[0], [TokenizedInput(np.ones(1, np.int32))]))[0].connection_number == 5
    assert send(cancels=(number,))[0].connection_number == send(resets=(number,))[0].connection_number == 5


def test_priority_beyond_64_bits_is_rejected() -> None:
    with pytest.raises(OverflowError):
        send(SubmitRequest(1, PARAMS[0], [TokenizedInput(np.ones(1, np.int32))], priority=2**64))


SPEC = TokenizerSpec(
    json="{}",
    truncation_side="left",
    uses_token_types=True,
    chat_template=ChatTemplate(source="{{ messages }}", special_tokens={"bos_token": "<s>", "eos_token": "</s>"}),
)
CONFIG = EngineConfig(
    model="m",
    pooler_config=PoolerConfig(pooling_type=PoolingType.STEP, returned_token_ids=(1, 2)),
    hf_overrides={"a": [1]},
)


@pytest.mark.parametrize("message", [m.Start(CONFIG, "DEBUG"), m.Stop()])
def test_messages_to_the_core_survive_encoding(message: m.ToCore) -> None:
    assert m.decode_to_core(m.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        m.ModelReady(make_info(prompts={"query": "q: "}, config={"nested": {"list": [1, 2.5, None, "x"]}}), SPEC),
        m.LoadFailed("WeightError", "no such tensor"),
        m.StepResults([m.ArrayHeader("embedding", 3, [4], [0], [True], widths=[2])], 12, 0.5, finished=[(4, 0.5, 1.0)]),
        m.RequestFailed(1, "ModelExecutionError", "boom"),
    ],
)
def test_messages_from_the_core_survive_encoding(message: m.FromCore) -> None:
    assert m.decode_from_core(m.encode(message)) == message
