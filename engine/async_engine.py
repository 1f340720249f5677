"""The public face of the engine: text or token ids in, numpy arrays out. Belongs to one event loop; imports no torch.

engine = await AsyncEngine.start(EngineConfig(model="path/or/hub-id"))
result = await engine.embed(["some text"], PoolingParams())  # and in the end: await engine.close()
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from .client.combined import CombinedEmbedder
from .client.dispatcher import Dispatcher
from .client.engine_client import EngineClient
from .client.engine_life import EngineLife
from .client.replicas.group import ReplicaGroup
from .client.scoring import PairScorer
from .client.similarity import check_embeds, check_labels, few_shot_classes, zero_shot_classes
from .protocol.config import EngineConfig
from .protocol.model_info import ModelInfo, ModelKind
from .protocol.params import PoolingParams
from .protocol.request import DEFAULT_OPTIONS, RequestOptions, Text
from .protocol.results import (
    ClassResult,
    CombinedResult,
    EmbeddingResult,
    ScoreResult,
    SparseResult,
    TokenizedText,
    TokenResult,
    stacked,
)
from .protocol.tasks import PoolingTask
from .protocol.templates import ChatOptions, Conversation
from .tokenization.input_encoder import InputEncoder
from .tokenization.tokenizer import OnCount, TokenizerPool

_NUM_PARAMS: Final = 64
"""Resolved parameters that are kept for requests that ask for the same."""


class AsyncEngine(EngineLife):
    """One served model. Create it with `start`.

    Every call that runs the model raises InvalidRequestError where the request is wrong (see PoolingParams.verify and
    TokenizerPool), and, whatever is asked for, EngineUnavailableError, EngineOverloadedError, DeadlineExceededError and
    ModelExecutionError as Dispatcher.open and OpenRequest.run do.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        tokenizer: TokenizerPool,
        dispatcher: Dispatcher,
        group: ReplicaGroup | EngineClient,
    ) -> None:
        super().__init__(config, info, tokenizer, dispatcher, group)

        # Most requests ask for the same: they share one object, which is sent to the core once a turn.
        @lru_cache(_NUM_PARAMS)
        def resolved(params: PoolingParams, task: PoolingTask) -> PoolingParams:
            return params.resolved(task, info)

        self._resolved = resolved
        self._encoder = InputEncoder(info, tokenizer, config)
        self._scorer = PairScorer(info, self._encoder, dispatcher)
        self._combined = CombinedEmbedder(info, self._encoder, dispatcher, tokenizer.recipe_tokens)

    async def embed(
        self, inputs: Sequence[Text], params: PoolingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> EmbeddingResult:
        """Embeds each input into one vector; in long-text mode, longer ones than the model takes too (long_text.py)."""
        params = self._resolved(params, PoolingTask.EMBED)
        async with self._dispatcher.open(options, looks_up=True) as request:
            windows = await self._encoder.windows(inputs, params, options)
            outputs = await request.run(windows.sequences, params)
        vectors = stacked([output["embedding"] for output in outputs])
        return EmbeddingResult(windows.join(vectors, normalized=bool(params.normalize)), windows.num_tokens)

    async def embed_late(
        self, inputs: Sequence[Text], params: PoolingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> EmbeddingResult:
        """Embeds the inputs as parts of one text, one vector each that knows all of it (late_chunking.py).

        Raises:
            InvalidRequestError: The model does not pool by MEAN, or an input has no tokens.
        """
        return await self._combined.embed_late(inputs, params, options)

    async def token_embed(
        self, inputs: Sequence[Text], params: PoolingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> TokenResult:
        """Embeds every token of each input; a multi-vector model leaves some out."""
        result = await self._combined.embed(inputs, (PoolingTask.TOKEN_EMBED,), params, options)
        return TokenResult(result.vectors or [], result.token_ids or [], result.num_tokens)

    async def sparse_embed(
        self, inputs: Sequence[Text], params: PoolingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> SparseResult:
        """Embeds each input into a sparse vector over the vocabulary (vectors.py)."""
        result = await self._combined.embed(inputs, (PoolingTask.SPARSE_EMBED,), params, options)
        return SparseResult(result.sparse or [], result.num_tokens)

    async def embed_combined(
        self,
        inputs: Sequence[Text],
        tasks: Sequence[PoolingTask],
        params: PoolingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> CombinedResult:
        """Answers several of EMBED, TOKEN_EMBED and SPARSE_EMBED from one forward.

        Raises:
            UnsupportedTaskError: The model lacks one of them, or reads long inputs in chunks and gives one at a time.
        """
        if set(tasks) == {PoolingTask.EMBED}:
            dense = await self.embed(inputs, params, options)
            return CombinedResult(dense.num_tokens, dense.embeddings)
        return await self._combined.embed(inputs, tasks, params, options)

    async def classify(
        self, inputs: Sequence[Text], params: PoolingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> ClassResult:
        """Gives every input a score for each class of the model."""
        params = self._resolved(params, PoolingTask.CLASSIFY)
        async with self._dispatcher.open(options) as request:
            tokenized = await self._encoder.encode(inputs, params, options)
            outputs = await request.run(tokenized, params)
        return ClassResult(stacked([o["scores"] for o in outputs]), self.info.labels, [len(t) for t in tokenized])

    async def classify_pairs(
        self, pairs: Sequence[tuple[str, str]], params: PoolingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> ClassResult:
        """Gives every pair of texts, read as one sequence, a score for each class of the model."""
        is_scorer = self.info.kind is ModelKind.CROSS_ENCODER
        params = self._resolved(params, PoolingTask.SCORE if is_scorer else PoolingTask.CLASSIFY)
        async with self._dispatcher.open(options) as request:
            tokenized = await self._encoder.pairs(pairs, params, options, param="input")
            outputs = await request.run(tokenized, params)
        return ClassResult(stacked([o["scores"] for o in outputs]), self.info.labels, [len(t) for t in tokenized])

    async def token_classify(
        self, inputs: Sequence[Text], params: PoolingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> TokenResult:
        """Gives every token of each input a score for each class of the model."""
        params = self._resolved(params, PoolingTask.TOKEN_CLASSIFY)
        async with self._dispatcher.open(options) as request:
            tokenized = await self._encoder.encode(inputs, params, options)
            token_ids = [tokens.token_ids.tolist() for tokens in tokenized]
            if params.step_tag_id is not None:
                token_ids = [[i for i in ids if i == params.step_tag_id] for ids in token_ids]
            options.tell_rows(sum(map(len, token_ids)), len(params.returned_token_ids or self.info.labels))
            outputs = await request.run(tokenized, params)
        rows = [output["token_scores"] for output in outputs]
        return TokenResult(rows, token_ids, [len(tokens) for tokens in tokenized], self.info.labels)

    async def score(
        self,
        left: Sequence[str],
        right: Sequence[str],
        params: PoolingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> ScoreResult:
        """Scores pairs: with a cross-encoder as one joint sequence, with an embedding model by cosine.

        A model with one vector per token (ColBERT) scores by MaxSim: the largest similarities of query tokens, summed.

        An instruction stands in the prompt of a reranker, or in the query prompt of an embedding model that has one.

        Args:
            left: Queries: one for all of `right`, or as many.
            right: Documents.
            params: use_activation and truncation.
            options: See RequestOptions.

        Raises:
            InvalidRequestError: The numbers do not match.
        """
        return await self._scorer.score(left, right, params, options)

    async def zero_shot(
        self,
        inputs: Sequence[Text],
        labels: Sequence[str],
        params: PoolingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> ClassResult:
        """Classifies inputs among label texts by the similarity of embeddings. Rows of scores sum to 1.

        Raises:
            InvalidRequestError: Fewer than two labels, or a label twice.
        """
        check_labels(labels, "labels")
        embedded = await self._embed_for_classes([*inputs, *labels], params, options)
        return zero_shot_classes(embedded, labels)

    async def few_shot(
        self,
        inputs: Sequence[Text],
        examples: Sequence[tuple[str, str]],
        params: PoolingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> ClassResult:
        """Classifies inputs given labelled examples (text, label) by the similarity of embeddings. Rows sum to 1.

        Raises:
            InvalidRequestError: Fewer than two different labels.
        """
        labels = [label for _, label in examples]
        check_labels(dict.fromkeys(labels), "examples")
        embedded = await self._embed_for_classes([*inputs, *(text for text, _ in examples)], params, options)
        return few_shot_classes(embedded, labels)

    async def render_chats(
        self, conversations: Sequence[Conversation], options: ChatOptions | None = None
    ) -> list[str]:
        """Returns the text that the model's chat template makes of each chat, special tokens included.

        To embed or classify it, set `prompt=""` and `add_special_tokens=False` in the options of that call.

        Args:
            conversations: Messages as mappings with a `role` and a `content`: a text, or parts of type text.
            options: How to render; None renders the messages as they are.

        Raises:
            InvalidRequestError: The model has no chat template, or it does not take the messages.
        """
        return await self._tokenizer.render_chats(conversations, options or ChatOptions())

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, on_count: OnCount | None = None
    ) -> list[list[int]]:
        """Returns the token ids of each text, uncut; see TokenizerPool.token_details."""
        return await self._tokenizer.token_ids(texts, add_special_tokens=add_special_tokens, on_count=on_count)

    async def tokenize_details(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, on_count: OnCount | None = None
    ) -> list[TokenizedText]:
        """Returns the tokens of each text with their places in it, uncut; see TokenizerPool.token_details."""
        return await self._tokenizer.token_details(texts, add_special_tokens=add_special_tokens, on_count=on_count)

    async def detokenize(self, batches: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Returns the text of each list of token ids. Raises InvalidRequestError for an id outside the vocabulary."""
        return await self._tokenizer.decode(batches, skip_special_tokens=skip_special_tokens)

    async def _embed_for_classes(
        self, texts: Sequence[Text], params: PoolingParams, options: RequestOptions
    ) -> EmbeddingResult:
        """Embeds inputs together with the labels or examples that they are compared with."""
        check_embeds(self.info)
        return await self.embed(texts, params.clone(use_activation=None, normalize=True), options)
