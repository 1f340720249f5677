"""The SSM states of a preempted sequence leave the device and return to another slot."""

import contextlib
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch

from penstock.engine.core.device.chunk_memory import ChunkMemory
from penstock.engine.core.device.stream import DeviceStream, stream_of
from penstock.engine.executors.torch.packed_batch import SsmStates
from penstock.engine.protocol.messages import TokenizedInput
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.scheduling import (
    Allocation,
    CacheSpec,
    InputSequence,
    PoolSize,
    PrefillChunk,
    Request,
    SsmLayerSpec,
    allocations_of,
)

from ....pretend_cuda import DEVICE, OnCuda, pretend_cuda

CPU = torch.device("cpu")
NUM_TOKENS, NUM_POOLED = 10, 4


class Preemption:
    """A sequence between two chunks, and a memory of two slots."""

    def __init__(self, device: torch.device, stream: DeviceStream) -> None:
        spec = CacheSpec(ssm_layers=(SsmLayerSpec((2, 3), (2, 2, 2)), SsmLayerSpec((4, 1), (3, 5))))
        self.memory = ChunkMemory(
            spec, PoolSize(0, 2, 0), block_size=16, dtype=torch.float32, device=device, stream=stream
        )
        self.sequence = InputSequence(
            sequence_id=(0, 0),
            tokens=TokenizedInput(np.arange(NUM_TOKENS, dtype=np.int32)),
            num_tokens=NUM_TOKENS,
            request=Request(0, PoolingParams()),
            num_pooled_tokens=NUM_POOLED,
        )
        self.chunks = [PrefillChunk(self.sequence, NUM_POOLED, 5)]
        self.allocate(0)

    def allocate(self, slot: int) -> Allocation:
        self.sequence.allocation = Allocation(0, NUM_TOKENS, [], 0, slot, ())
        return self.sequence.allocation

    def save(self, slot: int) -> None:
        self.memory.save(self.sequence, self.allocate(slot))

    @property
    def states(self) -> SsmStates:
        allocations, self.sequence.allocation = allocations_of(self.chunks), None  # its request is cancelled
        cache = self.memory.batch_cache(self.chunks, allocations)
        self.sequence.allocation = allocations[0]
        assert cache is not None
        assert cache.ssm is not None
        return cache.ssm

    def move(self, watched: AbstractContextManager[object]) -> None:
        """Moves the sequence from slot 0 to slot 1 inside `watched`."""
        states = [*self.states.conv, *self.states.ssm]
        for number, layer in enumerate(states, 1):
            layer[0].fill_(float(number))
        with watched:
            self.save(0)
            for layer in states:
                layer[0].fill_(9.0)  # the states of the next sequence in this slot
            self.allocate(1)
            self.memory.restore(self.chunks)
        for number, layer in enumerate(states, 1):
            assert layer[0].cpu().unique().tolist() == [9.0]
            assert layer[1].cpu().unique().tolist() == [float(number)]


def test_second_preemption_keeps_the_saved_states() -> None:
    preemption = Preemption(CPU, stream_of(CPU))
    preemption.states.conv[0].fill_(1.0)
    preemption.save(0)
    preemption.states.conv[0].fill_(2.0)
    preemption.save(1)  # it loses the second slot before it runs there
    preemption.memory.restore(preemption.chunks)
    assert preemption.states.conv[0].unique().tolist() == [1.0, 2.0]


def test_states_move_without_a_wait_on_a_pretended_device() -> None:
    with pretend_cuda() as mode:
        preemption = Preemption(DEVICE, stream_of(DEVICE))
        assert isinstance(preemption.states.conv[0], OnCuda)
        preemption.move(mode.watched())


@pytest.mark.gpu
def test_states_move_without_a_wait_on_a_gpu() -> None:
    preemption = Preemption(DEVICE, stream_of(DEVICE))
    preemption.move(contextlib.nullcontext())  # the first allocation of pinned memory waits
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        watched = contextlib.ExitStack()
        watched.callback(torch.cuda.set_sync_debug_mode, "default")
        preemption.move(watched)
    finally:
        torch.cuda.set_sync_debug_mode("default")
