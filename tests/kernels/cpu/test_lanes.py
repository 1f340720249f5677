"""Lanes: they sleep without work, end without a trace, and never wait for each other in vain."""

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.kernels.cpu import CpuEncoder, CpuKernelError, Format, Machine

from .specs import SHAPES, Texts, make_spec, make_texts

SPEC = make_spec(SHAPES[0])


@pytest.fixture(autouse=True)
def _needs_the_library(widest: Machine) -> None:
    """Skips where there is none."""


def forward(encoder: CpuEncoder, texts: Texts) -> np.ndarray:
    return encoder(texts.ids, texts.places, texts.starts)[0]


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_thousand_forwards_of_any_shape_on_any_lanes() -> None:
    """Tiny ones, of one text or of many: together and by parts, some lanes at work and some not."""
    numbers = np.random.default_rng(0)
    machines = [Machine(num_lanes) for num_lanes in (1, 2, 3, 5)]
    encoders = [CpuEncoder(machine, SPEC, Format.F32) for machine in machines]
    batches = [make_texts(numbers.integers(1, 60, n).tolist(), n) for n in (1, 1, 2, 3, 5, 9)]
    expected = [forward(encoders[0], texts) for texts in batches]
    for _ in range(1000):
        number = int(numbers.integers(len(batches)))
        rows = forward(encoders[int(numbers.integers(len(encoders)))], batches[number])
        assert np.array_equal(rows, expected[number])
    for machine in machines:
        machine.close()


def test_machine_without_lanes_starts_no_thread() -> None:
    before = num_threads()
    with Machine(0) as machine:
        assert num_threads() == before
        weights = np.eye(8, dtype=np.float32)
        assert np.array_equal(machine.product(machine.pack(weights, None, Format.F32), weights), weights)
        encoder = CpuEncoder(machine, SPEC, Format.F32)
        with pytest.raises(CpuKernelError, match="opened with 0 lanes, and a forward needs at least 1"):
            forward(encoder, make_texts([3]))
        with pytest.raises(CpuKernelError, match="0 lanes"):
            machine.set_wakeup_fd(None)


def status_of(thread: Path) -> dict[str, str]:
    lines = (thread / "status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines)


def state_of(thread: Path) -> str:
    return status_of(thread)["State"][0]


def switches_of(thread: Path) -> str:
    return status_of(thread)["voluntary_ctxt_switches"]


def test_idle_lanes_take_no_processor() -> None:
    others = set(Path("/proc/self/task").iterdir())
    with Machine(4) as machine:
        forward(CpuEncoder(machine, SPEC, Format.F32), make_texts([200]))
        lanes = set(Path("/proc/self/task").iterdir()) - others
        assert len(lanes) >= 3
        until_s = time.monotonic() + 60
        while any(state_of(lane) != "S" for lane in lanes):
            assert time.monotonic() < until_s, "a lane without work does not sleep"
            time.sleep(0.01)
        before = [switches_of(lane) for lane in lanes]
        time.sleep(1)
        assert [switches_of(lane) for lane in lanes] == before, "a lane woke up without work"


def test_two_hundred_machines_leave_neither_threads_nor_memory() -> None:
    texts = make_texts([300, 20])

    def live() -> None:
        with Machine(4) as machine:
            forward(CpuEncoder(machine, SPEC, Format.F32), texts)

    for _ in range(20):
        live()
    gc.collect()
    threads, memory = num_threads(), resident_bytes()
    for _ in range(200):
        live()
    gc.collect()
    assert num_threads() == threads
    assert resident_bytes() - memory < 8_000_000


def test_a_machine_that_is_forgotten_ends_its_threads() -> None:
    before = num_threads()
    machine = Machine(4)
    assert num_threads() == before + 4
    del machine
    gc.collect()
    assert num_threads() == before


def test_machines_side_by_side() -> None:
    """Each called from its own thread, at the same time."""
    texts = [make_texts([150, 3, 20], seed) for seed in range(3)]
    with Machine(1) as machine:
        encoder = CpuEncoder(machine, SPEC, Format.F32)
        expected = [forward(encoder, batch) for batch in texts]
    wrong: list[int] = []

    def work(number: int) -> None:
        with Machine(3) as machine:
            encoder = CpuEncoder(machine, SPEC, Format.F32)
            results = [forward(encoder, texts[number]) for _ in range(30)]
            wrong.extend(number for rows in results if not np.array_equal(rows, expected[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.fixture
def one_core() -> Iterator[None]:
    """This thread, and those that it starts, on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[400], [40] * 16], ids=["together", "parts"])
def test_more_lanes_than_cores_do_not_collapse(one_core: None, lengths: list[int]) -> None:
    """Time of the processor, not of the clock: lanes that wait must not spin it away."""

    def cost(num_lanes: int) -> float:
        with Machine(num_lanes) as machine:
            encoder, texts = CpuEncoder(machine, SPEC, Format.F32), make_texts(lengths)
            forward(encoder, texts)
            least = float("inf")
            for _ in range(5):
                before = time.process_time()
                for _ in range(10):
                    forward(encoder, texts)
                least = min(least, time.process_time() - before)
            return least

    assert cost(4) < 3 * cost(1) + 0.02


def test_negative_number_of_lanes_is_refused() -> None:
    with pytest.raises(CpuKernelError, match="gives no -1 threads"):
        Machine(-1)
