from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.core.device.sequence_memory import KvSlots, describe_pool
from penstock.engine.protocol.config import SchedulerConfig
from penstock.engine.scheduling import Allocation, KvCachePool, PrefillChunk, SequencePool, SsmStatePool

from ...scheduling.records import make_request

MIB = 2**20


@pytest.mark.parametrize(
    ("pool", "limits", "num_bytes", "expected"),
    [
        (
            {"ssm": SsmStatePool(40)},
            {"chunk_size": 4096},
            5_000 * MIB,
            "the pool holds 40 state slots in 5,000 MiB; chunks: of 4,096 tokens; prefix cache: off",
        ),
        (
            {"kv": KvCachePool(2, 8), "ssm": SsmStatePool(1)},
            {"enable_chunked_prefill": False, "chunk_size": 64},
            MIB // 2,
            "the pool holds 16 tokens (2 blocks of 8) and 1 state slot in 0.5 MiB; chunks: off; prefix cache: off",
        ),
        (
            {"kv": KvCachePool(512, 16)},
            {},
            96 * MIB,
            "the pool holds 8,192 tokens (512 blocks of 16) in 96 MiB; chunks: of adaptive size; prefix cache: on",
        ),
    ],
)
def test_pool_is_described(pool: dict[str, Any], limits: dict[str, Any], num_bytes: int, expected: str) -> None:
    sequence_pool = SequencePool(**{"kv": None, "ssm": None} | pool)
    assert describe_pool(sequence_pool, SchedulerConfig(**limits), num_bytes) == expected


def test_places_are_those_of_the_blocks() -> None:
    whole, first, later = (make_request(i, [20]).sequences[0] for i in range(3))
    first.allocation = Allocation(0, 20, [7, 3, 5], 0, None, ())
    later.allocation = Allocation(0, 20, [2, 9, 4], 0, None, ())
    places = KvSlots.of([PrefillChunk(whole, 0, 2), PrefillChunk(first, 0, 9), PrefillChunk(later, 7, 10)], 8)
    assert places.lengths.tolist() == [0, 0, 7]
    assert places.tables.tolist() == [[0, 0], [0, 0], [2, 9]]
    assert places.slots.tolist() == [-1, -1, *range(56, 64), 24, 23, 72, 73]
