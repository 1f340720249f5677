"""Keeps models in memory while they are wanted: loads them on demand, makes room for them, and lets idle ones go.

Every model is an engine process of its own, so that one that comes, goes or dies disturbs no other. What a request has
been given is never taken from it: a model leaves when the last request that has its engine is done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from penstock.engine import AsyncEngine
from penstock.engine.model_files.resolve import resolved_table
from penstock.engine.protocol.errors import EngineError, EngineUnavailableError

from ..admission import ServerRefusalReason
from .model_entry import ModelEntry, ModelStatus
from .resolved_rows import format_table
from .served_model import ServedModel, check_prompt_name

logger = logging.getLogger(__name__)

RETRY_S: Final = 10.0
"""Seconds after which a request makes another attempt to load what could not be loaded."""
LEAST_STAY_S: Final = 2.0
"""Seconds that a model which is in use stays, although another one wants its place."""
UNMISSED_S: Final = 30.0
"""Seconds without a request after which a model may go for requests that can wait."""
_TICK_S: Final = 0.01
"""Seconds by which a timer may be early."""
MAX_WAITING: Final = 1024
"""Requests that wait for models at once; each holds its body."""


@dataclass(frozen=True, slots=True)
class KeeperLimits:
    """What the models may take.

    Attributes:
        max_loaded: Models in memory at once; None: all.
        max_bytes: Bytes that they take together; None: no bound.
        wait_s: Seconds that a request waits for its model.
        drain_timeout_s: Seconds that requests get to finish when their model is to go.
    """

    max_loaded: int | None = None
    max_bytes: int | None = None
    wait_s: float = 60.0
    drain_timeout_s: float = 30.0


class ModelKeeper:
    """Loads and unloads the models of one application. Belongs to one event loop.

    Args:
        models: What is served.
        limits: What it may take.

    Attributes:
        entries: One for each model, in their order.
    """

    def __init__(self, models: Sequence[ServedModel], limits: KeeperLimits) -> None:
        self.entries = [ModelEntry(model, self._became_idle) for model in models]
        self._limits = limits
        self._room_turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._unloads: set[asyncio.Task[bool]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    async def acquire(self, entry: ModelEntry, *, is_patient: bool = False) -> AsyncEngine:
        """Returns the engine of a model that may have to be loaded first; `entry.leave` gives it back.

        Args:
            entry: The model.
            is_patient: The request can wait: no model has to go for it that others may miss.

        Raises:
            EngineUnavailableError: It cannot be loaded, it takes too long, or too many wait.
        """
        if entry.status is ModelStatus.FAILED and time.monotonic() - entry.failed_s < RETRY_S:
            raise _unavailable(entry)
        if is_patient and not self._has_unmissed_room(entry):
            raise EngineUnavailableError(
                f"There is no room for {entry.name} while others are in use.", reason=ServerRefusalReason.MODEL_MEMORY
            )
        if sum(len(each.waiters) for each in self.entries) >= MAX_WAITING:
            raise EngineUnavailableError(
                f"{MAX_WAITING} requests wait for models. Please try again in a moment.",
                reason=ServerRefusalReason.MODEL_LOADING,
            )
        waiter: asyncio.Future[AsyncEngine | None] = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        self._begin_load(entry)
        try:
            async with asyncio.timeout(self._limits.wait_s):
                engine = await waiter
        except BaseException as error:
            if waiter in entry.waiters:
                entry.waiters.remove(waiter)
            elif not waiter.cancelled() and waiter.result() is not None:
                entry.leave(time.monotonic())  # it came when nobody waited for it any more
            if isinstance(error, TimeoutError):
                raise EngineUnavailableError(
                    f"The model {entry.name} is being loaded, which has taken more than {self._limits.wait_s:g} s. "
                    "Please try again in a moment.",
                    reason=ServerRefusalReason.MODEL_LOADING,
                ) from error
            raise
        if engine is None:
            raise _unavailable(entry)
        return engine

    async def load(self, entry: ModelEntry) -> Exception | None:
        """Loads a model, unless it is loaded. Returns what keeps it from being loaded, or None."""
        if entry.status is not ModelStatus.LOADED:
            await asyncio.shield(self._begin_load(entry))
        return entry.error

    async def unload(self, entry: ModelEntry) -> None:
        """Unloads a model once its requests have ended; those that do not end in time are lost, as in a drain.

        One that is being loaded is unloaded after that.
        """
        while entry.status in (ModelStatus.LOADING, ModelStatus.LEAVING):
            await self._change()
        if entry.status is ModelStatus.LOADED:
            await self._let_go(entry, "on request", is_forced=True)
        elif entry.status is ModelStatus.FAILED:
            entry.unloaded()

    def keep(self, entry: ModelEntry, ttl_s: float) -> None:
        """Keeps a model that comes and goes and is loaded for so many seconds after its last request, in this life."""
        if entry.model.comes_and_goes and entry.status is ModelStatus.LOADED:
            entry.ttl_s = ttl_s
            if entry.is_idle:
                self._became_idle(entry)

    async def close(self) -> None:
        """Ends what is being loaded, lets requests that run finish, and stops every engine."""
        for timer in self._timers.values():
            timer.cancel()
        tasks = list(self._loads.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._unloads, return_exceptions=True)
        await asyncio.gather(*(_stop(entry, self._limits.drain_timeout_s) for entry in reversed(self.entries)))

    def _begin_load(self, entry: ModelEntry) -> asyncio.Task[None]:
        task = self._loads.get(entry.name)
        if task is None:
            task = self._loads[entry.name] = asyncio.create_task(self._load(entry))
        return task

    async def _load(self, entry: ModelEntry) -> None:
        """Loads a model, or notes in its entry why it cannot be loaded."""
        began_s = time.monotonic()
        try:
            async with self._room_turn:
                while entry.status is ModelStatus.LEAVING:
                    await self._change()
                if entry.status is ModelStatus.LOADED:
                    return  # it stayed
                await self._make_room(entry)
                entry.status = ModelStatus.LOADING
            engine = await entry.model.start()
            try:
                check_prompt_name(entry.model.default_prompt_name, engine.info)
            except BaseException:
                await engine.close()
                raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and other models go on
            if entry.waiters:
                log_failure(entry, error)
            entry.failed(error, time.monotonic())
        except BaseException:
            if entry.status is ModelStatus.LOADING:  # else it is another life of it that ends elsewhere
                entry.unloaded()
            raise
        else:
            entry.num_bytes = max(entry.num_bytes, engine.host_bytes())
            entry.loaded(engine, time.monotonic() - began_s, time.monotonic())
            logger.info("%s is ready as %s", engine.info.name, ", ".join(entry.model.names))
            logger.debug("what was resolved:\n%s", format_table(resolved_table(engine.info)))
            if entry.is_idle:
                self._became_idle(entry)
        finally:
            del self._loads[entry.name]
            self._changed.set()

    async def _make_room(self, entry: ModelEntry) -> None:
        """Lets others go until a model has room: idle ones first, of these the one whose last request was longest ago.

        Where none is idle, the one goes that was loaded first. Its new requests wait until it is loaded again.

        Raises:
            EngineUnavailableError: No model that is loaded may go, or none goes in time.
        """
        ends_s = time.monotonic() + LEAST_STAY_S + max(self._limits.wait_s, self._limits.drain_timeout_s)
        while self._is_short(entry):
            others = [each for each in self.entries if each.takes_room and not each.model.is_pinned]
            if not others:
                raise EngineUnavailableError(
                    "There is no room for it beside the models that are pinned.",
                    reason=ServerRefusalReason.MODEL_MEMORY,
                )
            loaded = [each for each in others if each.status is ModelStatus.LOADED]
            idle = [each for each in loaded if each.is_idle]
            settled = [each for each in loaded if time.monotonic() - each.loaded_s >= LEAST_STAY_S]
            if idle:
                await self._let_go(min(idle, key=lambda each: each.last_used_s), f"for {entry.name}")
            elif time.monotonic() >= ends_s:
                raise EngineUnavailableError(
                    "The models that are in memory are in use.", reason=ServerRefusalReason.MODEL_MEMORY
                )
            elif settled:
                await self._let_go(min(settled, key=lambda each: each.loaded_s), f"for {entry.name}")
            else:
                await self._change(LEAST_STAY_S)

    def _has_unmissed_room(self, entry: ModelEntry) -> bool:
        """Whether a model is on its way already, or has room beside those that somebody has used of late."""
        if self._loads:
            return entry.name in self._loads  # else another one may take what room there is
        long_ago_s = time.monotonic() - UNMISSED_S
        idle = (each for each in self.entries if each.is_idle and not each.model.is_pinned)
        return not self._is_short(entry, without=[each for each in idle if each.last_used_s <= long_ago_s])

    def _is_short(self, entry: ModelEntry, without: Sequence[ModelEntry] = ()) -> bool:
        there = [each for each in self.entries if each.takes_room and each not in without]
        max_loaded, max_bytes = self._limits.max_loaded, self._limits.max_bytes
        if max_loaded is not None and len(there) >= max_loaded:
            return True
        # A model that is larger than all the room there is has been refused at the start, where that was known.
        total = entry.num_bytes + sum(each.num_bytes for each in there)
        return max_bytes is not None and bool(there) and total > max_bytes

    async def _let_go(self, entry: ModelEntry, why: str, *, is_forced: bool = False) -> bool:
        """Unloads a model when its requests have ended. Returns False where they have not in time and it stays.

        Args:
            entry: Of a model that is loaded.
            why: For the log.
            is_forced: It goes even then.
        """
        engine = entry.engine
        assert engine is not None
        entry.status = ModelStatus.LEAVING
        ends_s = time.monotonic() + self._limits.drain_timeout_s
        while entry.num_in_use and time.monotonic() < ends_s:
            await self._change(ends_s - time.monotonic())
        if entry.num_in_use and not is_forced:
            entry.stays(time.monotonic())
            self._changed.set()
            return False
        await _stop(entry, max(ends_s - time.monotonic(), 0.0))
        logger.info("%s was unloaded %s", entry.name, why)
        self._changed.set()
        return True

    def _became_idle(self, entry: ModelEntry) -> None:
        self._changed.set()
        if (timer := self._timers.pop(entry.name, None)) is not None:
            timer.cancel()
        if entry.ttl_s < inf and entry.is_idle:
            loop = asyncio.get_running_loop()
            self._timers[entry.name] = loop.call_later(entry.ttl_s, self._expire, entry)

    def _expire(self, entry: ModelEntry) -> None:
        """Unloads a model that nobody has used since the timer was set."""
        if entry.is_idle and time.monotonic() - entry.last_used_s >= entry.ttl_s - _TICK_S:
            task = asyncio.create_task(self._let_go(entry, f"after {entry.ttl_s:g} s without a request"))
            self._unloads.add(task)
            task.add_done_callback(self._unloads.discard)

    async def _change(self, timeout_s: float | None = None) -> None:
        """Waits until a model has come, gone or become idle, or for `timeout_s`."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return


def log_failure(entry: ModelEntry, error: Exception) -> None:
    """Logs why a model could not be loaded, with a traceback where that is a surprise."""
    is_known = isinstance(error, EngineError | OSError)
    logger.error("%s could not be loaded: %s", entry.name, error, exc_info=None if is_known else error)


def _unavailable(entry: ModelEntry) -> EngineUnavailableError:
    """Returns the error of a request for a model that could not be loaded; the whole reason is for the operator."""
    if isinstance(entry.error, EngineUnavailableError):
        return EngineUnavailableError(
            f"The model {entry.name} cannot be loaded now. {entry.error.message}", reason=entry.error.reason
        )
    return EngineUnavailableError(
        f"The model {entry.name} could not be loaded; the server's log says why.",
        reason=ServerRefusalReason.MODEL_LOADING,
    )


async def _stop(entry: ModelEntry, drain_timeout_s: float) -> None:
    """Lets requests that run finish, then stops the engine of a model, if it has one."""
    if entry.engine is None:
        return
    if not await entry.engine.drain(drain_timeout_s):
        logger.warning("%s was stopped with requests under way", entry.name)
    await entry.engine.close()
    entry.unloaded()
