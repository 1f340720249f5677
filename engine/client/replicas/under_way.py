"""What a replica was sent: runs whose answer is awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...protocol.request import Stage, StageTimes

Arrays = dict[str, NDArray[np.float32]]
"""The outputs of one input by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Finish:
    """What becomes of the outputs of an input before they are an answer.

    Attributes:
        name: The same for what does the same with all outputs; it stands for it in the keys of a cache.
        apply: Does it.
    """

    name: str
    apply: Callable[[Arrays], Arrays]


class Timing(NamedTuple):
    """Seconds that a run waited for its first forward, and from there to the end of its last."""

    queue_s: float
    inference_s: float


@dataclass(slots=True, eq=False)
class Run:
    """Inputs that the core has been sent, whose answer is awaited.

    Attributes:
        request_id: What the core calls them.
        answer: Has the outputs of each input in the end.
        outputs: What has come so far.
        num_left: Inputs that are not done.
        sent_s: Seconds, of time.perf_counter().
        num_tokens: Of each input that is not done; None where the core is the only one, and nobody asks.
        parts: Of outputs that came in part.
        timing: Where the time went, when the last row has come.
    """

    request_id: int
    answer: asyncio.Future[list[Arrays]]
    outputs: list[Arrays]
    num_left: int
    sent_s: float
    num_tokens: list[int] | None = None
    parts: dict[tuple[int, str], list[NDArray[np.float32]]] = field(default_factory=dict)
    timing: Timing | None = None

    def put(self, index: int, name: str, array: NDArray[np.float32], *, is_last: bool) -> None:
        """Keeps one array of the answer; parts are joined when the last one is there.

        Those of several rows are copied, as they reach the caller: a view would keep all that its batch gave, in pinned
        memory where a GPU ran it in this process. Single rows are stacked soon.
        """
        if is_last and self.parts and (parts := self.parts.pop((index, name), None)) is not None:
            self.outputs[index][name] = np.concatenate([*parts, array])
            return
        own = array.copy() if array.ndim > 1 else array
        if is_last:
            self.outputs[index][name] = own
        else:
            self.parts.setdefault((index, name), []).append(own)

    def time(self, times: StageTimes) -> None:
        """Records where the time went since the run was sent."""
        if self.timing is not None:
            times.add(Stage.QUEUE, self.sent_s, self.timing.queue_s)
            times.add(Stage.INFERENCE, self.sent_s + self.timing.queue_s, self.timing.inference_s)
        times.last_s = time.perf_counter()
