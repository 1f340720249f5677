"""Batches that were begun: what the device works on while the loop goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from traceback import clear_frames
from typing import Final

from ..protocol.ipc.batch_outputs import BatchOutputs
from ..scheduling import Batch, Scheduler
from .runner import DeviceLostError, EndedForward, Forward, Runner
from .step_watch import Step

_BUDGETS_UNDER_WAY: Final = 2
"""Of tokens. The next batch begins while the last sequences of one before it run."""


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """A batch and its forward.

    Attributes:
        batch: Batch from the scheduler.
        forward: Of its chunks.
        started_s: Seconds, of time.monotonic.
        step: Counts how long it has run.
        num_tokens: Of the chunks.
        is_beside: Whether others ran when it was begun.
    """

    batch: Batch
    forward: Forward
    started_s: float
    step: Step
    num_tokens: int
    is_beside: bool

    @classmethod
    def begin(cls, runner: Runner, batch: Batch, started_s: float, step: Step, *, is_beside: bool) -> Running:
        """Begins a batch. An error is told by the outputs of its forward: it belongs to some of the requests.

        Raises:
            DeviceLostError: The device is lost for all requests.
        """
        try:
            forward: Forward = runner.begin(batch.chunks) if batch.chunks else EndedForward(BatchOutputs.of(0, ()))
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary between requests: none may end the loop
            clear_frames(error.__traceback__)  # they hold what the forward had come to, until it is collected
            forward = EndedForward(error)
        return cls(batch, forward, started_s, step, step.num_tokens, is_beside)


def has_room(runner: Runner, scheduler: Scheduler, running: Sequence[Running]) -> bool:
    """Whether a batch may begin beside those that run: a part of the device is free, and few enough tokens run.

    One with chunks may where the device keeps the order of batches, as chunks of one prompt build on each other.

    Args:
        runner: Of the device.
        scheduler: The caller holds its lock.
        running: What has begun and is not delivered.
    """
    if not running:
        return True
    if not runner.has_room or (scheduler.has_long and (not runner.keeps_order or scheduler.awaits_quiet)):
        return False
    num_tokens = sum(batch.num_tokens for batch in running if not batch.forward.is_done)
    return num_tokens < _BUDGETS_UNDER_WAY * scheduler.token_budget


def has_use(runner: Runner, scheduler: Scheduler, running: Sequence[Running]) -> bool:
    """Whether a batch of what there is to do should begin now, given that it may; see `has_room` for the arguments.

    Where it would wait on the device behind another one, all that it saves is the time between the two: then it does if
    it is large.
    """
    waits = runner.keeps_order and any(not batch.forward.is_done for batch in running)
    return scheduler.has_work and (not waits or scheduler.has_much)
