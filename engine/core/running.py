"""Batches that were begun: what the device works on while the loop goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..protocol.batch_outputs import BatchOutputs
from ..scheduling import Batch, Scheduler
from .runner import DeviceLostError, EndedForward, Forward, Runner

_BUDGETS_UNDER_WAY: Final = 2
"""Of tokens. The next batch begins while the last sequences of one before it run."""


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """A batch and its forward.

    Attributes:
        batch: What the scheduler has booked.
        forward: Of its chunks.
        started_s: Seconds, of time.monotonic.
        num_tokens: Of the chunks.
    """

    batch: Batch
    forward: Forward
    started_s: float
    num_tokens: int

    @classmethod
    def begin(cls, runner: Runner, batch: Batch, started_s: float) -> Running:
        """Begins a batch. An error is told by the outputs of its forward: it belongs to some of the requests.

        Raises:
            DeviceLostError: The device is lost for all requests.
        """
        try:
            forward: Forward = runner.begin(batch.chunks) if batch.chunks else EndedForward(BatchOutputs.of(0, ()))
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary between requests: none may end the loop
            forward = EndedForward(error)
        return cls(batch, forward, started_s, sum(chunk.num_tokens for chunk in batch.chunks))


def has_room(runner: Runner, scheduler: Scheduler, running: Sequence[Running]) -> bool:
    """Whether a batch may begin beside those that run: a part of the device is free, and few enough tokens run.

    Args:
        runner: Of the device.
        scheduler: The caller holds its lock.
        running: What has begun and is not delivered.
    """
    if not running:
        return True
    num_tokens = sum(batch.num_tokens for batch in running)
    is_bounded = num_tokens < _BUDGETS_UNDER_WAY * scheduler.token_budget
    return is_bounded and runner.has_room and not scheduler.has_long
