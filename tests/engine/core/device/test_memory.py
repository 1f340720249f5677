"""The size of the next chunk follows the free memory and the memory of earlier chunks."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from penstock.engine.core.device.memory import MemoryGauge, TokenMemoryEstimator

MIB = 1 << 20


class Gauge(MemoryGauge):
    """A device with `free` bytes. `peak` is the memory of the next forward."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.peak: int | None = None
        self.is_measuring = False

    def available(self) -> int:
        return self.free

    def reset_peak(self) -> None:
        self.is_measuring = True

    def peak_bytes(self) -> int | None:
        assert self.is_measuring
        self.is_measuring = False
        return self.peak


def measure(meter: TokenMemoryEstimator, gauge: Gauge, num_tokens: int, num_bytes: int | None) -> None:
    meter.begin()
    gauge.peak = num_bytes
    meter.end(num_tokens)


@pytest.mark.parametrize(
    ("free", "token_bytes", "expected"),
    [(1000, 10, 70), (14, 10, 0), (15, 10, 1), (0, 10, 0), (1000, 0, 700), (15, 0, 10)],
)
def test_estimate_counts_before_the_first_measurement(free: int, token_bytes: int, expected: int) -> None:
    gauge = Gauge(free)
    meter = TokenMemoryEstimator(gauge, token_bytes)
    assert meter.free_tokens() == expected
    measure(meter, gauge, 100, None)  # the device reports no peak
    assert meter.free_tokens() == expected


def test_next_chunk_is_at_most_twice_a_measured_one() -> None:
    gauge = Gauge(1000)  # 700 are usable
    meter = TokenMemoryEstimator(gauge, 1)
    measure(meter, gauge, 100, 350)
    assert meter.free_tokens() == 200
    measure(meter, gauge, 100, 351)  # twice as much would be too much
    assert meter.free_tokens() == 100
    measure(meter, gauge, 100, 300)  # the largest measurement counts
    assert meter.free_tokens() == 100
    gauge.free = 10_000
    assert meter.free_tokens() == 200
    measure(meter, gauge, 500, 1000)
    assert meter.free_tokens() == 1000


@given(
    free=st.integers(0, 10_000),
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=20),
    token_bytes=st.integers(1, 50),
    fixed_bytes=st.integers(0, 500),
)
def test_allowed_chunk_fits_if_bytes_are_linear_in_tokens(
    free: int, sizes: list[int], token_bytes: int, fixed_bytes: int
) -> None:
    gauge = Gauge(free)
    meter = TokenMemoryEstimator(gauge, 1)
    for size in sizes:
        measure(meter, gauge, size, fixed_bytes + size * token_bytes)
    num_tokens = meter.free_tokens()
    if fixed_bytes + min(sizes) * token_bytes <= int(0.7 * free):
        assert fixed_bytes + num_tokens * token_bytes <= free
        assert num_tokens >= min(sizes)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux with /proc/self/clear_refs")
def test_host_reports_the_peak_after_memory_was_freed() -> None:
    memory = MemoryGauge()
    memory.reset_peak()
    before = memory.peak_bytes()
    assert before is not None
    assert before < 32 * MIB
    for _ in range(2):
        block = np.ones(64 * MIB, np.uint8)
        del block
    taken = memory.peak_bytes()
    assert taken is not None
    assert 60 * MIB <= taken < 96 * MIB  # the kernel counts pages of a thread in batches
    memory.reset_peak()
    taken = memory.peak_bytes()
    assert taken is not None
    assert taken < 32 * MIB
