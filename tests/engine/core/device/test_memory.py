"""Chunks shrink before memory runs out: what is free, what past chunks took, and a device that is lost above that."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from penstock.engine.core.device.memory import MemoryMeter
from penstock.engine.core.runner import DeviceLostError
from penstock.engine.protocol.batch_outputs import BatchOutputs
from penstock.engine.scheduling import PrefillChunk

from ..fake_runner import BLOCK, FakeRunner, Steps, pool

PROMPT = 32 * 1024


class Gauge:
    """A device with so many Bytes free, which tells what a forward took."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.took: int | None = None
        self.is_watching = False

    def available(self) -> int:
        return self.free

    def begin(self) -> None:
        self.is_watching = True

    def taken(self) -> int | None:
        assert self.is_watching
        self.is_watching = False
        return self.took


def measure(meter: MemoryMeter, gauge: Gauge, num_tokens: int, num_bytes: int | None) -> None:
    meter.begin()
    gauge.took = num_bytes
    meter.end(num_tokens)


@pytest.mark.parametrize(("free", "expected"), [(1000, 70), (14, 0), (15, 1), (0, 0)])
def test_before_a_chunk_was_measured_tokens_are_taken_to_need_a_fixed_number_of_bytes(free: int, expected: int) -> None:
    assert MemoryMeter(Gauge(free), 10).free_tokens() == expected
    assert MemoryMeter(Gauge(free), 0).free_tokens() == int(free * 0.7)  # not less than a Byte


def test_a_chunk_may_be_twice_as_large_as_one_that_is_known() -> None:
    gauge = Gauge(1000)  # of which 700 may be taken
    meter = MemoryMeter(gauge, 1)
    measure(meter, gauge, 100, 350)
    assert meter.free_tokens() == 200
    measure(meter, gauge, 100, 351)  # twice as much would be too much
    assert meter.free_tokens() == 100
    measure(meter, gauge, 100, 300)  # the largest figure counts
    assert meter.free_tokens() == 100
    gauge.free = 10_000
    assert meter.free_tokens() == 200
    measure(meter, gauge, 500, 1000)
    assert meter.free_tokens() == 1000


def test_what_did_not_fit_bounds_what_may_come() -> None:
    gauge = Gauge(1000)
    meter = MemoryMeter(gauge, 1)
    measure(meter, gauge, 100, 1400)
    assert meter.free_tokens() == 50  # in proportion
    measure(meter, gauge, 60, 400)
    assert meter.free_tokens() == 60  # one of that size was seen to fit, twice as much would not
    measure(meter, gauge, 30, 100)
    assert meter.free_tokens() == 60
    gauge.free = 500  # 350: those of 60 do not fit any more
    assert meter.free_tokens() == 59
    gauge.free = 100
    assert meter.free_tokens() == 30 * 70 // 100
    gauge.free = 0
    assert meter.free_tokens() == 0


def test_sizes_that_are_alike_are_one() -> None:
    gauge = Gauge(1000)
    meter = MemoryMeter(gauge, 1)
    measure(meter, gauge, 100, 200)
    measure(meter, gauge, 70, 600)  # more than that of 100 took: it looked back on more
    assert meter.free_tokens() == 100
    gauge.free = 700
    assert meter.free_tokens() == 100 * 490 // 600


def test_a_device_that_does_not_tell_leaves_it_at_the_first_guess() -> None:
    gauge = Gauge(1000)
    meter = MemoryMeter(gauge, 10)
    measure(meter, gauge, 100, None)
    assert meter.free_tokens() == 70


@given(
    free=st.integers(0, 10_000),
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=20),
    token_bytes=st.integers(1, 50),
    fixed_bytes=st.integers(0, 500),
)
def test_what_it_allows_fits_wherever_bytes_grow_no_faster_than_tokens(
    free: int, sizes: list[int], token_bytes: int, fixed_bytes: int
) -> None:
    gauge = Gauge(free)
    meter = MemoryMeter(gauge, 1)
    for size in sizes:
        measure(meter, gauge, size, fixed_bytes + size * token_bytes)
    num_tokens = meter.free_tokens()
    smallest = min(sizes)
    if fixed_bytes + smallest * token_bytes <= int(0.7 * free):
        assert fixed_bytes + num_tokens * token_bytes <= free
        assert num_tokens >= smallest


class Device(FakeRunner):
    """A forward of n tokens that looks back on c takes a * n + b * c Bytes; above its memory the process is killed."""

    def __init__(self, memory: int, token_bytes: int, context_bytes: int) -> None:
        super().__init__(pool(PROMPT // BLOCK + 10), max_model_len=PROMPT)
        self.gauge = Gauge(memory)
        self.token_bytes, self.context_bytes = token_bytes, context_bytes
        self.meter = MemoryMeter(self.gauge, token_bytes)

    def execute(self, chunks: Sequence[PrefillChunk]) -> BatchOutputs:
        self.meter.begin()
        outputs = super().execute(chunks)
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        taken = num_tokens * self.token_bytes + sum(chunk.start for chunk in chunks) * self.context_bytes
        if taken > self.gauge.free:
            raise DeviceLostError(f"{num_tokens} tokens at {chunks[-1].start} are too many")
        self.gauge.took = taken
        self.meter.end(num_tokens)
        return outputs

    def free_tokens(self) -> int:
        return self.meter.free_tokens()

    @property
    def sizes(self) -> list[int]:
        return [end - start for batch in self.batches for *_, start, end in batch]


@pytest.mark.parametrize(
    ("memory", "token_bytes", "context_bytes"), [(1_000_000, 1000, 15), (600_000, 1000, 0), (1_000_000, 2000, 20)]
)
def test_a_long_prompt_ends_in_chunks_that_shrink_in_time(memory: int, token_bytes: int, context_bytes: int) -> None:
    device = Device(memory, token_bytes, context_bytes)
    steps = Steps(device, budget=2048)
    steps.submit(1, PROMPT)
    steps.run_all()
    assert steps.answers == {1: {0: [float(PROMPT)]}}
    assert max(device.sizes) * token_bytes <= 0.7 * memory
    assert max(device.sizes) >= 128
    assert steps.cache_use.memory_pressure > 0.5
    assert steps.core._scheduler.token_budget == 2048  # it never ran out
    assert steps.cache_use.chunks.failed_chunks == 0
    if context_bytes:
        assert device.sizes[-2] < 0.8 * max(device.sizes)


def test_with_a_fixed_chunk_size_it_is_lost() -> None:
    device = Device(1_000_000, 1000, 15)
    steps = Steps(device, budget=2048, chunk_size=1024)
    steps.submit(1, PROMPT)
    with pytest.raises(DeviceLostError, match="1024 tokens at 0"):
        steps.run_all()
    late = Device(1_000_000, 1000, 15)
    steps = Steps(late, budget=2048, chunk_size=700)
    steps.submit(1, PROMPT)
    with pytest.raises(DeviceLostError, match="700 tokens at"):
        steps.run_all()
    assert len(late.batches) > 10
