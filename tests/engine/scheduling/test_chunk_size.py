"""Sizes of chunks and forwards follow the time that they take."""

from __future__ import annotations

import pytest

from penstock.engine.protocol.config import ChunkedPrefillConfig
from penstock.engine.scheduling.chunk_size import ChunkSizeController

MAX_TOKENS = 2048
CONFIG = ChunkedPrefillConfig(min_chunk_size=1)


def chunk_tokens(sizes: ChunkSizeController, *, others_wait: bool) -> int:
    return sizes.chunk_tokens(MAX_TOKENS, CONFIG, others_wait=others_wait)


def settle(sizes: ChunkSizeController, token_s: float, *, others_wait: bool) -> int:
    """Runs 20 chunks that take `token_s` for a token, and returns the size of the next one."""
    for _ in range(20):
        num_tokens = chunk_tokens(sizes, others_wait=others_wait)
        sizes.record(num_tokens, 0, num_tokens * token_s)
    return chunk_tokens(sizes, others_wait=others_wait)


@pytest.mark.parametrize("token_s", [1e-4, 1e-3])
def test_chunk_takes_about_a_fixed_time(token_s: float) -> None:
    busy = settle(ChunkSizeController(MAX_TOKENS), token_s, others_wait=True)
    alone = settle(ChunkSizeController(MAX_TOKENS), token_s, others_wait=False)
    assert 0.1 <= busy * token_s <= 0.15
    assert alone == MAX_TOKENS or 0.9 <= alone * token_s <= 1.0
    assert alone > busy


def test_chunk_size_has_bounds() -> None:
    assert chunk_tokens(ChunkSizeController(MAX_TOKENS), others_wait=True) == 512  # nothing was measured
    assert chunk_tokens(ChunkSizeController(2), others_wait=True) == 1
    assert settle(ChunkSizeController(MAX_TOKENS), 1.0, others_wait=True) == 128
    assert settle(ChunkSizeController(MAX_TOKENS), 1.0, others_wait=False) == 512
    assert settle(ChunkSizeController(MAX_TOKENS), 1e-7, others_wait=False) == MAX_TOKENS
    assert settle(ChunkSizeController(5), 1e-7, others_wait=False) == 5


def test_time_of_whole_sequences_is_subtracted() -> None:
    sizes = ChunkSizeController(MAX_TOKENS)
    sizes.record(0, 1, 0.1)
    sizes.record(200, 1, 0.2)
    assert chunk_tokens(sizes, others_wait=True) == 288  # of 300: the chunk took 0.1 s
    sizes = ChunkSizeController(MAX_TOKENS)
    sizes.record(0, 1000, 1.0)
    sizes.record(1000, 1000, 0.8)  # less than the whole sequences alone: the chunk counts for 0.2 s
    assert chunk_tokens(sizes, others_wait=True) == 736


def test_forward_without_time_is_accepted() -> None:
    sizes = ChunkSizeController(MAX_TOKENS)
    sizes.record(0, 0, 0.0)
    sizes.record(10, 0, 0.0)
    assert chunk_tokens(sizes, others_wait=True) == MAX_TOKENS


@pytest.mark.parametrize(("rate", "budget"), [(200, 512), (1_000, 1_000), (1_500, 1_500), (5_000, 2048), (1e9, 2048)])
def test_forward_takes_a_second_at_most(rate: float, budget: int) -> None:
    sizes = ChunkSizeController(MAX_TOKENS)
    fixed = ChunkSizeController(MAX_TOKENS, is_dynamic=False)
    for _ in range(40):
        num_tokens = sizes.forward_tokens(MAX_TOKENS)
        for each in (sizes, fixed):
            each.record(num_tokens // 4, num_tokens - num_tokens // 4, num_tokens / rate)
    assert sizes.token_s == pytest.approx(1 / rate, rel=0.01)
    assert sizes.forward_tokens(MAX_TOKENS) == pytest.approx(budget, rel=0.01)
    assert sizes.forward_tokens(100) == 100
    assert fixed.forward_tokens(MAX_TOKENS) == MAX_TOKENS
