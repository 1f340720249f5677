"""Who is let in and for how long: a request is refused before it costs anything, and ended at its deadline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import DeadlineExceededError, EngineUnavailableError, InvalidRequestError
from ..protocol.params import PoolingParams
from ..protocol.request_options import RequestOptions
from ..protocol.tokenized_input import TokenizedInput
from ..tokenization.long_text import Windows
from .dispatcher import Arrays, Dispatcher
from .supervisor import CoreSupervisor, EngineState


class RequestRunner:
    """Runs the requests of one engine. Belongs to one event loop.

    Args:
        model: Name of the model, for messages.
        dispatcher: Where tokens become answers.
        supervisor: Knows whether the engine is ready.
    """

    def __init__(self, model: str, dispatcher: Dispatcher, supervisor: CoreSupervisor) -> None:
        self._model = model
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._num_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_full(self) -> bool:
        """Whether the engine works, and has so much to do that `check_room` refuses every client."""
        return self._supervisor.state is EngineState.READY and self._dispatcher.is_full

    def check_room(self, client: str) -> None:
        """Refuses a request of `client` that cannot be taken now.

        Raises:
            EngineUnavailableError: The engine is not ready.
            EngineOverloadedError: Too much is under way.
        """
        self._ensure_ready()
        self._dispatcher.check_room(client)

    @contextlib.asynccontextmanager
    async def hold(self, options: RequestOptions) -> AsyncIterator[None]:
        """Holds one request, from its tokenization to its answer; `wait_until_idle` waits for it.

        Raises:
            EngineError: See `check_room`.
            DeadlineExceededError: The deadline passed inside.
        """
        self.check_room(options.client)
        self._num_requests += 1
        self._idle.clear()
        try:
            async with asyncio.timeout(options.timeout_s):
                yield
        except TimeoutError as error:
            raise DeadlineExceededError(f"The deadline of {options.timeout_s:g} s passed before the answer.") from error
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._idle.set()

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Waits for the requests under way. Returns False if some were left after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def book(
        self, tokenized: Sequence[TokenizedInput], options: RequestOptions
    ) -> contextlib.AbstractContextManager[None]:
        """Takes the sequences of a request that has several runs whole, so that none inside is refused any more."""
        return self._dispatcher.book(tokenized, options.client)

    async def run(
        self,
        tokenized: Sequence[TokenizedInput],
        params: PoolingParams,
        options: RequestOptions,
        *,
        is_booked: bool = False,
    ) -> list[Arrays]:
        """Returns the answer to each sequence; `is_booked` says that this happens inside `book`.

        Raises:
            InvalidRequestError: A sequence has no tokens.
            EngineError: See Dispatcher.run.
        """
        empty = next((index for index, tokens in enumerate(tokenized) if not len(tokens)), None)
        if empty is not None:
            raise InvalidRequestError(
                f"Input {empty} is empty: the tokenizer of {self._model} makes no token of it. Send some text.",
                param="input",
            )
        return await self._dispatcher.run(
            tokenized,
            params,
            priority=options.priority,
            timeout_s=options.timeout_s,
            client=options.client,
            is_booked=is_booked,
        )

    async def embed(
        self, groups: Sequence[Windows], params: PoolingParams, options: RequestOptions
    ) -> list[NDArray[np.float32]]:
        """Returns the embeddings [N, D] of each group of inputs; all of them run as one request. Raises as `run`."""
        outputs = await self.run([window for group in groups for window in group.sequences], params, options)
        vectors = iter(output["embedding"] for output in outputs)
        return [
            group.join(np.stack([next(vectors) for _ in group.sequences]), normalized=bool(params.normalize))
            for group in groups
        ]

    def _ensure_ready(self) -> None:
        state = self._supervisor.state
        if state is EngineState.STARTING:
            raise EngineUnavailableError("The engine is being started again. Please try again in a moment.")
        if state is EngineState.DRAINING:
            raise EngineUnavailableError("The server is shutting down. Please try again elsewhere.")
        if state is not EngineState.READY:
            raise EngineUnavailableError("The engine is down. Please try again later or elsewhere.")
