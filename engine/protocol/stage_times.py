"""Where the time of a request goes: into tokenization, waiting, the model.

Whoever wants to know sets STAGE_TIMES around a call of the engine:

    times = StageTimes()
    token = STAGE_TIMES.set(times)
    try:
        await engine.embed(["some text"], PoolingParams())
    finally:
        STAGE_TIMES.reset(token)
    print(times.seconds())
"""

from __future__ import annotations

from contextvars import ContextVar
from enum import StrEnum
from typing import Final, NamedTuple


class Stage(StrEnum):
    """What a request is spent on.

    Attributes:
        TOKENIZATION: From text to token ids, the wait for a thread included.
        QUEUE: From the arrival in the engine to the start of its first forward.
        INFERENCE: From there to the end of its last one; what else runs in between counts too.
        ENCODE: From the engine's answer to that of the server.
    """

    TOKENIZATION = "tokenization"
    QUEUE = "queue"
    INFERENCE = "inference"
    ENCODE = "encode"

    __hash__ = str.__hash__  # not Enum's own, which is a call of Python for each look into a table


class StageTime(NamedTuple):
    """One stretch of time.

    Attributes:
        stage: What it was spent on.
        began_s: Seconds, of time.perf_counter().
        seconds: Seconds. Its length.
    """

    stage: Stage
    began_s: float
    seconds: float


class StageTimes:
    """The stretches of one request, in the order in which they ended. A stage may come several times.

    Attributes:
        entries: The stretches.
        last_s: Seconds, of time.perf_counter(). When the engine answered last; None before it did.
    """

    __slots__ = ("entries", "last_s")

    def __init__(self) -> None:
        self.entries: list[StageTime] = []
        self.last_s: float | None = None

    def add(self, stage: Stage, began_s: float, seconds: float) -> None:
        """Records a stretch."""
        self.entries.append(StageTime(stage, began_s, seconds))

    def seconds(self) -> dict[Stage, float]:
        """Returns the seconds of each stage that was reached, in the order of the first stretches."""
        sums: dict[Stage, float] = {}
        for stage, _, seconds in self.entries:
            sums[stage] = sums.get(stage, 0.0) + seconds
        return sums


STAGE_TIMES: Final[ContextVar[StageTimes | None]] = ContextVar("penstock_stage_times", default=None)
"""Of the request that the current task works on. It belongs to the task, not to this module."""
