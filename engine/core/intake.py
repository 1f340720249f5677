"""Turns a Submit into a request for the scheduler: its sequences, and what the prefix cache may do for them."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol.messages import Submit
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
        seed: Sets the model apart from others in the names of blocks.
    """

    def __init__(self, info: ModelInfo, block_size: int | None, seed: str) -> None:
        self._block_size = block_size
        self._seed = seed.encode()
        self._pools_last_row = info.sequence_pooling == (PoolingType.LAST,)

    def request(
        self, message: Submit, params: PoolingParams, inputs: Sequence[TokenizedInput], now_s: float
    ) -> Request:
        """Returns the request with one sequence per input.

        Args:
            message: What the frontend sent.
            params: Its parameters, resolved.
            inputs: Its inputs, in order.
            now_s: Seconds. Monotonic time of its arrival.
        """
        request = Request(
            message.request_id,
            params,
            now_s,
            message.priority,
            None if message.timeout_s is None else now_s + message.timeout_s,
            message.client,
            self._needs_last_row(params),
        )
        request.sequences = [
            QueuedSequence(
                request_id=(message.request_id, index),
                prompt=tokens,
                num_tokens=len(tokens),
                request=request,
                index=index,
                block_keys=self._keys(tokens),
            )
            for index, tokens in enumerate(inputs)
        ]
        return request

    def _keys(self, tokens: TokenizedInput) -> Sequence[bytes]:
        """Names of the full blocks of a sequence."""
        return () if self._block_size is None else block_keys(tokens.token_ids, self._block_size, self._seed)

    def _needs_last_row(self, params: PoolingParams) -> bool:
        """Whether the answer comes from the last token alone, so that the cache may stand in for rows before it."""
        is_token_level = params.task in (PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY)
        return self._pools_last_row and not is_token_level
