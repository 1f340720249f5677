"""The times of the stages of a request, for metrics and for headers of the response."""

from __future__ import annotations

from contextvars import ContextVar
from enum import StrEnum
from typing import Final, NamedTuple


class Stage(StrEnum):
    """Stage of a request.

    Attributes:
        TOKENIZATION: From text to token ids, the wait for a thread included.
        QUEUE: From the arrival in the engine to the start of its first forward.
        INFERENCE: From there to the end of its last forward, forwards of other requests in between included.
        ENCODE: From the engine's result to the server's response.
    """

    TOKENIZATION = "tokenization"
    QUEUE = "queue"
    INFERENCE = "inference"
    ENCODE = "encode"

    __hash__ = str.__hash__  # Enum's own __hash__ is a Python call for every table lookup


class StageTime(NamedTuple):
    """One interval of a stage.

    Attributes:
        stage: The stage that it belongs to.
        began_s: Seconds, of time.perf_counter().
        seconds: Length of the interval.
    """

    stage: Stage
    began_s: float
    seconds: float


class StageTimes:
    """The stage intervals of one request, ordered by their end. A stage may occur several times.

    To measure a call of the engine, set STAGE_TIMES around it:

        times = StageTimes()
        token = STAGE_TIMES.set(times)
        try:
            await engine.embed(["some text"], PoolingParams())
        finally:
            STAGE_TIMES.reset(token)
        print(times.seconds())

    Attributes:
        entries: The intervals.
        last_s: time.perf_counter() of the engine's latest result; None before the first.
        was_sent: Whether inputs of the request were sent to an engine core.
    """

    __slots__ = ("entries", "last_s", "was_sent")

    def __init__(self) -> None:
        self.entries: list[StageTime] = []
        self.last_s: float | None = None
        self.was_sent = False

    def add(self, stage: Stage, began_s: float, seconds: float) -> None:
        """Records an interval."""
        self.entries.append(StageTime(stage, began_s, seconds))

    def seconds(self) -> dict[Stage, float]:
        """Returns the total seconds of each stage that was reached, in order of first occurrence."""
        sums: dict[Stage, float] = {}
        for stage, _, seconds in self.entries:
            sums[stage] = sums.get(stage, 0.0) + seconds
        return sums


STAGE_TIMES: Final[ContextVar[StageTimes | None]] = ContextVar("penstock_stage_times", default=None)
"""The StageTimes of the request that the current task serves; None: it is not measured.

RequestMiddleware and InternalClient of the server set it, and callers of AsyncEngine may. TokenizerPool, Replica and
ReplicaBalancer add to it. It is no parameter, so that the calls between them do not name it.
"""
