"""What a runner on a GPU does before the first request: finds its limits, compiles, and fills what torch keeps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from ....protocol.batch_outputs import BatchOutputs
from ....protocol.config import SchedulerConfig
from ....protocol.model_info import ModelInfo
from ....scheduling import Chunk, SequencePool
from ...memory.memory_meter import MemoryGauge
from ...runner import DeviceLimits, DeviceMemoryError, Forward
from .largest_batch import LargestBatch, largest_batch, largest_shapes
from .made_batches import MadeBatches
from .rounds import run_rounds

logger = logging.getLogger("penstock.engine")

_SMALL: Final = 64
"""Tokens of a batch that a recorded forward answers where there is one."""


class GpuStart:
    """The start of one runner.

    Args:
        info: The model, on its device.
        made: Makes batches for it.
        begin: Begins one.
        config: What the operator says of batches.
        gauge: Of the device.
        memory: Bytes that the device has; None where that is not known.
    """

    def __init__(
        self,
        info: ModelInfo,
        made: MadeBatches,
        begin: Callable[[Sequence[Chunk]], Forward],
        config: SchedulerConfig,
        gauge: MemoryGauge,
        memory: int | None,
    ) -> None:
        self._info = info
        self._made = made
        self._begin = begin
        self._config = config
        self._gauge = gauge
        self._memory = memory

    def find_limits(self, *, is_whole: bool) -> tuple[DeviceLimits, int]:
        """Runs the largest forward; returns the limits, and the Bytes that it takes.

        Args:
            is_whole: Whether every input runs whole, however long.

        Raises:
            DeviceMemoryError: There is too little memory even for a small one.
        """
        budget = self._config.token_budget(self._info.device, self._memory)
        if is_whole:
            budget = max(budget, self._info.max_model_len)
        largest = self._largest(budget)
        logger.info(
            "a forward of %d tokens takes %d MiB beside the weights", largest.num_tokens, largest.num_bytes >> 20
        )
        return DeviceLimits(memory=self._memory, max_tokens=largest.num_tokens), largest.num_bytes

    def compile(self, sequence_pool: SequencePool, limits: DeviceLimits) -> None:
        """Runs a batch of every kind.

        Args:
            sequence_pool: Memory of sequences that run in chunks.
            limits: What `find_limits` found.
        """
        assert limits.max_tokens is not None, "the limits were found"
        run_rounds(
            self._made,
            self._execute,
            sequence_pool,
            token_budget=limits.max_tokens,
            longest=self._info.max_model_len,
            max_num_seqs=self._config.seqs(self._info.device),
        )

    def refill(self, limits: DeviceLimits) -> None:
        """Runs the largest batches, and two small ones at once, for the memory that torch keeps once they have run.

        torch gives it back to the driver before it records a CUDA graph, pinned memory too, and traffic would wait
        while it is taken again.

        Args:
            limits: What `find_limits` found.
        """
        assert limits.max_tokens is not None, "the limits were found"
        max_num_seqs = self._config.seqs(self._info.device)
        for lengths in largest_shapes(limits.max_tokens, self._info.max_model_len, max_num_seqs):
            try:
                self._run_plain(lengths)
            except DeviceMemoryError as error:  # traffic lowers the budget where it finds the same
                logger.warning("out of memory beside CUDA graphs with %d tokens: %s", sum(lengths), error)
        small = [min(_SMALL, self._info.max_model_len, limits.max_tokens)]
        for forward in [self._begin(self._made.batch(small, self._made.plain()[:1])) for _ in range(2)]:
            forward.outputs()

    def _execute(self, chunks: Sequence[Chunk]) -> BatchOutputs:
        return self._begin(chunks).outputs()

    def _run_plain(self, lengths: Sequence[int]) -> None:
        for params in self._made.plain():
            self._execute(self._made.batch(lengths, [params]))

    def _largest(self, num_tokens: int) -> LargestBatch:
        return largest_batch(
            self._run_plain,
            self._gauge,
            num_tokens=num_tokens,
            longest=self._info.max_model_len,
            max_num_seqs=self._config.seqs(self._info.device),
        )
