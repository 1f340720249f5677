"""Lanes run forwards side by side, sleep without work, and end with their library."""

import gc
import os
import select
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.kernels.cpu import CpuEncoder, CpuForward, CpuKernelError, CpuLibrary, Format

from ...waiting import wait_until
from .specs import SHAPES, Texts, make_spec, make_texts

SPEC = make_spec(SHAPES[0])
LENGTHS = ([5], [300], [3, 200, 7, 50], [17] * 20, [1, 2, 3], [400, 2])


@pytest.fixture(autouse=True)
def _needs_library(three_lane_library: CpuLibrary) -> None:
    """Skips the tests without the library."""


def open_encoder(library: CpuLibrary) -> CpuEncoder:
    return CpuEncoder(library, SPEC, Format.F32)


def begin(encoder: CpuEncoder, texts: Texts) -> CpuForward:
    return encoder.begin(texts.input())


def forward(encoder: CpuEncoder, texts: Texts) -> np.ndarray:
    return begin(encoder, texts).result()[0]


def wait_for_lanes(library: CpuLibrary) -> None:
    """Waits for lanes that start, or were woken for work that other lanes took."""
    wait_until(lambda: library.num_free == library.num_lanes)


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("num_lanes", [1, 2, 3, 5])
def test_parallel_forwards_equal_single_forwards(num_lanes: int) -> None:
    batches = [make_texts(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    with CpuLibrary(num_lanes) as library:
        encoder = open_encoder(library)
        alone = [forward(encoder, texts) for texts in batches]
        numbers = np.random.default_rng(num_lanes)
        for _ in range(40):
            order = numbers.integers(len(batches), size=12)
            running = [(number, begin(encoder, batches[number])) for number in order]
            numbers.shuffle(running)  # type: ignore[arg-type]
            for number, unfinished in running:
                assert np.array_equal(unfinished.result()[0], alone[number])


def test_wakeup_follows_end_of_forward_and_free_lane() -> None:
    waiting, fd = os.pipe()
    with CpuLibrary(2) as library:
        encoder = open_encoder(library)
        library.set_wakeup_fd(fd)
        running = begin(encoder, make_texts([300, 300, 300]))
        while not running.is_done:
            assert select.select([waiting], [], [], 10)[0], "the forward ended without a wake-up"
            os.read(waiting, 100)
        while not library.num_free:  # the first free lane sends one wake-up for both events
            assert select.select([waiting], [], [], 10)[0], "a lane is free without a wake-up"
            os.read(waiting, 100)
        running.result()
        wait_for_lanes(library)
        library.set_wakeup_fd(None)
        while select.select([waiting], [], [], 0)[0]:
            os.read(waiting, 100)
        forward(encoder, make_texts([30]))
        assert not select.select([waiting], [], [], 0.1)[0]
    os.close(waiting)
    os.close(fd)


def test_running_forwards_hold_the_lanes() -> None:
    with CpuLibrary(2) as library:
        encoder = open_encoder(library)
        wait_for_lanes(library)
        running = [begin(encoder, make_texts([400] * 8)) for _ in range(3)]
        assert library.num_free == 0
        for unfinished in running:
            unfinished.result()
        assert all(finished.is_done for finished in running)
        wait_for_lanes(library)


@pytest.mark.parametrize("collects", [False, True])
def test_deleted_forward_ends_before_its_memory_is_freed(collects: bool) -> None:
    for _ in range(20):
        library = CpuLibrary(3)
        encoder = open_encoder(library)
        running = begin(encoder, make_texts([200] * 6))
        if collects:
            gc.collect()
        del running, encoder, library


def status_of(thread: Path) -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines())


def test_idle_lanes_sleep() -> None:
    others = set(Path("/proc/self/task").iterdir())
    with CpuLibrary(4) as library:
        forward(open_encoder(library), make_texts([200]))
        lanes = set(Path("/proc/self/task").iterdir()) - others
        assert len(lanes) >= 3
        wait_until(lambda: all(status_of(lane)["State"][0] == "S" for lane in lanes))
        before = [status_of(lane)["voluntary_ctxt_switches"] for lane in lanes]
        time.sleep(1)
        assert [status_of(lane)["voluntary_ctxt_switches"] for lane in lanes] == before, "a lane woke up without work"


def test_closed_libraries_leave_no_threads_and_memory() -> None:
    texts = make_texts([300, 20])

    def open_and_close() -> None:
        with CpuLibrary(4) as library:
            forward(open_encoder(library), texts)

    for _ in range(20):
        open_and_close()
    gc.collect()
    threads, memory = num_threads(), resident_bytes()
    for _ in range(200):
        open_and_close()
    gc.collect()
    assert num_threads() == threads
    assert resident_bytes() - memory < 8_000_000


def test_invalid_library_argument_is_rejected(three_lane_library: CpuLibrary) -> None:
    with pytest.raises(CpuKernelError, match="cannot start -1 threads"):
        CpuLibrary(-1)
    encoder = open_encoder(three_lane_library)
    three_lane_library.close()
    three_lane_library.close()
    with pytest.raises(CpuKernelError, match="closed"):
        forward(encoder, make_texts([3]))
