"""Requests for a Scheduler, and the batches that it returns."""

from collections.abc import Sequence

import numpy as np

from penstock.engine.protocol.messages import TokenizedInput
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.scheduling import Batch, InputSequence, Request, Scheduler, block_keys

SHARED_TOKENS = 8
"""Number of zeros at the start of inputs with a shared prefix."""


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
    token_id: int = 0,
    shares_prefix: bool = False,
) -> Request:
    """Returns a request with a sequence of each length.

    Args:
        block_size: Tokens of a block in the prefix cache; None: the sequences do not use the cache.
        token_id: Id of every token.
        shares_prefix: The first SHARED_TOKENS tokens are 0 instead.
    """
    request = Request(request_id, PoolingParams(), arrival_s, priority, deadline_s, client, needs_last_row)
    for index, num_tokens in enumerate(lengths):
        tokens = np.full(num_tokens, token_id, np.int32)
        if shares_prefix:
            tokens[:SHARED_TOKENS] = 0
        sequence = InputSequence(
            sequence_id=(request_id, index),
            tokens=TokenizedInput(tokens),
            num_tokens=num_tokens,
            request=request,
            index=index,
            block_keys=() if block_size is None else block_keys(tokens, block_size, b""),
        )
        request.sequences.append(sequence)
    return request


def run(scheduler: Scheduler, now_s: float = 0.0) -> Batch:
    """Schedules and finishes one batch."""
    batch = scheduler.schedule(now_s)
    scheduler.finish(batch)
    return batch


def request_ids(batch: Batch) -> set[int]:
    return {chunk.sequence.request.request_id for chunk in batch.chunks}


def tokens_of(batch: Batch) -> int:
    return sum(chunk.num_tokens for chunk in batch.chunks)
