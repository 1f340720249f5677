"""A batch that was begun: what the device works on while the loop goes on."""

from __future__ import annotations

from dataclasses import dataclass

from ..scheduling import Batch
from .runner import DeviceLostError, EndedForward, Forward, Runner


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
            forward: Forward = runner.begin(batch.chunks) if batch.chunks else EndedForward([])
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary between requests: none may end the loop
            forward = EndedForward(error)
        return cls(batch, forward, started_s, sum(chunk.num_tokens for chunk in batch.chunks))
