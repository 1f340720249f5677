"""Each frontend of a core gets what is its own, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from penstock.engine.core.outboxes import Outboxes, split
from penstock.engine.protocol.ipc.frontends import first_request_id, frontend_of
from penstock.engine.protocol.ipc.messages import (
    Failed,
    Frame,
    FromCore,
    Pong,
    PrefixesCleared,
    Rows,
    StepLoad,
    Turn,
    decode_from_core,
)

from ..steps import Row, ended_of, rows_of, step_of

LOAD = StepLoad(3, 100, 0, 0, 0)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


class Frontend:
    """Hears what a core says to it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path, number: int) -> None:
        self.endpoint = f"ipc://{folder}/{number}"
        self.number = number
        self._socket = context.socket(zmq.PULL)
        self._socket.bind(self.endpoint)

    def heard(self, wait_ms: int = 2000) -> FromCore | None:
        return decode_from_core(self._socket.recv_multipart()[0]) if self._socket.poll(wait_ms) else None

    def close(self) -> None:
        self._socket.close(linger=0)


def of(frontend: int, request: int) -> int:
    return first_request_id(frontend) + request


@pytest.mark.parametrize("frontend", [0, 1, 2, 1_000_000])
def test_an_id_says_whose_it_is(frontend: int) -> None:
    assert frontend_of(first_request_id(frontend)) == frontend
    assert frontend_of(first_request_id(frontend + 1) - 1) == frontend
    assert first_request_id(frontend) < 2**63


def step(*rows: tuple[int, int, np.ndarray], ended: tuple[int, ...] = ()) -> tuple[Rows, list[Frame]]:
    told = [Row(request, index, "embedding", array) for request, index, array in rows]
    return step_of(told, 30, 0.5, ended=[(request, 0.1, 0.2) for request in ended], load=LOAD)


def test_the_rows_of_a_step_go_to_those_who_asked_and_its_figures_to_the_first() -> None:
    arrays = [np.full((2,), 1.0, np.float32), np.full((3, 2), 2.0, np.float32), np.full((4,), 3.0, np.float32)]
    message, frames = step(
        (of(1, 7), 0, arrays[0]), (of(2, 7), 0, arrays[1]), (of(1, 8), 1, arrays[2]), ended=(of(1, 7), of(2, 7))
    )
    parts = split(message, frames)
    assert set(parts) == {0, 1, 2}
    figures, _ = parts[0]
    assert figures == Rows([], 30, 0.5, load=LOAD)
    told = {}
    for frontend in (1, 2):
        part, part_frames = parts[frontend]
        assert isinstance(part, Rows)
        assert (part.num_tokens, part.step_s, part.load) == (0, 0.0, None)
        told |= {(row.request_id, row.index): row.array for row in rows_of(part, part_frames)}
        assert ended_of(part, part_frames) == {of(frontend, 7): (0.1, 0.2)}
    for key, array in zip([(of(1, 7), 0), (of(2, 7), 0), (of(1, 8), 1)], arrays, strict=True):
        np.testing.assert_array_equal(told[key], array)


def test_the_rows_of_one_frontend_are_not_copied() -> None:
    message, frames = step((of(3, 1), 0, np.ones(4, np.float32)), (of(3, 2), 0, np.ones(4, np.float32)))
    part, part_frames = split(message, frames)[3]
    assert isinstance(part, Rows)
    assert np.shares_memory(rows_of(part, part_frames)[1].array, np.frombuffer(frames[1], np.float32))


@pytest.mark.parametrize("message", [Failed(of(2, 5), "E", "why"), PrefixesCleared(of(2, 5), 1)])
def test_what_concerns_a_request_goes_to_who_sent_it(message: FromCore) -> None:
    assert list(split(message, [])) == [2]


def test_frontends_come_and_go(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    first, other = Frontend(context, tmp_path, 0), Frontend(context, tmp_path, 4)
    outboxes = Outboxes(context, first.endpoint)
    outboxes.send(Pong(), [])
    assert isinstance(first.heard(), Pong)
    outboxes.attach(other.number, other.endpoint)
    outboxes.send(Failed(of(4, 0), "E", "for the other"), [])
    heard = other.heard()
    assert isinstance(heard, Failed)
    assert heard.message == "for the other"
    outboxes.detach(other.number)
    assert outboxes.is_from_gone(Turn(4, [], [], []))
    assert not outboxes.is_from_gone(Turn(5, [], [], []))
    outboxes.send(Failed(of(4, 1), "E", "for nobody"), [])
    outboxes.attach(other.number, other.endpoint)  # said before it went, read after the news that it has
    outboxes.send(Failed(of(4, 2), "E", "for nobody"), [])
    assert other.heard(wait_ms=100) is None
    outboxes.close(linger_ms=0)
    outboxes.send(Pong(), [])
    assert first.heard(wait_ms=50) is None
    first.close()
    other.close()
