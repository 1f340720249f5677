"""Turns what a frontend asks into a request for the scheduler: its sequences, and what a prefix cache does for them."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol.ipc.turns import Asked
from ..protocol.model_info import ModelInfo
from ..protocol.params import PoolingParams
from ..protocol.request import TokenizedInput
from ..protocol.tasks import PoolingTask, PoolingType
from ..scheduling import QueuedSequence, Request
from ..sequence_pool import block_keys


class Intake:
    """Makes records of messages, by what is known of one model. Thread-safe: nothing in it changes.

    Args:
        info: The model.
        block_size: Tokens of a block of the prefix cache; None where there is no cache.
        seed: Sets the model apart from others in the names of blocks. The namespace of the request is added to it, so
            that the latency of a request tells nothing about prefixes that other API keys have sent.
    """

    def __init__(self, info: ModelInfo, block_size: int | None, seed: str) -> None:
        self._block_size = block_size
        self._seed = seed.encode()
        self._pools_last_row = info.sequence_pooling == (PoolingType.LAST,)

    def request(self, asked: Asked, now_s: float) -> Request:
        """Returns the request with one sequence per input. `now_s`: Seconds, monotonic time of its arrival."""
        request_id, params, inputs, priority, timeout_s, client, namespace = asked
        deadline_s = None if timeout_s is None else now_s + timeout_s
        request = Request(request_id, params, now_s, priority, deadline_s, client, self._needs_last_row(params))
        seed = self._seed + b"\0" + namespace.encode() if namespace else self._seed
        request.sequences = [
            QueuedSequence(
                request_id=(request_id, index),
                prompt=tokens,
                num_tokens=len(tokens.token_ids),
                request=request,
                index=index,
                block_keys=self._keys(tokens, seed),
            )
            for index, tokens in enumerate(inputs)
        ]
        return request

    def _keys(self, tokens: TokenizedInput, seed: bytes) -> Sequence[bytes]:
        """Names of the full blocks of a sequence."""
        return () if self._block_size is None else block_keys(tokens.token_ids, self._block_size, seed)

    def _needs_last_row(self, params: PoolingParams) -> bool:
        """Whether the answer comes from the last token alone, so that the cache may stand in for rows before it."""
        return self._pools_last_row and params.task not in (PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY)
