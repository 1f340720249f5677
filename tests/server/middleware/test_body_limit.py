"""The memory of request bodies: one client may hold half of it."""

from __future__ import annotations

import pytest

from penstock.server.middleware.exchange import _BodyMemory
from penstock.server.wire.limit_errors import LimitError, ServerRefusalReason


def add(memory: _BodyMemory, client: str, num_bytes: int, num_beyond: int = 0, num_bodies: int = 1) -> None:
    memory.add(client, num_bodies, num_bytes, num_beyond)
    memory.check(client)


def refused(memory: _BodyMemory, client: str, num_bytes: int, num_beyond: int = 0) -> ServerRefusalReason:
    with pytest.raises(LimitError) as caught:
        add(memory, client, num_bytes, num_beyond)
    memory.add(client, -1, -num_bytes, -num_beyond)
    assert caught.value.status_code == 503
    return caught.value.reason


@pytest.mark.parametrize("is_beyond", [False, True])
def test_one_client_holds_at_most_half(is_beyond: bool) -> None:
    memory = _BodyMemory(10**6, 100) if is_beyond else _BodyMemory(100, 10**6)
    amount = {"num_beyond": 10} if is_beyond else {}
    for _ in range(5):
        add(memory, "a", 10, **amount)
    assert refused(memory, "a", 10, **amount) == ServerRefusalReason.BODY_MEMORY_SHARE
    for _ in range(5):
        add(memory, "b", 10, **amount)
    assert refused(memory, "c", 10, **amount) == ServerRefusalReason.BODY_MEMORY
    memory.add("a", -1, -10, -amount.get("num_beyond", 0))
    add(memory, "a", 10, **amount)


def test_one_large_body_may_take_more_than_half() -> None:
    memory = _BodyMemory(100, 100)
    add(memory, "a", 40)
    add(memory, "a", 30, num_bodies=0)  # more of the same body
    assert refused(memory, "a", 1) == ServerRefusalReason.BODY_MEMORY_SHARE
    add(memory, "b", 30)
    for client, num_bytes in (("a", 70), ("b", 30)):
        memory.add(client, -1, -num_bytes)
    assert (memory.all.num_bytes, memory._by_client) == (0, {})
