"""Loads models at the start and on demand, and unloads idle models to make space.

Every model has an engine process of its own, so that loading, unloading or a crash does not affect other models. A
model is unloaded when the last request that uses its engine has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from penstock.engine.client.running_core import restart_pause_s
from penstock.engine.model_files.resolve import format_table, resolved_table
from penstock.engine.protocol.errors import EngineError, EngineUnavailableError

from ..admission import ServerRejectionReason
from .model_entry import ManagedEngine, ModelEntry, ModelStatus
from .served_model import ServedModel, check_prompt_name

logger = logging.getLogger(__name__)

_MAX_RETRY_S: Final = 10.0
"""Maximum seconds after a failed load before a request tries again. The pauses grow: 1, 3, 7, 10."""
MIN_LOADED_S: Final = 2.0
"""Minimum seconds that a model in use stays loaded when another model needs its memory."""
RECENT_USE_S: Final = 30.0
"""Seconds without a request after which a model may be unloaded for patient requests."""
_TICK_S: Final = 0.01
"""Seconds by which a timer may be early."""
MAX_WAITING: Final = 1024
"""Maximum number of requests that wait for models. Each holds its body in memory."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of all models together.

    Attributes:
        max_loaded: Maximum number of models in memory; None: no limit.
        max_bytes: Maximum bytes of memory; None: no limit.
        wait_s: Seconds that a request waits for its model.
        drain_timeout_s: Seconds that requests get to finish when their model is unloaded.
    """

    max_loaded: int | None = None
    max_bytes: int | None = None
    wait_s: float = 60.0
    drain_timeout_s: float = 30.0


class ModelManager:
    """Loads and unloads the models of one application. Used by one event loop.

    A failed load does not affect the other models. The start fails if no model can be loaded.

    Args:
        on_ready: Called after all preloaded models were tried if a model can serve.
        on_failure: Called with the first error if no model can serve, and with an unexpected error. The application
            keeps running.

    Attributes:
        is_starting: Whether preloaded models are loading.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        limits: ModelLimits,
        on_ready: Callable[[], None] = lambda: None,
        on_failure: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self.entries = [ModelEntry(model, self._became_idle) for model in models]
        self.is_starting = True
        self._limits = limits
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._starting: asyncio.Task[None]
        self._space_lock = asyncio.Lock()
        self._needs_space: ModelEntry | None = None  # the holder of the lock
        self._changed = asyncio.Event()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._unloads: set[asyncio.Task[None]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Starts to load the preloaded models. Drains and stops all models at the end."""
        self._starting = asyncio.create_task(self._load_preloaded())
        try:
            yield
        finally:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
            await self.close()

    async def wait_until_started(self) -> None:
        """Waits inside `running` until all preloaded models were tried. Raises the first error if none can serve."""
        await asyncio.shield(self._starting)

    async def _load_preloaded(self) -> None:
        try:
            first = [entry for entry in self.entries if entry.model.is_preloaded]
            failed = [(entry, error) for entry in first if (error := await self.load(entry)) is not None]
            if failed and len(failed) == len(self.entries):
                raise failed[0][1]
            for entry, error in failed:
                log_failure(entry, error)
            self.is_starting = False
            self._on_ready()
        except Exception as error:  # the server ends with the reason
            self._on_failure(error)
            raise

    async def acquire(self, entry: ModelEntry, *, is_background: bool = False) -> ManagedEngine:
        """Returns the engine of a model, after loading the model if necessary. Call `entry.release` after use.

        Args:
            entry: The model.
            is_background: Wait instead of unloading a recently used model.

        Raises:
            EngineUnavailableError: The load fails or takes too long, or too many requests wait.
        """
        if entry.status is ModelStatus.FAILED and _retry_after_s(entry) > 0:
            raise _unavailable(entry)
        if is_background and not self._fits_beside_used_models(entry):
            raise EngineUnavailableError(
                f"There is no memory for {entry.name} while other models are in use.",
                reason=ServerRejectionReason.MODEL_MEMORY,
            )
        if sum(len(entry.waiters) for entry in self.entries) >= MAX_WAITING:
            raise EngineUnavailableError(
                f"{MAX_WAITING} requests wait for models. Please try again in a moment.",
                reason=ServerRejectionReason.MODEL_LOADING,
            )
        waiter: asyncio.Future[ManagedEngine | None] = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        self._start_load(entry)
        try:
            async with asyncio.timeout(self._limits.wait_s):
                engine = await waiter
        except BaseException as error:  # also if the client disconnects, which cancels the wait
            if waiter in entry.waiters:
                entry.waiters.remove(waiter)
            elif not waiter.cancelled() and waiter.result() is not None:
                entry.release(time.monotonic())  # the engine came after the timeout or disconnect
            if isinstance(error, TimeoutError):
                raise EngineUnavailableError(
                    f"The model {entry.name} is being loaded, which has taken more than {self._limits.wait_s:g} s. "
                    "Please try again in a moment.",
                    reason=ServerRejectionReason.MODEL_LOADING,
                ) from error
            raise
        if engine is None:
            raise _unavailable(entry)
        return engine

    async def load(self, entry: ModelEntry) -> Exception | None:
        """Loads a model if it is not loaded. Returns the error of a failed load, or None."""
        if entry.status is not ModelStatus.LOADED:
            await asyncio.shield(self._start_load(entry))
        return entry.error

    async def unload(self, entry: ModelEntry) -> None:
        """Unloads a model after its requests have ended, or after the drain timeout.

        A loading model is unloaded after its load.
        """
        while entry.status in (ModelStatus.LOADING, ModelStatus.UNLOADING):
            await self._change()
        if entry.status is ModelStatus.LOADED:
            await self._drain_and_unload(entry, "on request", is_forced=True)
        elif entry.status is ModelStatus.FAILED:
            entry.set_unloaded()

    def set_ttl(self, entry: ModelEntry, ttl_s: float) -> None:
        """Sets the seconds after which an idle on-demand model is unloaded, until its next load.

        Does nothing for a model that is neither loaded nor waits for its load.
        """
        is_loaded = entry.status is ModelStatus.LOADED or entry.name in self._loads
        if entry.model.is_on_demand and is_loaded:
            entry.ttl_s = ttl_s
            if entry.is_idle:
                self._became_idle(entry)

    async def close(self) -> None:
        """Cancels loads, lets running requests finish, and stops every engine."""
        for timer in self._timers.values():
            timer.cancel()
        tasks = list(self._loads.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._unloads, return_exceptions=True)
        await asyncio.gather(*(_stop(entry, self._limits.drain_timeout_s) for entry in reversed(self.entries)))

    def _start_load(self, entry: ModelEntry) -> asyncio.Task[None]:
        task = self._loads.get(entry.name)
        if task is None:
            task = self._loads[entry.name] = asyncio.create_task(self._load(entry))
        return task

    async def _load(self, entry: ModelEntry) -> None:
        began_s = time.monotonic()
        try:
            while entry.status is ModelStatus.UNLOADING:
                await self._change()
            if entry.status is ModelStatus.LOADED:
                return  # it was not unloaded
            await self._reserve_space(entry)
            assert entry.model.start is not None
            engine = await entry.model.start()
            try:
                check_prompt_name(entry.model.default_prompt_name, engine.info)
            except BaseException:  # stop the engine process, also after an interrupt
                await engine.close()
                raise
        except Exception as error:  # noqa: BLE001 - recorded in the entry; other models are not affected
            if entry.waiters:
                log_failure(entry, error)
            entry.set_failed(error, time.monotonic())
        except BaseException:
            if entry.status is ModelStatus.LOADING:  # otherwise `_drain_and_unload` handles it
                entry.set_unloaded()
            raise
        else:
            entry.num_bytes = max(entry.num_bytes, engine.host_bytes())
            entry.set_loaded(engine, time.monotonic() - began_s, time.monotonic())
            logger.info("%s is ready as %s", engine.info.name, ", ".join(entry.model.names))
            logger.debug("resolved settings:\n%s", format_table(resolved_table(engine.info)))
            if entry.is_idle:
                self._became_idle(entry)
        finally:
            del self._loads[entry.name]
            self._changed.set()

    async def _reserve_space(self, entry: ModelEntry) -> None:
        """Marks a model as loading when it fits beside the others, which may first have to be unloaded.

        One model at a time makes space. Others that fit in any case do not wait for it.

        Raises:
            EngineUnavailableError: All loaded models are pinned, or none can be unloaded in time.
        """
        if self._fits_now(entry):
            entry.status = ModelStatus.LOADING
            return
        async with self._space_lock:
            self._needs_space = entry
            try:
                await self._make_space(entry)
                entry.status = ModelStatus.LOADING
            finally:
                self._needs_space = None

    def _fits_now(self, entry: ModelEntry) -> bool:
        """Whether a model fits beside the models in memory, and beside the model that waits for space."""
        if self._exceeds_limits(entry):
            return False
        if self._needs_space is None:
            return True
        unloading = [other for other in self.entries if other.status is ModelStatus.UNLOADING]
        return not self._exceeds_limits(entry, without=unloading, beside=[self._needs_space])

    async def _make_space(self, entry: ModelEntry) -> None:
        """Unloads other models until a model fits: the least recently used idle model first.

        Without idle models, the model that was loaded first is unloaded. Its new requests wait until it is back.
        """
        ends_s = time.monotonic() + MIN_LOADED_S + max(self._limits.wait_s, self._limits.drain_timeout_s)
        while self._exceeds_limits(entry):
            candidates = [other for other in self.entries if other.uses_memory and not other.model.is_pinned]
            if not candidates:
                raise EngineUnavailableError(
                    f"{entry.name} does not fit beside the pinned models. Raise --model-memory or --max-loaded-models, "
                    "or pin fewer models.",
                    reason=ServerRejectionReason.MODEL_MEMORY,
                )
            loaded = [other for other in candidates if other.status is ModelStatus.LOADED]
            idle = [other for other in loaded if other.is_idle]
            past_min_time = [other for other in loaded if time.monotonic() - other.loaded_s >= MIN_LOADED_S]
            if idle:
                await self._drain_and_unload(min(idle, key=lambda other: other.last_used_s), f"for {entry.name}")
            elif time.monotonic() >= ends_s:
                raise EngineUnavailableError(
                    f"{entry.name} does not fit beside the models that are in use. Please try again later.",
                    reason=ServerRejectionReason.MODEL_MEMORY,
                )
            elif past_min_time:
                await self._drain_and_unload(min(past_min_time, key=lambda other: other.loaded_s), f"for {entry.name}")
            else:
                await self._change(MIN_LOADED_S)

    def _fits_beside_used_models(self, entry: ModelEntry) -> bool:
        """Whether a model is loading, or fits beside the recently used models."""
        if self._loads:
            return entry.name in self._loads  # another loading model may need the space
        long_ago_s = time.monotonic() - RECENT_USE_S
        idle = (other for other in self.entries if other.is_idle and not other.model.is_pinned)
        return not self._exceeds_limits(entry, without=[other for other in idle if other.last_used_s <= long_ago_s])

    def _exceeds_limits(
        self, entry: ModelEntry, *, without: Sequence[ModelEntry] = (), beside: Sequence[ModelEntry] = ()
    ) -> bool:
        loaded = [other for other in self.entries if other.uses_memory and other not in without]
        loaded += beside
        max_loaded, max_bytes = self._limits.max_loaded, self._limits.max_bytes
        if max_loaded is not None and len(loaded) >= max_loaded:
            return True
        # A model larger than max_bytes may be loaded alone: it was rejected at the start if its size was known.
        total = entry.num_bytes + sum(other.num_bytes for other in loaded)
        return max_bytes is not None and bool(loaded) and total > max_bytes

    async def _drain_and_unload(self, entry: ModelEntry, why: str, *, is_forced: bool = False) -> None:
        """Unloads a model when its requests have ended. It stays loaded if they do not end in time.

        Args:
            entry: A loaded model.
            why: Reason in the log.
            is_forced: Unload it even if its requests do not end in time.
        """
        engine = entry.engine
        assert engine is not None
        entry.status = ModelStatus.UNLOADING
        ends_s = time.monotonic() + self._limits.drain_timeout_s
        while entry.num_requests and time.monotonic() < ends_s:
            await self._change(ends_s - time.monotonic())
        if entry.num_requests and not is_forced:
            entry.serve_waiters(time.monotonic())
            self._changed.set()
            return
        try:
            await _stop(entry, max(ends_s - time.monotonic(), 0.0))
        finally:
            self._changed.set()
        logger.info("%s was unloaded %s", entry.name, why)

    def _became_idle(self, entry: ModelEntry) -> None:
        self._changed.set()
        if (timer := self._timers.pop(entry.name, None)) is not None:
            timer.cancel()
        if entry.ttl_s < inf and entry.is_idle:
            loop = asyncio.get_running_loop()
            self._timers[entry.name] = loop.call_later(entry.ttl_s, self._expire, entry)

    def _expire(self, entry: ModelEntry) -> None:
        """Starts `_unload_unused` when the timer of a model ends."""
        task = asyncio.create_task(self._unload_unused(entry))
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)

    async def _unload_unused(self, entry: ModelEntry) -> None:
        """Unloads a model that was not used since its timer was set.

        Checks the model here and not in `_expire`: before this task runs, another one may unload the model.
        """
        if entry.is_idle and time.monotonic() - entry.last_used_s >= entry.ttl_s - _TICK_S:
            await self._drain_and_unload(entry, f"after {entry.ttl_s:g} s without a request")

    async def _change(self, timeout_s: float | None = None) -> None:
        """Waits until a model has come, gone or become idle, or for `timeout_s`."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return


def log_failure(entry: ModelEntry, error: Exception) -> None:
    """Logs a failed load, with a traceback for unexpected errors."""
    is_known = isinstance(error, EngineError | OSError)
    logger.error("%s could not be loaded: %s", entry.name, error, exc_info=None if is_known else error)


def _unavailable(entry: ModelEntry) -> EngineUnavailableError:
    """Returns the error for requests of a model that could not be loaded. Details are in the log only."""
    message, reason = f"The model {entry.name} could not be loaded; the server's log says why.", None
    if isinstance(entry.error, EngineUnavailableError):
        message, reason = f"The model {entry.name} cannot be loaded now. {entry.error.message}", entry.error.reason
    return EngineUnavailableError(
        message,
        reason=reason or ServerRejectionReason.MODEL_LOADING,
        retry_after_s=_retry_after_s(entry),
    )


def _retry_after_s(entry: ModelEntry) -> float:
    """Returns the seconds until a request may load a failed model again."""
    return entry.failed_s + min(restart_pause_s(entry.num_failures), _MAX_RETRY_S) - time.monotonic()


async def _stop(entry: ModelEntry, drain_timeout_s: float) -> None:
    """Lets running requests finish, then stops the engine of a model, if it has one."""
    if entry.engine is None:
        return
    try:
        if not await entry.engine.drain(drain_timeout_s):
            logger.warning("%s was stopped with running requests", entry.name)
        await entry.engine.close()
    except Exception:  # a bug: the model can be loaded again
        entry.set_unloaded()
        raise
    entry.set_unloaded()
