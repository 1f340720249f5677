"""Sends requests to engine processes, receives their results, and distributes requests over several processes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..protocol.batch_outputs import unpack_results
from ..protocol.errors import (
    DeadlineExceededError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelExecutionError,
)
from ..protocol.messages import (
    ClientMessageBuilder,
    Frame,
    FromCore,
    PrefixCacheCleared,
    RequestFailed,
    StepResults,
    SubmitRequest,
    encode,
)
from ..protocol.params import PoolingParams
from ..protocol.request import STAGE_TIMES, RequestOptions, Stage, StageTimes, TokenizedInput
from .stats import DispatcherStats, DrainRate

logger = logging.getLogger("penstock.engine")

Arrays = dict[str, NDArray[np.float32]]
"""Outputs of one input, by name."""
Send = Callable[[bytes, Sequence[Frame]], None]
"""Sends an encoded message with its frames; see MessageConnection.send."""
_FAILURES: dict[str, type[EngineError]] = {
    kind.__name__: kind for kind in (DeadlineExceededError, InvalidRequestError, ModelExecutionError)
}
_MIN_PART_TOKENS: Final = 256
_PARTS_PER_BATCH: Final = 8
"""The smallest part of a request has 256 tokens and an eighth of a full batch, because smaller parts save no time."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputTransform:
    """A function that changes the outputs of an input before they are returned.

    Attributes:
        name: Name of the function in the keys of the cache.
        apply: Maps the outputs of one input to the outputs that the caller gets.
    """

    name: str
    apply: Callable[[Arrays], Arrays]


class Timing(NamedTuple):
    """The times of a run.

    Attributes:
        queue_s: Seconds from its arrival in the engine to the start of its first forward.
        inference_s: Seconds from the start of its first forward to the end of its last one.
    """

    queue_s: float
    inference_s: float


@dataclass(slots=True, eq=False)
class Run:
    """A request in the engine with at least one incomplete input.

    Attributes:
        request_id: Number of the request in the engine.
        result: Future of the outputs of all inputs.
        outputs: Outputs of each input that have arrived.
        num_incomplete: Number of incomplete inputs.
        sent_s: Time of sending in seconds, from time.perf_counter().
        num_tokens: Tokens of each input, 0 for complete inputs; None if there is only one replica.
        parts: Parts of incomplete outputs, by input and name.
        timing: Times of the run; None before its last row has arrived.
    """

    request_id: int
    result: asyncio.Future[list[Arrays]]
    outputs: list[Arrays]
    num_incomplete: int
    sent_s: float
    num_tokens: list[int] | None = None
    parts: dict[tuple[int, str], list[NDArray[np.float32]]] = field(default_factory=dict)
    timing: Timing | None = None

    def add_output(self, index: int, name: str, array: NDArray[np.float32], *, is_last: bool) -> None:
        """Stores a part of an output, or its last part with `is_last`.

        Arrays of several rows are copied, because a view would keep the results of the whole batch in memory, which may
        be pinned memory of a GPU. Single rows are not, because they are copied later when they are stacked.
        """
        if is_last and self.parts and (parts := self.parts.pop((index, name), None)) is not None:
            self.outputs[index][name] = np.concatenate([*parts, array])
            return
        stored = array.copy() if array.ndim > 1 else array
        if is_last:
            self.outputs[index][name] = stored
        else:
            self.parts.setdefault((index, name), []).append(stored)

    def record_times(self, times: StageTimes) -> None:
        """Adds the waiting time and the running time to `times`."""
        if self.timing is not None:
            times.add(Stage.QUEUE, self.sent_s, self.timing.queue_s)
            times.add(Stage.INFERENCE, self.sent_s + self.timing.queue_s, self.timing.inference_s)
        times.last_s = time.perf_counter()


