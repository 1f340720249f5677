"""Sends a request to the replica with the fewest queued tokens, and parts of a large request to several."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final

from ..protocol.errors import EngineUnavailableError
from ..protocol.params import PoolingParams
from ..protocol.request import STAGE_TIMES, RequestOptions, TokenizedInput
from .replica import Arrays, Replica, Run

_LEAST_PART: Final = 256
_LEAST_SHARE: Final = 8
"""A part of a request has at least so many tokens, and that part of a full forward: less gains no time by itself."""


class Router:
    """Runs requests on replicas as one Replica would. Belongs to one event loop.

    Args:
        replicas: Several.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    async def run(
        self,
        inputs: Sequence[TokenizedInput],
        params: PoolingParams,
        options: RequestOptions,
        left_s: float | None,
    ) -> list[Arrays]:
        """Runs inputs; see Replica.run. Where one part fails, the others are cancelled.

        Raises:
            EngineUnavailableError: No replica is there, or one died that held a part.
        """
        runs: list[tuple[Replica, Run]] = []
        try:
            for replica, part in self._parts(inputs):
                runs.append((replica, replica.begin(part, params, options, left_s)))
            answers = await asyncio.gather(*(run.answer for _, run in runs))
            if (times := STAGE_TIMES.get()) is not None:
                max((run for _, run in runs), key=_seconds).time(times)
            return [outputs for answer in answers for outputs in answer]
        finally:
            _end(runs)
            del runs  # the traceback of an error in them refers to this frame

    async def clear_prefixes(self) -> int | None:
        """Empties the prefix caches of all running replicas. See Replica.clear_prefixes."""
        cleared = await asyncio.gather(*(replica.clear_prefixes() for replica in self._live()))
        counts = [count for count in cleared if count is not None]
        return sum(counts) if counts else None

    def _live(self) -> list[Replica]:
        live = [replica for replica in self._replicas if replica.is_live]
        if not live:
            raise EngineUnavailableError("The engine is not running at the moment. Please try again.")
        return live

    def _parts(self, inputs: Sequence[TokenizedInput]) -> Iterator[tuple[Replica, Sequence[TokenizedInput]]]:
        """Yields who runs which inputs, in their order."""
        live = self._live()
        num_tokens = list(map(len, inputs))
        least = max(_LEAST_PART, live[0].stats.token_budget // _LEAST_SHARE)
        if len(inputs) == 1 or sum(num_tokens) < 2 * least:
            yield min(live, key=lambda replica: replica.stats.num_tokens), inputs
            return
        shares = even_shares([replica.stats.num_tokens for replica in live], sum(num_tokens), least)
        takers = [(replica, share) for replica, share in zip(live, shares, strict=True) if share]
        last = takers[-1][0]
        start, seen, due = 0, 0, 0.0
        for replica, share in takers:
            due += share
            end = start
            # The input at the border of two shares goes to the share that has more of its tokens.
            while end < len(inputs) and (replica is last or seen + num_tokens[end] / 2 <= due):
                seen += num_tokens[end]
                end += 1
            if end > start:
                yield replica, inputs[start:end]
            start = end


def even_shares(queued: Sequence[int], num_tokens: int, least: int) -> list[float]:
    """Divides the tokens of a request so that all have as many queued afterwards, as far as it can be.

    Args:
        queued: Tokens that each replica has queued.
        num_tokens: To be divided.
        least: Tokens that a share is worth having with.

    Returns:
        A share for each: 0, the whole, or at least `least`.
    """
    chosen = sorted(range(len(queued)), key=queued.__getitem__)
    # The fullest replicas drop out until each share is large enough; the emptiest one stays.
    while True:
        level = (sum(queued[i] for i in chosen) + num_tokens) / len(chosen)
        if len(chosen) == 1 or level - queued[chosen[-1]] >= least:
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
