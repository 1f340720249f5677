"""Forwards that run side by side give the same rows as alone, in any order, also if some are dropped."""

import gc
import os
import select
import time
from collections.abc import Callable

import numpy as np
import pytest

from penstock.kernels.cpu import CpuEncoder, CpuForward, Format, Machine

from .specs import SHAPES, Texts, make_spec, make_texts

SPEC = make_spec(SHAPES[0])
LENGTHS = ([5], [300], [3, 200, 7, 50], [17] * 20, [1, 2, 3], [400, 2])


@pytest.fixture(autouse=True)
def _needs_the_library(widest: Machine) -> None:
    """Skips where there is none."""


def begin(encoder: CpuEncoder, texts: Texts) -> CpuForward:
    return encoder.begin(texts.ids, texts.places, texts.starts)


def wait_for_lanes(machine: Machine) -> None:
    """Lanes that start, or were woken for work that others took, are free a moment later."""
    until_s = time.monotonic() + 120
    while machine.num_free < machine.num_lanes:
        assert time.monotonic() < until_s
        time.sleep(0.001)


@pytest.mark.parametrize("num_lanes", [1, 2, 3, 5])
def test_parallel_forwards_equal_single_forwards(num_lanes: int) -> None:
    batches = [make_texts(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    with Machine(num_lanes) as machine:
        encoder = CpuEncoder(machine, SPEC, Format.F32)
        alone = [begin(encoder, texts).result()[0] for texts in batches]
        numbers = np.random.default_rng(num_lanes)
        for _ in range(40):
            order = numbers.integers(len(batches), size=12)
            running = [(number, begin(encoder, batches[number])) for number in order]
            numbers.shuffle(running)  # type: ignore[arg-type]
            for number, forward in running:
                assert np.array_equal(forward.result()[0], alone[number])


def test_the_bell_rings_where_a_forward_ends_and_a_lane_is_free() -> None:
    waiting, fd = os.pipe()
    with Machine(2) as machine:
        encoder = CpuEncoder(machine, SPEC, Format.F32)
        machine.set_wakeup_fd(fd)
        forward = begin(encoder, make_texts([300, 300, 300]))
        while not forward.is_done:
            assert select.select([waiting], [], [], 10)[0], "it has ended without a wake-up"
            os.read(waiting, 100)
        while not machine.num_free:  # the first that is free rings for both
            assert select.select([waiting], [], [], 10)[0], "a lane is free without a wake-up"
            os.read(waiting, 100)
        forward.result()
        wait_for_lanes(machine)
        machine.set_wakeup_fd(None)
        while select.select([waiting], [], [], 0)[0]:
            os.read(waiting, 100)
        begin(encoder, make_texts([30])).result()
        assert not select.select([waiting], [], [], 0.1)[0]
    os.close(waiting)
    os.close(fd)


def test_a_forward_takes_the_lanes_until_it_ends() -> None:
    with Machine(2) as machine:
        encoder = CpuEncoder(machine, SPEC, Format.F32)
        wait_for_lanes(machine)
        running = [begin(encoder, make_texts([400] * 8)) for _ in range(3)]
        assert machine.num_free == 0
        for forward in running:
            forward.result()
        assert all(forward.is_done for forward in running)
        wait_for_lanes(machine)


@pytest.mark.parametrize("forget", [lambda forward, encoder, machine: None, lambda *_: gc.collect()])
def test_one_that_is_forgotten_ends_before_its_memory_goes(forget: Callable[..., object]) -> None:
    for _ in range(20):
        machine = Machine(3)
        encoder = CpuEncoder(machine, SPEC, Format.F32)
        forward = begin(encoder, make_texts([200] * 6))
        forget(forward, encoder, machine)
        del forward, encoder, machine
