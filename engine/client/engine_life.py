"""An engine from its start to its end: where it is in its life, what it has to do, and whom it has room for."""

from __future__ import annotations

from typing import Self

from ..protocol.config import EngineConfig
from ..protocol.messages import ModelReady
from ..protocol.model_info import ModelInfo
from ..tokenization.jobs import CharAdmission
from ..tokenization.tokenizer import TokenizerPool
from .dispatcher import Dispatcher
from .engine_client import EngineClient
from .engine_process import EngineProcess
from .replicas.group import ReplicaFigures, ReplicaGroup
from .replicas.places import replica_configs
from .stats import DispatcherStats
from .supervisor import EngineState
from .vector_cache.cache import VectorCache
from .vector_cache.model_cache import ModelCache


class EngineLife:
    """One served model, apart from what it can be asked. Create it with `start`. Belongs to one event loop.

    Args:
        config: What is served; for those who say what it can be asked.
        info: The attribute.
        tokenizer: Of the model.
        dispatcher: Holds what is under way.
        group: Keeps its cores alive, or hears of who does.

    Attributes:
        info: The resolved description of the model.
        tokenizer_config: The class of its tokenizer, and what transformers made it of.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        tokenizer: TokenizerPool,
        dispatcher: Dispatcher,
        group: ReplicaGroup | EngineClient,
    ) -> None:
        self.info = info
        self.tokenizer_config = tokenizer.config
        self._tokenizer = tokenizer
        self._dispatcher = dispatcher
        self._group = group

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        log_level: str = "INFO",
        log_format: str = "console",
        process: EngineProcess | None = None,
        cache: VectorCache | None = None,
    ) -> Self:
        """Loads the model and returns the engine when it can serve.

        Args:
            config: What to serve.
            log_level: Least severe level that the engine process logs.
            log_format: Its log lines, "console" or "json"; see logs.py.
            process: An engine process that has been started already; None to start one.
            cache: Where vectors are looked up and kept, with those of other engines; None for nowhere.

        Raises:
            ModelLoadError: The model cannot be served; the message says why.
        """
        configs = replica_configs(config)
        limits = config.scheduler
        own = None if cache is None else ModelCache(cache)
        dispatcher = Dispatcher(limits.max_queued_tokens, limits.max_queue_s, own, num_replicas=len(configs))
        group = ReplicaGroup(configs, dispatcher, log_level=log_level, log_format=log_format, process=process)
        ready = await group.start()
        try:
            return cls.attached(config, ready, dispatcher, group)
        except BaseException:
            await group.close()
            raise

    @classmethod
    def attached(
        cls, config: EngineConfig, ready: ModelReady, dispatcher: Dispatcher, group: ReplicaGroup | EngineClient
    ) -> Self:
        """Returns the engine over cores that have been loaded.

        Args:
            config: What is served.
            ready: What the cores said of it.
            dispatcher: Holds what is under way.
            group: Keeps the cores alive, or hears of who does.
        """
        tokenizer = TokenizerPool(
            ready.tokenizer,
            vocab_size=ready.info.vocab_size,
            do_lower_case=ready.info.do_lower_case,
            num_workers=config.tokenizer_workers,
            admission=CharAdmission(config.max_queued_chars, dispatcher.stats.count_refusal),
        )
        return cls(config, ready.info, tokenizer, dispatcher, group)

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self._group.state

    @property
    def num_restarts(self) -> int:
        """How often a dead core was replaced."""
        return self._group.num_restarts

    @property
    def places(self) -> list[str]:
        """Where each replica runs, in words; empty where the only one has all of the machine."""
        return self._group.places

    @property
    def replicas(self) -> list[ReplicaFigures]:
        """Each replica where there are several; empty for one."""
        return self._group.replicas

    @property
    def is_full(self) -> bool:
        """Whether the queue of a working engine is full: `check_room` then refuses clients that have their share.

        False where a cache looks inputs up first: then requests are refused after that.
        """
        return self._dispatcher.admission.is_full and not self._dispatcher.looks_while_full

    @property
    def queue_s(self) -> float:
        """Seconds that what waits or runs takes at the rate of the last forwards; 0 before that is measured."""
        return self._dispatcher.admission.queue_s

    def host_bytes(self) -> int:
        """Returns the Bytes of memory that its processes hold for themselves; 0 where that is not known.

        Files that they have mapped, such as libraries, are not counted: processes share them.
        """
        return self._group.host_bytes()

    def check_room(self, client: str = "") -> None:
        """Refuses what every call refuses first: a request of `client` that has no room now; see Admission.check."""
        self._dispatcher.admission.check(client)

    async def wait_for_cache(self) -> None:
        """Waits until inputs are looked up, where there is a cache: the weights are read once for that."""
        if self._dispatcher.cache is not None:
            await self._dispatcher.cache.wait()

    def stats(self) -> DispatcherStats:
        """Returns counters and what is under way."""
        return self._dispatcher.stats

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for those under way. Returns False if some were left after `timeout_s`."""
        self._group.drain()
        return await self._dispatcher.wait_until_idle(timeout_s)

    async def close(self) -> None:
        """Stops the cores; requests under way fail with EngineUnavailableError. May be called twice."""
        await self._group.close()
        self._tokenizer.close()

    async def clear_prefixes(self) -> int | None:
        """Empties the prefix cache; see Dispatcher.clear_prefixes."""
        return await self._dispatcher.clear_prefixes()
