"""Late chunking, token vectors, sparse vectors, and several outputs of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from ..protocol.batch_outputs import Arrays
from ..protocol.errors import UnsupportedTaskError
from ..protocol.messages import TokenizedInput
from ..protocol.model_info import ModelInfo
from ..protocol.multi_vector import MultiVectorTokens, SparseVector, remove_ids
from ..protocol.params import Input, PoolingParams, RequestOptions
from ..protocol.results import CombinedResult, EmbeddingResult
from ..protocol.tasks import PoolingTask
from ..tokenization.input_encoder import InputEncoder
from ..tokenization.late_chunking import JoinedText
from .dispatcher import Dispatcher, OutputTransform
from .vector_cache.keys import is_cacheable

_TASKS: Final = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SPARSE_EMBED)
"""Tasks with parameters come first, because the other tasks reject parameters."""


class CombinedEmbedder:
    """Runs the embedding tasks of one model that need rows of tokens or return several outputs of one forward."""

    def __init__(
        self, info: ModelInfo, encoder: InputEncoder, dispatcher: Dispatcher, multi_vector_tokens: MultiVectorTokens
    ) -> None:
        self._info = info
        self._encoder = encoder
        self._dispatcher = dispatcher
        self._multi_vector_tokens = multi_vector_tokens

    async def embed_late(
        self, inputs: Sequence[Input], params: PoolingParams, options: RequestOptions
    ) -> EmbeddingResult:
        """Returns a vector for each input, computed in the context of all; arguments as for AsyncEngine.embed_late."""
        normalize = bool(params.resolved(PoolingTask.EMBED, self._info).normalize)
        params = params.clone(task=None, normalize=False, use_activation=False)
        late = self._encoder.late_chunking(params)
        params = params.resolved(PoolingTask.TOKEN_EMBED, self._info, options.adapter)
        async with self._dispatcher.open(options, is_cacheable=True) as request:
            text = await self._encoder.join(late, inputs, options)
            (output,) = await request.run([text.tokens], params, _pooled(text, normalize=normalize))
        return EmbeddingResult(output["embeddings"], text.num_tokens)

    async def embed(
        self, inputs: Sequence[Input], tasks: Sequence[PoolingTask], params: PoolingParams, options: RequestOptions
    ) -> CombinedResult:
        """Runs one or several tasks with one forward; arguments as for AsyncEngine.embed_combined."""
        first, *others = wanted = [task for task in _TASKS if task in tasks]
        if others and self._info.is_causal:
            raise UnsupportedTaskError(
                f"{self._info.name} is a causal model, which returns one output per request; request one output.",
                param="outputs",
            )
        for task in others:
            task_params = params if task is not PoolingTask.SPARSE_EMBED else PoolingParams()
            task_params.verify(task, self._info)
        params = params.resolved(first, self._info, options.adapter).clone(extra_tasks=tuple(others))
        params = self._encoder.with_query_flag(params, options)
        async with self._dispatcher.open(options, is_cacheable=is_cacheable(params)) as request:
            whole = params.clone(task=PoolingTask.TOKEN_EMBED)  # no windows: only embeddings can be averaged
            tokenized = await self._encoder.encode(inputs, whole, options)
            token_ids = self._token_ids(tokenized, params) if PoolingTask.TOKEN_EMBED in wanted else None
            if token_ids is not None:
                options.report_rows(sum(map(len, token_ids)), params.dimensions or self._width)
            outputs = await request.run(tokenized, params)
        result = CombinedResult(num_tokens=[len(tokens) for tokens in tokenized])
        if PoolingTask.EMBED in wanted:
            result = replace(result, embeddings=np.stack([output["embedding"] for output in outputs]))
        if PoolingTask.SPARSE_EMBED in wanted:
            result = replace(result, sparse=[SparseVector.of(output["sparse"]) for output in outputs])
        if token_ids is not None:
            vectors = [output["token_embeddings"] for output in outputs]
            patches = list(map(self._encoder.patch_grid, tokenized, token_ids))
            result = replace(result, vectors=vectors, token_ids=token_ids, patches=patches)
        return result

    @property
    def _width(self) -> int:
        """Width of a token vector if the request does not set `dimensions`."""
        return self._info.dimensions or self._info.embedding_size or self._info.hidden_size

    def _token_ids(self, tokenized: Sequence[TokenizedInput], params: PoolingParams) -> list[list[int]]:
        """Returns, for each input, the ids of the tokens with a vector in the result."""
        multi_vector, heads = self._info.multi_vector, self._info.token_heads
        if heads is not None and heads.vectors_file is not None:
            return [tokens.token_ids[1:].tolist() for tokens in tokenized]
        skip_ids: Sequence[int] = ()
        if multi_vector is not None and multi_vector.skips(is_query=params.is_query):
            skip_ids = self._multi_vector_tokens.skip_ids
        return [remove_ids(tokens.token_ids, skip_ids).tolist() for tokens in tokenized]


def _pooled(text: JoinedText, *, normalize: bool) -> OutputTransform:
    """Returns an OutputTransform that pools the token rows of a text into one vector for each part."""

    def apply(output: Arrays) -> Arrays:
        return {"embeddings": text.pool(output["token_embeddings"], normalize=normalize)}

    return OutputTransform(f"late {normalize} {text.spans}", apply)
