"""Admits requests, sends them to the replicas with the fewest tokens, and waits for the results.

Belongs to one event loop. queue_admission.py accepts or rejects a request as a whole; replica.py sends it to the
engine and receives its results.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from ..protocol.errors import DeadlineExceededError, EngineOverloadedError
from ..protocol.params import PoolingParams
from ..protocol.request import RequestOptions, TokenizedInput
from .queue_admission import QueueAdmission
from .replica import Arrays, OutputTransform, Replica, ReplicaRouter
from .stats import DispatcherStats
from .vector_cache.model_cache import ModelCache

RunAdmitted = Callable[[Sequence[TokenizedInput], PoolingParams], Awaitable[list[Arrays]]]
"""Runs admitted inputs and returns the outputs of each input by name."""


class OpenRequest:
    """A request with one deadline and one or several runs; create it with `Dispatcher.open`."""

    def __init__(self, dispatcher: Dispatcher, options: RequestOptions, *, is_cacheable: bool) -> None:
        self._dispatcher = dispatcher
        self._options = options
        self._adapter = dispatcher.adapter_of(options.adapter)
        self._deadline = asyncio.timeout(options.timeout_s)
        self._is_lookup = is_cacheable and dispatcher.allows_lookups
        self._was_full = False
        self._num_lookup_tokens = 0

    async def __aenter__(self) -> Self:
        admission = self._dispatcher.admission
        if self._is_lookup:
            admission.check_open()
            self._was_full = admission.is_full
        else:
            self._dispatcher.check(self._options.client)
        self._dispatcher.request_opened()
        await self._deadline.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._deadline.__aexit__(kind, error, traceback)
        except TimeoutError as timeout:
            message = f"The deadline of {self._options.timeout_s:g} s passed before the result."
            raise DeadlineExceededError(message) from timeout
        finally:
            self._dispatcher.request_closed()
            if self._is_lookup and error is not None and (self._was_full or isinstance(error, EngineOverloadedError)):
                self._dispatcher.admission.lookups.spend(self._num_lookup_tokens)

    @contextlib.contextmanager
    def admitted(self, inputs: Sequence[TokenizedInput]) -> Iterator[RunAdmitted]:
        """Admits the inputs of several runs together; see QueueAdmission.enter.

        The context value is a function that runs a part of the inputs without another admission and without the cache.
        """
        num_tokens, admission = sum(map(len, inputs)), self._dispatcher.admission
        admission.enter(num_tokens, self._options.client)
        try:
            yield self._run_admitted
        finally:
            admission.leave(num_tokens, self._options.client)

    async def run(
        self,
        inputs: Sequence[TokenizedInput],
        params: PoolingParams,
        transform: OutputTransform | None = None,
        *,
        uses_cache: bool = True,
    ) -> list[Arrays]:
        """Runs tokenized inputs and returns the outputs of each input by name.

        Inputs with cached results are not run and need no admission. If the awaiting task is cancelled, the engine
        cancels the inputs.

        Args:
            inputs: Tokenized inputs.
            params: Resolved parameters.
            transform: Applied to the outputs of each input; None: outputs are not changed.
            uses_cache: Whether to look the inputs up in the cache, if there is one.

        Raises:
            EngineUnavailableError: The engine is not running or it ended during the request.
            ModelExecutionError: The model failed on an input.
            EngineError: The request was rejected; see QueueAdmission.enter.
        """
        if not inputs:
            return []
        params = self._with_adapter(params)
        cache = self._dispatcher.cache
        if cache is not None and uses_cache:
            if self._is_lookup:
                self._num_lookup_tokens += sum(map(len, inputs))
            compute = partial(self.run, transform=transform, uses_cache=False)
            transform_name = "" if transform is None else transform.name
            return await cache.run(inputs, params, self._options.namespace, compute, transform_name)
        with self.admitted(inputs):
            outputs = await self._dispatcher.router.run(inputs, params, self._options, self._remaining_s())
        return outputs if transform is None else [transform.apply(output) for output in outputs]

    async def _run_admitted(self, inputs: Sequence[TokenizedInput], params: PoolingParams) -> list[Arrays]:
        return await self._dispatcher.router.run(inputs, self._with_adapter(params), self._options, self._remaining_s())

    def _with_adapter(self, params: PoolingParams) -> PoolingParams:
        """Returns parameters with the adapter of the request, unless they already name one."""
        adapter = self._adapter
        return params if adapter is None or params.adapter is not None else params.clone(adapter=adapter)

    def _remaining_s(self) -> float | None:
        ends_s = self._deadline.when()
        return None if ends_s is None else max(ends_s - asyncio.get_running_loop().time(), 0.0)


class Dispatcher:
    """Handles requests from arrival to result, for one or several replicas.

    Args:
        max_queued_tokens: Tokens in the queue at which requests are rejected.
        max_queue_s: Seconds of queued work at which requests are rejected.
        cache: Cache of vectors; None if there is none.
        max_request_tokens: Maximum number of tokens of a request; None for `max_queued_tokens`.
        first_id: Number of the first request.

    Attributes:
        stats: Counters, and the numbers of requests and tokens in the queue.
        cache: The cache of vectors.
        replicas: The replicas with their requests.
        admission: The limits of all replicas together.
        router: The only replica, or a ReplicaRouter.
        adapter_of: Returns the adapter of a request; see ModelInfo.adapter_of. Set when the model is known.
    """

    def __init__(
        self,
        max_queued_tokens: int,
        max_queue_s: float = math.inf,
        cache: ModelCache | None = None,
        *,
        num_replicas: int = 1,
        max_request_tokens: int | None = None,
        first_id: int = 0,
    ) -> None:
        self.stats = DispatcherStats()
        self.stats.vectors = None if cache is None else cache.stats
        self.cache = cache
        ids, is_only = itertools.count(first_id), num_replicas == 1
        self.replicas = [Replica(ids, self.stats, is_only=is_only) for _ in range(num_replicas)]
        self.stats.replicas = [] if is_only else [replica.stats for replica in self.replicas]
        rates = [replica.rate for replica in self.replicas]
        self.admission = QueueAdmission(self.stats, max_queued_tokens, max_queue_s, rates, max_request_tokens)
        self.router: Replica | ReplicaRouter = self.replicas[0] if is_only else ReplicaRouter(self.replicas)
        self.adapter_of: Callable[[str | None], str | None] = lambda requested: requested
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, options: RequestOptions, *, is_cacheable: bool = False) -> OpenRequest:
        """Returns a new request as an async context manager. Its deadline applies to the whole context.

        Raises ModelNotFoundError for an unknown adapter. Entering the context raises the errors of
        QueueAdmission.check; with `is_cacheable` they are raised after the cache lookup. Leaving it raises
        DeadlineExceededError if the deadline has passed.
        """
        return OpenRequest(self, options, is_cacheable=is_cacheable)

    @property
    def allows_lookups(self) -> bool:
        """Whether requests look up their inputs in the cache before they are rejected."""
        return self.cache is not None and self.cache.stats.is_open and not self.admission.lookups.is_exhausted

    def check(self, client: str) -> None:
        """Raises the errors of QueueAdmission.check and counts a rejection as a lookup, if lookups are possible."""
        try:
            self.admission.check(client)
        except EngineOverloadedError:
            if self.allows_lookups and self.admission.is_full:
                self.admission.lookups.spend(0)
            raise

    def request_opened(self) -> None:
        """Increases the number of open requests. Called by OpenRequest only."""
        self._num_open += 1
        self._idle.clear()

    def request_closed(self) -> None:
        """Decreases the number of open requests. Called by OpenRequest only."""
        self._num_open -= 1
        if not self._num_open:
            self._idle.set()

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Waits until no request is open; returns False after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def clear_prefixes(self) -> int | None:
        """Clears the prefix caches of all replicas.

        Returns:
            Number of cleared blocks; None if the replicas have no prefix cache.

        Raises:
            EngineUnavailableError: No replica is running, or one ended.
        """
        return await self.router.clear_prefixes()