class Replica:
    """The requests of one engine process.

    Requests from one iteration of the event loop are sent together, so that they can run in one batch.

    Args:
        engine_stats: Counters of all replicas together.
        is_only: Whether this is the only replica. It uses `engine_stats` as its counters.

    Attributes:
        stats: Counters of this replica; its tokens and requests if there are several replicas.
        rate: Drain rate of this replica.
    """

    def __init__(self, ids: Iterator[int], engine_stats: DispatcherStats, *, is_only: bool) -> None:
        self.stats = engine_stats if is_only else DispatcherStats()
        self.rate = DrainRate()
        self._count = engine_stats.count if is_only else partial(engine_stats.count_replica, self.stats)
        self._is_only = is_only
        self._send: Send | None = None
        self._outgoing = ClientMessageBuilder()
        self._runs: dict[int, Run] = {}
        self._clearings: dict[int, asyncio.Future[int | None]] = {}
        self._ids = ids

    @property
    def is_live(self) -> bool:
        """Whether the replica can run requests."""
        return self._send is not None

    def connect(self, send: Send) -> None:
        """Starts running requests; `send` sends a message to the engine."""
        self._send = send
        self.rate.set_live(True)

    def disconnect(self, reason: str) -> None:
        """Stops sending requests; raises EngineUnavailableError in the requests that are in progress."""
        self._send = None
        self.rate.set_live(False)
        self._outgoing = ClientMessageBuilder()
        for request_id in list(self._runs):
            self._settle(request_id, EngineUnavailableError(f"The request was lost: {reason}. Please try again."))
        for clearing in self._clearings.values():
            if not clearing.done():
                clearing.set_exception(EngineUnavailableError(f"The engine of the prefix cache ended: {reason}."))

    async def run(
        self,
        inputs: Sequence[TokenizedInput],
        params: PoolingParams,
        options: RequestOptions,
        remaining_s: float | None,
    ) -> list[Arrays]:
        """Runs admitted inputs as OpenRequest.run does; `remaining_s` is the seconds until the deadline, or None."""
        run = self.begin(inputs, params, options, remaining_s)
        try:
            outputs = await run.result
            if (times := STAGE_TIMES.get()) is not None:
                run.record_times(times)
            return outputs
        finally:
            self.end(run)
            del run  # the traceback of its error refers to this frame

    def begin(
        self,
        inputs: Sequence[TokenizedInput],
        params: PoolingParams,
        options: RequestOptions,
        remaining_s: float | None,
    ) -> Run:
        """Sends inputs as `run` does; the caller must call `end` afterwards, also after an error."""
        self._check_live()
        run = Run(
            next(self._ids),
            asyncio.get_running_loop().create_future(),
            [{} for _ in inputs],
            len(inputs),
            time.perf_counter(),
        )
        if not self._is_only:
            run.num_tokens = list(map(len, inputs))
            self.stats.enter(sum(run.num_tokens))
        self._runs[run.request_id] = run
        client = options.client, options.namespace
        self._next_message().requests.append(
            SubmitRequest(run.request_id, params, inputs, options.priority, remaining_s, *client)
        )
        return run

    def end(self, run: Run) -> None:
        """Removes a run, and cancels it in the engine if it is not complete."""
        if run.num_tokens is not None:
            self.stats.leave(sum(run.num_tokens))
        if self._runs.pop(run.request_id, None) is not None:
            self._next_message().cancels.append(run.request_id)

    async def clear_prefixes(self) -> int | None:
        """Clears the prefix cache of this replica; see Dispatcher.clear_prefixes."""
        self._check_live()
        request_id = next(self._ids)
        clearing: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._clearings[request_id] = clearing
        try:
            self._next_message().clears.append(request_id)
            return await clearing
        finally:
            del self._clearings[request_id], clearing  # an error in the future would refer to this frame

    def receive(self, message: FromCore, frames: Sequence[Frame]) -> None:
        """Handles the results of a step, the failure of a request, or the result of `clear_prefixes`."""
        match message:
            case StepResults():
                pass
            case RequestFailed():
                self._settle(message.request_id, _FAILURES.get(message.kind, ModelExecutionError)(message.message))
                return
            case PrefixCacheCleared():
                clearing = self._clearings.get(message.request_id)
                if clearing is not None and not clearing.done():
                    clearing.set_result(message.num_blocks)
                return
            case _:
                raise TypeError(f"{type(message).__name__} is not for a Replica")
        # 1. Update the counters and the drain rate.
        self._count(message)
        if message.num_tokens and message.load is not None and message.load.num_deferred:
            self.rate.record(message.num_tokens, message.step_s)
        arrays = unpack_results(message, frames)
        # 2. Store the times of finished runs.
        for request_id, *seconds in message.finished:
            if (run := self._runs.get(request_id)) is not None:
                run.timing = Timing(*seconds)
        # 3. Store the rows of each input, and count its last row once.
        done: list[Run] = []
        seen: set[tuple[int, int]] = set()  # complete inputs, which may be in several arrays
        for results in arrays:
            name = results.output.name
            for request_id, index, is_last, array in zip(
                results.request_ids, results.indices, results.is_last, results.output.split(), strict=True
            ):
                run = self._runs.get(request_id)
                if run is None:
                    continue
                run.add_output(index, name, array, is_last=is_last)
                if not is_last or (request_id, index) in seen:
                    continue
                if len(arrays) > 1:
                    seen.add((request_id, index))
                run.num_incomplete -= 1
                if run.num_tokens is not None:
                    self.stats.num_tokens -= run.num_tokens[index]
                    run.num_tokens[index] = 0
                if not run.num_incomplete:
                    done.append(run)
        # 4. Return the outputs of runs without incomplete inputs.
        for run in done:
            self._settle(run.request_id, None)

    def _check_live(self) -> None:
        if self._send is None:
            raise EngineUnavailableError("The engine is not running at the moment. Please try again.")

    def _next_message(self) -> ClientMessageBuilder:
        """Returns the message that is sent at the end of this iteration of the event loop."""
        if self._outgoing.is_empty:
            asyncio.get_running_loop().call_soon(self._flush)
        return self._outgoing

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, ClientMessageBuilder()
        if outgoing.is_empty or self._send is None:
            return
        try:
            message, frame = outgoing.pack()
            self._send(encode(message), [frame])
        except Exception:  # a bug in penstock; the requests must not wait forever
            logger.exception("requests could not be sent to the engine")
            error = ModelExecutionError("The request could not be sent to the engine.")
            for request in outgoing.requests:
                self._settle(request.request_id, error)
            for request_id in outgoing.clears:
                clearing = self._clearings.get(request_id)
                if clearing is not None and not clearing.done():
                    clearing.set_exception(error)

    def _settle(self, request_id: int, error: EngineError | None) -> None:
        run = self._runs.pop(request_id, None)
        if run is None or run.result.done():
            return
        if error is None:
            run.result.set_result(run.outputs)
        else:
            run.result.set_exception(error)


