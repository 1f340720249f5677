"""What is kept of sequences between their chunks, and what becomes of it when they lose their memory."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch

from penstock.engine.core.device.chunk_memory import ChunkMemory
from penstock.engine.core.device.stream import DeviceStream, stream_of
from penstock.engine.executors.torch.packed_batch import SsmStates
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import TokenizedInput
from penstock.engine.scheduling import (
    Allocation,
    CacheSpec,
    PoolPlan,
    PrefillChunk,
    QueuedSequence,
    Request,
    SsmLayerSpec,
)

from ...device.pretend_cuda import DEVICE, OnCuda, Pinned, pretend_cuda
from ..played_stream import PlayedStream

NUM_TOKENS, NUM_POOLED = 10, 4


class Preempted:
    """A sequence that has run in part, and the memory of two slots for it."""

    def __init__(self, device: torch.device, stream: DeviceStream) -> None:
        layers = (SsmLayerSpec((2, 3), (2, 2, 2)), SsmLayerSpec((4, 1), (3, 5)))
        plan = PoolPlan(0, 2, 0)
        self.memory = ChunkMemory(
            CacheSpec(ssm_layers=layers), plan, block_size=16, dtype=torch.float32, device=device, stream=stream
        )
        self.sequence = QueuedSequence(
            request_id=(0, 0),
            prompt=TokenizedInput(np.arange(NUM_TOKENS, dtype=np.int32)),
            num_tokens=NUM_TOKENS,
            request=Request(0, PoolingParams()),
            num_pooled=NUM_POOLED,
        )
        self.chunks = [PrefillChunk(self.sequence, NUM_POOLED, 5)]
        self.at(0)

    def at(self, slot: int) -> Allocation:
        self.sequence.allocation = Allocation(0, NUM_TOKENS, [], 0, slot, ())
        return self.sequence.allocation

    @property
    def states(self) -> SsmStates:
        cache = self.memory.batch_cache(self.chunks)
        assert cache is not None
        assert cache.ssm is not None
        return cache.ssm


def test_saved_states_are_not_overwritten_by_what_lies_in_the_next_slot() -> None:
    device = torch.device("cpu")
    preempted = Preempted(device, stream_of(device))
    memory, first = preempted.memory, preempted.at(0)
    preempted.states.conv[0].fill_(1.0)
    memory.save(preempted.sequence, first)
    preempted.states.conv[0].fill_(2.0)
    memory.save(preempted.sequence, preempted.at(1))  # it got another slot and lost that before it ran
    memory.restore(preempted.chunks)
    assert preempted.states.conv[0].unique().tolist() == [1.0, 2.0]


def move(preempted: Preempted, watched: AbstractContextManager[object]) -> None:
    """Takes a sequence from the slot 0 to the slot 1; whoever watches is told of waits."""
    memory, first = preempted.memory, preempted.at(0)
    states = [*preempted.states.conv, *preempted.states.ssm]
    for number, layer in enumerate(states, 1):
        layer[0].fill_(float(number))
    with watched:
        memory.save(preempted.sequence, first)
        for layer in states:
            layer[0].fill_(9.0)  # of whoever got the slot
        preempted.at(1)
        memory.restore(preempted.chunks)
    assert memory._uses[preempted.sequence].saved is None
    for number, layer in enumerate(states, 1):
        assert layer[0].cpu().unique().tolist() == [9.0]
        assert layer[1].cpu().unique().tolist() == [float(number)]


def test_states_leave_a_device_and_come_back_without_a_wait() -> None:
    with pretend_cuda() as mode:
        preempted = Preempted(DEVICE, stream_of(DEVICE))
        assert isinstance(preempted.states.conv[0], OnCuda)
        move(preempted, mode.watched())


@pytest.mark.gpu
def test_states_leave_a_gpu_and_come_back_without_a_wait() -> None:
    preempted = Preempted(DEVICE, stream_of(DEVICE))
    move(preempted, contextlib.nullcontext())  # the first block of pinned memory is made by the driver, which waits
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        watched = contextlib.ExitStack()
        watched.callback(torch.cuda.set_sync_debug_mode, "default")
        move(preempted, watched)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_states_of_a_gpu_wait_in_one_block_of_pinned_memory() -> None:
    with pretend_cuda():
        preempted = Preempted(DEVICE, stream_of(DEVICE))
        preempted.memory.save(preempted.sequence, preempted.at(0))
        saved = preempted.memory._uses[preempted.sequence].saved
        assert saved is not None
        assert len(saved) == 4
        assert all(isinstance(copy, Pinned) for copy in saved)
        assert len({copy.untyped_storage().data_ptr() for copy in saved}) == 1


def test_states_come_back_though_the_host_has_not_seen_them(stream: PlayedStream) -> None:
    preempted = Preempted(torch.device("cpu"), stream)
    stream.gate.clear()
    memory, first = preempted.memory, preempted.at(0)
    preempted.states.ssm[1][0].fill_(3.0)
    memory.save(preempted.sequence, first)
    preempted.states.ssm[1][0].fill_(4.0)
    preempted.at(1)
    memory.restore(preempted.chunks)
    assert [preempted.states.ssm[1][slot].unique().tolist() for slot in (0, 1)] == [[4.0], [3.0]]
