"""Requests for a Scheduler, as the intake would make them, and the steps of one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import TokenizedInput
from penstock.engine.scheduling import Batch, QueuedSequence, Request, Scheduler, block_keys


def make_request(
    request_id: int,
    lengths: Sequence[int],
    arrival_s: float = 0.0,
    priority: int = 0,
    deadline_s: float | None = None,
    *,
    client: str = "",
    needs_last_row: bool = False,
    block_size: int | None = None,
    text: int = 0,
) -> Request:
    """Sequences of so many tokens, all of them `text`; with a block size they take part in the prefix cache."""
    request = Request(request_id, PoolingParams(), arrival_s, priority, deadline_s, client, needs_last_row)
    for index, num_tokens in enumerate(lengths):
        tokens = np.full(num_tokens, text, np.int32)
        keys = () if block_size is None else block_keys(tokens, block_size, b"")
        request.sequences.append(
            QueuedSequence(
                request_id=(request_id, index),
                prompt=TokenizedInput(tokens),
                num_tokens=num_tokens,
                request=request,
                index=index,
                block_keys=keys,
            )
        )
    return request


def run(scheduler: Scheduler, now_s: float = 0.0) -> Batch:
    """One batch, from its making to its end."""
    batch = scheduler.schedule(now_s)
    scheduler.finish(batch)
    return batch


def request_ids(batch: Batch) -> set[int]:
    """The requests of which something runs in a batch."""
    return {chunk.sequence.request.request_id for chunk in batch.chunks}


def tokens_of(batch: Batch) -> int:
    """Return how many tokens run in a batch."""
    return sum(chunk.num_tokens for chunk in batch.chunks)