class ReplicaRouter:
    """Distributes requests over several replicas, on one event loop.

    Args:
        replicas: At least two replicas.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    async def run(
        self,
        inputs: Sequence[TokenizedInput],
        params: PoolingParams,
        options: RequestOptions,
        remaining_s: float | None,
    ) -> list[Arrays]:
        """Runs inputs as Replica.run does, in parts on several replicas; if one part fails, the others are cancelled.

        Raises:
            EngineUnavailableError: No replica is running, or the replica of a part ended.
        """
        runs: list[tuple[Replica, Run]] = []
        try:
            for replica, part in self._parts(inputs):
                runs.append((replica, replica.begin(part, params, options, remaining_s)))
            results = await asyncio.gather(*(run.result for _, run in runs))
            if (times := STAGE_TIMES.get()) is not None:
                max((run for _, run in runs), key=_seconds).record_times(times)
            return [outputs for result in results for outputs in result]
        finally:
            _end(runs)
            del runs  # the traceback of an error in them refers to this frame

    async def clear_prefixes(self) -> int | None:
        """Clears the prefix caches of all running replicas; see Dispatcher.clear_prefixes."""
        cleared = await asyncio.gather(*(replica.clear_prefixes() for replica in self._live()))
        counts = [count for count in cleared if count is not None]
        return sum(counts) if counts else None

    def _live(self) -> list[Replica]:
        live = [replica for replica in self._replicas if replica.is_live]
        if not live:
            raise EngineUnavailableError("The engine is not running at the moment. Please try again.")
        return live

    def _parts(self, inputs: Sequence[TokenizedInput]) -> Iterator[tuple[Replica, Sequence[TokenizedInput]]]:
        """Yields the chosen replicas with their inputs, in the order of the inputs."""
        live = self._live()
        num_tokens = list(map(len, inputs))
        min_share = max(_MIN_PART_TOKENS, live[0].stats.token_budget // _PARTS_PER_BATCH)
        if len(inputs) == 1 or sum(num_tokens) < 2 * min_share:
            yield min(live, key=lambda replica: replica.stats.num_tokens), inputs
            return
        shares = even_shares([replica.stats.num_tokens for replica in live], sum(num_tokens), min_share)
        chosen = [(replica, share) for replica, share in zip(live, shares, strict=True) if share]
        last = chosen[-1][0]
        start, seen, due = 0, 0, 0.0
        for replica, share in chosen:
            due += share
            end = start
            # An input on the border of two shares goes to the share with more of its tokens.
            while end < len(inputs) and (replica is last or seen + num_tokens[end] / 2 <= due):
                seen += num_tokens[end]
                end += 1
            if end > start:
                yield replica, inputs[start:end]
            start = end


def even_shares(queued: Sequence[int], num_tokens: int, min_share: int) -> list[float]:
    """Divides the tokens of a request so that afterwards, if possible, all replicas have equally many queued tokens.

    Args:
        queued: Number of queued tokens of each replica.
        num_tokens: Number of tokens of the request.
        min_share: Smallest share.

    Returns:
        The share of each replica: 0, all tokens, or at least `min_share`.
    """
    chosen = sorted(range(len(queued)), key=queued.__getitem__)
    # Removes the replica with the longest queue until all shares are large enough or one replica is left.
    while True:
        level = (sum(queued[i] for i in chosen) + num_tokens) / len(chosen)
        if len(chosen) == 1 or level - queued[chosen[-1]] >= min_share:
            break
        chosen.pop()
    shares = [0.0] * len(queued)
    for i in chosen:
        shares[i] = level - queued[i]
    return shares


def _end(runs: Sequence[tuple[Replica, Run]]) -> None:
    for replica, run in runs:
        replica.end(run)


def _seconds(run: Run) -> float:
    return 0.0 if run.timing is None else run.timing.queue_s + run.timing.inference_s
