"""The cores of one engine, each kept alive by a supervisor of its own: the engine serves while one of them does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

from ...protocol.config import EngineConfig
from ...protocol.errors import RefusalReason
from ...protocol.messages import ModelReady
from ...protocol.model_info import ModelInfo
from ..admission import Admission
from ..dispatcher import Dispatcher
from ..engine_process import EngineProcess
from ..stats import DispatcherStats
from ..supervisor import CoreSupervisor, EngineState
from .places import place_of

CLOSED_BECAUSE: Final = {
    EngineState.READY: None,
    EngineState.STARTING: "The engine is being started again. Please try again in a moment.",
    EngineState.DRAINING: "The server is shutting down. Please try again elsewhere.",
    EngineState.DEAD: "The engine is down. Please try again later or elsewhere.",
}
"""What a request is told that comes in each state. Of several replicas the first of these that one is in counts."""


def close_admission(admission: Admission, state: EngineState) -> None:
    """Lets an admission refuse every request while an engine in this state takes none."""
    admission.closed_because = CLOSED_BECAUSE[state]
    is_ending = state is EngineState.DRAINING
    admission.closed_reason = RefusalReason.DRAINING if is_ending else RefusalReason.ENGINE_NOT_READY


class ReplicaFigures(NamedTuple):
    """One of several replicas.

    Attributes:
        place: Where it runs, in words.
        state: Where it is in its life.
        num_restarts: How often its dead core was replaced.
        stats: Counters, and what it has under way.
    """

    place: str
    state: EngineState
    num_restarts: int
    stats: DispatcherStats


class ReplicaGroup:
    """Owns the supervisors of one engine. Belongs to one event loop.

    Args:
        configs: What each replica is to serve, and where; see replica_configs.
        dispatcher: Has as many replicas.
        log_level: Level of the cores' logs.
        log_format: Their form, "console" or "json".
        process: One that has been started already; the first core takes it.

    Attributes:
        state: Where the engine is in its life: ready while one replica is.
    """

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        dispatcher: Dispatcher,
        *,
        log_level: str,
        log_format: str,
        process: EngineProcess | None = None,
    ) -> None:
        self.state = EngineState.STARTING
        self._configs = configs
        self._dispatcher = dispatcher
        self._supervisors: list[CoreSupervisor] = []
        self._loaded: ModelInfo | None = None
        for config, replica in zip(configs, dispatcher.replicas, strict=True):
            own, process = process, None
            self._supervisors.append(
                CoreSupervisor(config, replica, self._follow, log_level=log_level, log_format=log_format, process=own)
            )
        self._follow()

    async def start(self) -> ModelReady:
        """Starts all cores and waits until they can serve: first one, which decides what all compute in.

        Returns what that of the smallest limit told; they tell the same otherwise.

        Raises:
            ModelLoadError: The model cannot be served; none is left then.
        """
        if (cache := self._dispatcher.cache) is not None:
            cache.expect(self._configs[0].model)
        ready = await self._start()
        self._loaded = ready.info
        self._follow()
        return ready

    async def _start(self) -> ModelReady:
        first, *others = self._supervisors
        ready = await first.start()
        if not others:
            return ready
        try:
            for supervisor in others:
                supervisor.hold(ready.info)
            async with asyncio.TaskGroup() as starting:
                tasks = [starting.create_task(supervisor.start()) for supervisor in others]
        except BaseException as error:
            await self.close()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from error
            raise
        return min([ready, *(task.result() for task in tasks)], key=lambda each: each.info.max_model_len)

    @property
    def num_restarts(self) -> int:
        """How often a dead core was replaced."""
        return sum(supervisor.num_restarts for supervisor in self._supervisors)

    @property
    def places(self) -> list[str]:
        """Where each replica runs, in words; empty where the only one has all of the machine."""
        is_bound = len(self._configs) > 1 or self._configs[0].cores is not None
        return [place_of(config) for config in self._configs] if is_bound else []

    @property
    def replicas(self) -> list[ReplicaFigures]:
        """Each replica where there are several; empty for one."""
        stats = self._dispatcher.stats.replicas
        if not stats:
            return []
        return [
            ReplicaFigures(place_of(config), supervisor.state, supervisor.num_restarts, own)
            for config, supervisor, own in zip(self._configs, self._supervisors, stats, strict=True)
        ]

    def host_bytes(self) -> int:
        """Returns the Bytes of memory that the cores' processes hold for themselves; 0 where that is not known."""
        return sum(supervisor.host_bytes() for supervisor in self._supervisors)

    def drain(self) -> None:
        """Marks the engine as ending, so that its cores are not replaced any more."""
        for supervisor in self._supervisors:
            supervisor.drain()

    async def close(self) -> None:
        """Stops the cores and fails what is under way. May be called twice."""
        await asyncio.gather(*(supervisor.close() for supervisor in self._supervisors))
        if (cache := self._dispatcher.cache) is not None:
            cache.close()

    def _follow(self) -> None:
        states = [supervisor.state for supervisor in self._supervisors]
        self.state = next(state for state in CLOSED_BECAUSE if state in states)
        close_admission(self._dispatcher.admission, self.state)
        if (cache := self._dispatcher.cache) is None or self._loaded is None:
            return
        if EngineState.STARTING in states:  # one loads the model again
            cache.expect(self._loaded.folder)
        elif set(states) == {EngineState.READY}:
            cache.open(self._loaded.folder, self._loaded, has_one_core=len(states) == 1)
