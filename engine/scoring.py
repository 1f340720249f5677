"""Scores of text pairs: with a cross-encoder as one joint sequence, with an embedding model by cosine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from .errors import InvalidRequestError
from .input_encoder import InputEncoder
from .instructions import instructed_prompt
from .model_info import ModelInfo, ModelKind
from .params import PoolingParams, PoolingTask
from .request_options import RequestOptions
from .request_runner import RequestRunner
from .results import ScoreResult
from .similarity import paired_cosine

_QUERY_PROMPTS: Final = ("query", "search_query")
_DOCUMENT_PROMPTS: Final = ("document", "passage", "corpus", "search_document")


class PairScorer:
    """Scores pairs with one model.

    Args:
        info: The model.
        encoder: Of its inputs.
        requests: Runs them.
    """

    def __init__(self, info: ModelInfo, encoder: InputEncoder, requests: RequestRunner) -> None:
        self._info = info
        self._encoder = encoder
        self._requests = requests

    async def score(
        self, left: Sequence[str], right: Sequence[str], params: PoolingParams, options: RequestOptions
    ) -> ScoreResult:
        """See AsyncEngine.score."""
        if not left or not right:
            raise InvalidRequestError(
                "Scoring needs at least one text on each side.", param="text_1" if not left else "text_2"
            )
        if len(left) not in (1, len(right)):
            raise InvalidRequestError(
                f"{len(left)} texts cannot be paired with {len(right)}; give 1 to 1, 1 to N or N to N.", param="text_2"
            )
        is_joint = self._info.kind is ModelKind.CROSS_ENCODER
        if is_joint:
            params = params.resolved(PoolingTask.SCORE, self._info)
        else:
            params.verify(PoolingTask.SCORE, self._info)
            params = params.clone(use_activation=None, normalize=True).resolved(PoolingTask.EMBED, self._info)
        score = self._score_jointly if is_joint else self._score_by_cosine
        async with self._requests.hold(options):
            if options.max_pieces == 1:
                return await score(left, right, params, options)
            own = options if is_joint else self._named_prompt(_DOCUMENT_PROMPTS, options)
            pieces = await self._encoder.pieces(left, right, params, own)
            queries = left if len(left) == 1 else [left[owner] for owner in pieces.owners]
            if params.truncate_prompt_tokens is None:
                params = params.clone(truncate_prompt_tokens=-1)  # a piece by itself may have a token more
            return pieces.join(await score(queries, pieces.texts, params, options))

    async def _score_jointly(
        self, left: Sequence[str], right: Sequence[str], params: PoolingParams, options: RequestOptions
    ) -> ScoreResult:
        queries = left if len(left) == len(right) else [left[0]] * len(right)
        pairs = list(zip(queries, right, strict=True))
        tokenized = await self._encoder.pairs(pairs, params, options, param=None)
        outputs = await self._requests.run(tokenized, params, options)
        return ScoreResult(np.array([o["scores"][0] for o in outputs], np.float32), [len(t) for t in tokenized])

    async def _score_by_cosine(
        self, left: Sequence[str], right: Sequence[str], params: PoolingParams, options: RequestOptions
    ) -> ScoreResult:
        queries = await self._encoder.windows(left, params, self._query_options(options), param=None)
        of_documents = self._named_prompt(_DOCUMENT_PROMPTS, options)
        documents = await self._encoder.windows(right, params, of_documents, param=None)
        vectors = await self._requests.embed([queries, documents], params, options)
        num_tokens = list(documents.num_tokens)
        for i, of_query in enumerate(queries.num_tokens):
            num_tokens[i] += of_query
        return ScoreResult(paired_cosine(*vectors), num_tokens)

    def _query_options(self, options: RequestOptions) -> RequestOptions:
        """Puts the request's instruction into the model's query prompt, or takes that prompt as it is."""
        if not options.instruction:
            return self._named_prompt(_QUERY_PROMPTS, options)
        names = (*_QUERY_PROMPTS, self._info.default_prompt_name or "")
        return replace(options, prompt=instructed_prompt(self._info, names, options.instruction))

    def _named_prompt(self, names: Sequence[str], options: RequestOptions) -> RequestOptions:
        """Takes the first of these prompts that the model has, unless the request asks for one."""
        if options.prompt is not None or options.prompt_name is not None:
            return options
        return replace(options, prompt_name=next((name for name in names if name in self._info.prompts), None))
