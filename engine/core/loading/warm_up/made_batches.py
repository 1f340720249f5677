"""Batches that nobody asked for: of any lengths, for any task of the model, with ids that its tokenizer makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ....protocol.model_info import ModelInfo, TokenizerSpec
from ....protocol.params import PoolingParams
from ....protocol.request import TokenizedInput
from ....protocol.tasks import PoolingTask
from ....scheduling import Chunk, PrefillChunk, QueuedSequence, Request

_WITH_WIDTHS: Final = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)


class MadeBatches:
    """Makes batches for one model.

    Args:
        info: The model.
        tokenizer: Knows ids of a text.
    """

    def __init__(self, info: ModelInfo, tokenizer: TokenizerSpec) -> None:
        self._info = info
        self._ids = np.array(tokenizer.sample_ids, np.int32)
        self._has_types = tokenizer.uses_token_types

    def params(self) -> list[PoolingParams]:
        """Returns what requests may ask for: every task, and what else there is of embeddings.

        `score` is left out: it runs as one of the others.
        """
        info = self._info
        found = [PoolingParams().resolved(task, info) for task in self._tasks()]
        widths = [w for w in (info.matryoshka_dimensions or (info.embedding_size // 2,)) if w < info.embedding_size]
        for task in _WITH_WIDTHS:
            if task in info.tasks:
                found.append(PoolingParams(normalize=not info.normalize).resolved(task, info))
                if info.is_matryoshka or info.matryoshka_dimensions:
                    found += [PoolingParams(dimensions=width).resolved(task, info) for width in widths]
        return found

    def plain(self) -> list[PoolingParams]:
        """Returns what requests ask for that name a task alone."""
        return [PoolingParams().resolved(task, self._info) for task in self._tasks()]

    def batch(self, lengths: Sequence[int], params: Sequence[PoolingParams]) -> list[Chunk]:
        """Returns whole sequences in ascending length; they ask for `params` in turn."""
        return [
            PrefillChunk(self.sequence(i, length, params[i % len(params)]), 0, length)
            for i, length in enumerate(sorted(lengths))
        ]

    def sequence(self, number: int, length: int, params: PoolingParams) -> QueuedSequence:
        """Returns a sequence of so many tokens. Where the model knows token types, it has both."""
        prompt = TokenizedInput(
            np.resize(self._ids, length),
            type_boundary=length // 2 if self._has_types else 0,
            num_prompt_tokens=0 if self._info.include_prompt else 1,
        )
        return QueuedSequence(request_id=number, prompt=prompt, num_tokens=length, request=Request(0, params))

    def _tasks(self) -> list[PoolingTask]:
        """Those that run as such; a model that compares alone runs what it compares."""
        return [task for task in self._info.tasks if task is not PoolingTask.SCORE] or list(self._info.tasks[:1])
