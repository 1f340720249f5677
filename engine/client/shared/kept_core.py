"""A core as the process knows it that keeps it alive for others: it hears of every step, and asks for nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from ...protocol.config import EngineConfig
from ...protocol.messages import Frame, ModelReady, PrefixCacheCleared, RequestFailed, StepResults
from ...protocol.model_info import ModelInfo
from ..engine_process import EngineProcess
from ..replicas.drain_rate import DrainRate
from ..replicas.group import ReplicaFigures
from ..replicas.replica import Send
from ..stats import DispatcherStats
from ..supervisor import CoreSupervisor, EngineState
from .admission import SharedAdmission
from .attached_core import CoreNews
from .load_board import LoadBoard

logger = logging.getLogger("penstock.engine")


class KeptCore:
    """Starts a core, and again when it dies; tells others where it is. Belongs to one event loop.

    Stands where a CoreSupervisor has a Replica: it takes the figures of steps, for all.

    Args:
        config: What to serve.
        board: What all have under way; cleared of those that end by whoever made it.
        on_news: Called at every change.
        log_level: Level of the core's log.
        log_format: Its form.
        process: One that has been started already; the first core takes it.

    Attributes:
        admission: Knows what is under way, and how fast it drains.
        ready: What the core said when it was loaded first.
        news: The last ones.
        places: As of ReplicaGroup: there is one replica.
        replicas: As places.
    """

    def __init__(
        self,
        config: EngineConfig,
        board: LoadBoard,
        on_news: Callable[[CoreNews], None],
        *,
        log_level: str,
        log_format: str,
        process: EngineProcess | None = None,
    ) -> None:
        limits = config.scheduler
        self.places: list[str] = []
        self.replicas: list[ReplicaFigures] = []
        self.ready: ModelReady | None = None
        self.news = CoreNews(EngineState.STARTING)
        self.admission = SharedAdmission(DispatcherStats(), limits.max_queued_tokens, limits.max_queue_s, board)
        self._board = board
        self._on_news = on_news
        self._reason = ""
        self._is_connected = False
        self._rate = DrainRate()
        self._supervisor = CoreSupervisor(
            config, self, self._tell, log_level=log_level, log_format=log_format, process=process
        )

    @property
    def info(self) -> ModelInfo:
        """The resolved description of the model. Only after `start`."""
        assert self.ready is not None
        return self.ready.info

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self._supervisor.state

    @property
    def num_restarts(self) -> int:
        """How often a dead core was replaced."""
        return self._supervisor.num_restarts

    @property
    def queue_s(self) -> float:
        """Seconds that what waits or runs takes, of all frontends; see EngineLife.queue_s."""
        return self.admission.queue_s

    def stats(self) -> DispatcherStats:
        """Returns counters and what is under way, of all frontends."""
        return self.admission.figures()

    async def start(self) -> ModelReady:
        """Starts the core and waits until it can serve. Raises ModelLoadError where the model cannot be served."""
        self.ready = await self._supervisor.start()
        return self.ready

    def host_bytes(self) -> int:
        """Returns the Bytes of memory that the core's process holds; see EngineLife.host_bytes."""
        return self._supervisor.host_bytes()

    async def drain(self, timeout_s: float) -> bool:
        """Takes it that the frontends have been drained. Returns False where one still has requests under way."""
        self._supervisor.drain()
        return not self._board.num_requests

    async def close(self) -> None:
        """Stops the core. May be called twice."""
        await self._supervisor.close()

    def connect(self, send: Send) -> None:
        """A core can serve."""
        self._is_connected = True

    def disconnect(self, reason: str) -> None:
        """The core has gone."""
        self._is_connected, self._reason = False, reason
        self._tell()

    def receive_rows(self, message: StepResults, frames: Sequence[Frame]) -> None:
        """Counts a step."""
        stats, load = self.admission.stats, message.load
        stats.num_requests = self._board.num_requests
        stats.count(message)
        if load is not None:
            self._board.token_budget = load.token_budget
            if message.num_tokens and load.num_left:
                self._rate.follow(message.num_tokens, message.step_s)
                self._board.tokens_per_s = self._rate.tokens_per_s

    def receive_failure(self, message: RequestFailed) -> None:
        """Logs what is for nobody."""
        logger.error("the engine failed a request that nobody sent: %s", message.message)

    def receive_cleared(self, message: PrefixCacheCleared) -> None:
        """Does not come: this process asks for nothing."""
        logger.error("the engine answered a question that nobody asked")

    def _tell(self) -> None:
        # One that has just gone is about to be started again.
        is_lost = self.state is EngineState.READY and not self._is_connected
        state = EngineState.STARTING if is_lost else self.state
        address = self._supervisor.address if self._is_connected else None
        # A path through an open file of this process: another one reaches it by this one's number.
        shown = address and address.replace("/proc/self/", f"/proc/{os.getpid()}/")
        news = CoreNews(state, shown, "" if address else self._reason)
        if news != self.news:
            self.news = news
            self._on_news(news)
