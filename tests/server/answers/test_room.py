"""The memory of answers: one client may hold half of it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.protocol.errors import EngineOverloadedError
from penstock.server.answers.room import AnswerRoom
from penstock.server.answers.sizes import AnswerSize
from penstock.server.wire.limit_errors import ServerRefusalReason

MIB = 2**20


def scope(address: str = "10.0.0.1", key: str = "") -> dict[str, Any]:
    return {"api_client": key, "client": (address, 1)}


def take(room: AnswerRoom, who: dict[str, Any], num_bytes: int) -> None:
    room.take(who, AnswerSize(10 * MIB, num_bytes), param="input", way_out="")


def refusal(room: AnswerRoom, who: dict[str, Any], num_bytes: int) -> EngineOverloadedError:
    with pytest.raises(EngineOverloadedError) as refused:
        take(room, who, num_bytes)
    return refused.value


@pytest.mark.parametrize(("first", "other"), [(scope("a"), scope("b")), (scope(key="k"), scope(key="l"))])
def test_one_client_holds_at_most_half(first: dict[str, Any], other: dict[str, Any]) -> None:
    room = AnswerRoom(100)
    held = [dict(first) for _ in range(5)]
    for each in held:
        take(room, each, 10)
    error = refusal(room, dict(first), 1)
    assert error.reason == ServerRefusalReason.RESPONSE_MEMORY_SHARE
    assert "Your other responses hold 50 bytes" in error.message
    take(room, dict(other), 50)
    assert refusal(room, scope("c", "m"), 1).reason == ServerRefusalReason.RESPONSE_MEMORY
    room.leave(held[0])
    take(room, dict(first), 10)
    assert room.num_bytes == 100


def test_one_large_answer_may_take_more_than_half() -> None:
    room = AnswerRoom(100)
    large = scope()
    take(room, large, 60)
    take(room, large, 20)  # a further part of it
    assert room.num_bytes == 80
    assert refusal(room, scope(), 1).reason == ServerRefusalReason.RESPONSE_MEMORY_SHARE
    room.leave(large)
    assert room.num_bytes == 0
    assert not room._by_client
    room.leave(large)
    take(room, scope(), 1_000)  # nothing else is held
