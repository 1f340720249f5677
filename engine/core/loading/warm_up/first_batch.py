"""The first batch of a model: every task that it has, so that the first request pays for nothing that happens once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from ....protocol.batch_outputs import BatchOutputs
from ....protocol.model_info import ModelInfo, TokenizerSpec
from ....protocol.params import PoolingParams
from ....protocol.request import TokenizedInput
from ....protocol.tasks import PoolingTask
from ....scheduling import Chunk, PrefillChunk, QueuedSequence, Request
from ..load_errors import needs_torch

_CLASS_TASKS: Final = (PoolingTask.CLASSIFY, PoolingTask.SCORE, PoolingTask.TOKEN_CLASSIFY)


def warm_up(info: ModelInfo, tokenizer: TokenizerSpec, execute: Callable[[Sequence[Chunk]], BatchOutputs]) -> None:
    """Runs the batch; see Runner.warm_up. Classes come as logits: an activation may hide that they are not finite.

    Raises:
        WeightError: The model gives NaN or inf.
    """
    tokens = TokenizedInput(np.array(tokenizer.sample_ids[-info.max_model_len :], np.int32))
    first, *others = info.tasks
    requests = [
        Request(0, PoolingParams(use_activation=False if task in _CLASS_TASKS else None).resolved(task, info))
        for task in (first, first, *(task for task in others if task is not PoolingTask.SCORE))
    ]
    outputs = execute(
        [
            PrefillChunk(
                QueuedSequence(request_id=i, prompt=tokens, num_tokens=len(tokens), request=request), 0, len(tokens)
            )
            for i, request in enumerate(requests)
        ]
    )
    if not outputs.is_finite.all():
        found = f"{info.name} answers a plain text with values that are not finite; naming the weights to blame"
        with needs_torch(found, "it reads them in their own type"):
            from ..finite_weights import not_finite_error  # it reads with torch, which few starts need

        raise not_finite_error(info)
