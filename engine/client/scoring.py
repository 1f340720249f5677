"""Scores of text pairs, and classification by the similarity of embeddings."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..protocol.batch_outputs import Arrays
from ..protocol.errors import InvalidRequestError, UnsupportedTaskError
from ..protocol.messages import TokenizedInput
from ..protocol.model_info import ModelInfo, ModelKind
from ..protocol.multi_vector import DOCUMENT_PROMPTS, QUERY_PROMPTS, SparseVector, maxsim_score
from ..protocol.params import PoolingParams, RequestOptions, TextOrImage
from ..protocol.results import ClassResult, EmbeddingResult, ScoreResult
from ..protocol.tasks import PoolingTask
from ..tokenization.input_encoder import InputEncoder, instructed_prompt
from .dispatcher import Dispatcher, OpenRequest
from .vector_cache.keys import is_cacheable

Contents = Sequence[TextOrImage]
Array = NDArray[np.float32]
_SCALE = 20.0
"""Factor on cosines before the softmax over labels: the inverse temperature of sentence-transformers' training."""
# Task adapters of jina-embeddings-v3 (in both layouts) and v5.
_QUERY_ADAPTERS: Final = ("retrieval.query", "retrieval_query", "retrieval")
_DOCUMENT_ADAPTERS: Final = ("retrieval.passage", "retrieval_passage", "retrieval")


def check_sides(left: Contents, right: Contents) -> None:
    """Raises InvalidRequestError unless the texts of both sides make pairs."""
    if not left or not right:
        raise InvalidRequestError(
            "Scoring needs at least one text on each side.", param="text_1" if not left else "text_2"
        )
    if len(left) not in (1, len(right)):
        raise InvalidRequestError(
            f"{len(left)} texts cannot be paired with {len(right)}; give 1 to 1, 1 to N or N to N.", param="text_2"
        )


class PairScorer:
    """Scores pairs with one model."""

    def __init__(self, info: ModelInfo, encoder: InputEncoder, dispatcher: Dispatcher) -> None:
        self._info = info
        self._encoder = encoder
        self._dispatcher = dispatcher

    async def score(
        self, left: Contents, right: Contents, params: PoolingParams, options: RequestOptions
    ) -> ScoreResult:
        """Returns a score for each pair. Arguments and errors are those of AsyncEngine.score."""
        check_sides(left, right)
        if self._info.kind is ModelKind.CROSS_ENCODER:
            task, score = PoolingTask.SCORE, self._score_jointly
        elif self._info.multi_vector is not None:
            task, score = PoolingTask.TOKEN_EMBED, self._score_maxsim
        elif PoolingTask.EMBED not in self._info.tasks and self._info.sparse is not None:
            task, score = PoolingTask.SPARSE_EMBED, self._score_by_sparse_vectors
        else:
            task, score = PoolingTask.EMBED, self._score_by_cosine
        if task is not PoolingTask.SCORE:
            params.verify(PoolingTask.SCORE, self._info)
            if params.use_activation is not None:
                raise InvalidRequestError(
                    "{use_activation} belongs to scores of a cross-encoder; {model.name} scores by the similarity of "
                    "its embeddings. Leave {use_activation} out.",
                    param="use_activation",
                    model=self._info,
                )
            params = params.clone(normalize=True if task is PoolingTask.EMBED else None)
        params = params.resolved(task, self._info, options.adapter)
        documents = [item for item in right if isinstance(item, str)]
        if len(documents) < len(right) or not all(isinstance(item, str) for item in left):
            options = replace(options, max_passages=1)  # images are not split
        async with self._dispatcher.open(options, is_cacheable=is_cacheable(params)) as request:
            if options.max_passages == 1:
                return await score(request, left, right, params, options)
            passage_options = options if task is PoolingTask.SCORE else self._document_options(options)
            passages = await self._encoder.passages(left, documents, params, passage_options)
            queries = left if len(left) == 1 else [left[owner] for owner in passages.owners]
            if params.truncate_prompt_tokens is None:
                params = params.clone(truncate_prompt_tokens=-1)  # a passage encoded alone may have one more token
            return passages.join(await score(request, queries, passages.texts, params, options))

    async def _score_jointly(
        self, request: OpenRequest, left: Contents, right: Contents, params: PoolingParams, options: RequestOptions
    ) -> ScoreResult:
        queries = left if len(left) == len(right) else [left[0]] * len(right)
        pairs = list(zip(queries, right, strict=True))
        tokenized = await self._encoder.pairs(pairs, params, options, param=None)
        outputs = await request.run(tokenized, params)
        return ScoreResult(np.array([o["scores"][0] for o in outputs], np.float32), [len(t) for t in tokenized])

    async def _score_by_cosine(
        self, request: OpenRequest, left: Contents, right: Contents, params: PoolingParams, options: RequestOptions
    ) -> ScoreResult:
        query_options = self._query_options(options)
        document_options = self._document_options(options)
        encoded = await self._encoder.encode(left, self._query_params(params), query_options, param=None)
        queries = await self._encoder.windows(left, encoded, query_options)
        encoded = await self._encoder.encode(right, params, document_options, param=None)
        documents = await self._encoder.windows(right, encoded, document_options)
        query_params, document_params = (
            params.clone(adapter=side.adapter or params.adapter) for side in (query_options, document_options)
        )
        outputs = await self._run(request, queries.sequences, documents.sequences, query_params, document_params)
        vectors = np.stack([output["embedding"] for output in outputs])
        query_vectors, document_vectors = np.split(vectors, [len(queries.sequences)])
        left_vectors = queries.join(query_vectors, normalized=True)
        right_vectors = documents.join(document_vectors, normalized=True)
        return ScoreResult(
            paired_cosine(left_vectors, right_vectors), _count_pairs(documents.num_tokens, queries.num_tokens)
        )

    async def _score_by_sparse_vectors(
        self, request: OpenRequest, left: Contents, right: Contents, params: PoolingParams, options: RequestOptions
    ) -> ScoreResult:
        sparse = self._info.sparse
        assert sparse is not None, "only models with sparse vectors are scored by them"
        query_options = self._query_options(options)
        queries = await self._encoder.encode(left, self._query_params(params), query_options, param=None)
        documents = await self._encoder.encode(right, params, self._document_options(options), param=None)
        outputs = await self._run(request, queries, documents, params, params)
        vectors = [SparseVector.of(output["sparse"]) for output in outputs]
        paired_queries = vectors[: len(left)] if len(left) == len(right) else [vectors[0]] * len(right)
        scores = [
            query.similarity(document, is_cosine=sparse.is_cosine)
            for query, document in zip(paired_queries, vectors[len(left) :], strict=True)
        ]
        return ScoreResult(np.array(scores, np.float32), _count_pairs(map(len, documents), map(len, queries)))

    async def _score_maxsim(
        self, request: OpenRequest, left: Contents, right: Contents, params: PoolingParams, options: RequestOptions
    ) -> ScoreResult:
        """Scores by MaxSim. Queries run first; the engine process then compares the documents with them."""
        multi_vector = self._info.multi_vector
        assert multi_vector is not None, "only multi-vector models are scored by MaxSim"
        query_params = params.clone(is_query=True)
        texts = list(dict.fromkeys(left))
        queries = await self._encoder.encode(texts, query_params, self._query_options(options), param=None)
        documents = await self._encoder.encode(right, params, self._document_options(options), param=None)
        with request.admitted([*queries, *documents]):
            outputs = await request.run(queries, query_params, is_admitted=True)
            rows: dict[TextOrImage, NDArray[np.float32]] = {
                text: output["token_embeddings"] for text, output in zip(texts, outputs, strict=True)
            }
            paired_texts = left if len(left) == len(right) else [left[0]] * len(right)
            paired_queries = [rows[text] for text in paired_texts]
            compared = [
                replace(document, query_vectors=query)
                for document, query in zip(documents, paired_queries, strict=True)
            ]
            outputs = await request.run(compared, params.clone(is_compared=True), is_admitted=True)
        scores = [
            maxsim_score(output["similarities"], len(query), averages=multi_vector.averages)
            for output, query in zip(outputs, paired_queries, strict=True)
        ]
        lengths = dict(zip(texts, map(len, queries), strict=True))
        query_lengths = [lengths.pop(text, 0) for text in left]
        return ScoreResult(np.array(scores, np.float32), _count_pairs(map(len, documents), query_lengths))

    async def _run(
        self,
        request: OpenRequest,
        queries: Sequence[TokenizedInput],
        documents: Sequence[TokenizedInput],
        query_params: PoolingParams,
        document_params: PoolingParams,
    ) -> list[Arrays]:
        """Runs both sides of pairs, together unless queries have a model or an adapter of their own."""
        query_params = self._query_params(query_params)
        if query_params == document_params:
            return await request.run([*queries, *documents], document_params)
        outputs = await request.run(queries, query_params)
        return outputs + await request.run(documents, document_params)

    def _query_params(self, params: PoolingParams) -> PoolingParams:
        return params if self._info.query_model is None else params.clone(is_query=True)

    def _query_options(self, options: RequestOptions) -> RequestOptions:
        """Returns options with the model's query adapter and prompt, with the request's instruction if it has one."""
        options = replace(self._with_adapter(_QUERY_ADAPTERS, options), max_passages=1)  # queries are not split
        if not options.instruction:
            return self._named_prompt(QUERY_PROMPTS, options)
        names = (*QUERY_PROMPTS, self._info.default_prompt_name or "")
        return replace(options, prompt=instructed_prompt(self._info, names, options.instruction))

    def _document_options(self, options: RequestOptions) -> RequestOptions:
        return self._named_prompt(DOCUMENT_PROMPTS, self._with_adapter(_DOCUMENT_ADAPTERS, options))

    def _with_adapter(self, names: Sequence[str], options: RequestOptions) -> RequestOptions:
        """Returns options with the first of the model's task adapters in `names`, unless the request selects one."""
        served = [adapter.name for adapter in self._info.task_adapters if adapter.is_served]
        if options.adapter is not None:
            return options
        return replace(options, adapter=next((name for name in names if name in served), None))

    def _named_prompt(self, names: Sequence[str], options: RequestOptions) -> RequestOptions:
        """Returns options with the prompt of the adapter, or else the first of `names` that the model has.

        A prompt that the request names has precedence.
        """
        if options.prompt_name is not None:
            return options
        names = (options.adapter or "", *names)
        return replace(options, prompt_name=next((name for name in names if name in self._info.prompts), None))


def _count_pairs(documents: Iterable[int], queries: Iterable[int]) -> list[int]:
    """Returns the tokens of each pair. A query that several pairs share counts once, at its first pair."""
    return [document + query for document, query in itertools.zip_longest(documents, queries, fillvalue=0)]


def normalized(vectors: Array) -> Array:
    """Returns the rows of [N, D] at length 1; a zero row stays zero."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), np.float32)


def paired_cosine(left: Array, right: Array) -> Array:
    """Returns the cosine of each row of [N, D] with the same row of the other, as [N] float32."""
    cosines = np.sum(normalized(left) * normalized(right), axis=-1)
    return np.asarray(np.clip(cosines, -1.0, 1.0), np.float32)  # rounding may pass 1, which clients rescale


def zero_shot_scores(inputs: Array, labels: Array) -> Array:
    """Returns [N, C] probabilities of C label embeddings for N input embeddings: a softmax over scaled cosines."""
    logits = np.asarray(_SCALE * (normalized(inputs) @ normalized(labels).T), np.float32)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float32)


def few_shot_scores(inputs: Array, examples: Array, example_labels: Sequence[int], num_labels: int) -> Array:
    """Returns [N, C] probabilities of N inputs given labelled examples.

    The vector of a label is the mean of its examples (nearest class mean; Snell, Swersky, Zemel, "Prototypical
    Networks", 2017, with cosine in place of the Euclidean distance).

    Args:
        inputs: [N, D].
        examples: [M, D].
        example_labels: Label of each example, 0 to C-1; every label has at least one.
        num_labels: C.
    """
    sums = np.zeros((num_labels, examples.shape[1]), np.float32)
    np.add.at(sums, np.asarray(example_labels), normalized(examples))
    return zero_shot_scores(inputs, sums)


def check_labels(labels: Collection[str], field: str) -> None:
    """Raises InvalidRequestError for fewer than two labels or a repeated label. `field` names the labels."""
    if len(set(labels)) < 2:
        raise InvalidRequestError(f"{field} must name at least two different labels.", param=field)
    if len(set(labels)) != len(labels):
        raise InvalidRequestError(f"{field} must name at least two different labels, each once.", param=field)


def check_embeds(info: ModelInfo) -> None:
    """Raises UnsupportedTaskError for a model without embeddings, which labels and examples need."""
    if PoolingTask.EMBED not in info.tasks:
        raise UnsupportedTaskError(
            f"{info.name} makes no single vector of an input; labels and examples need an embedding model that does.",
            param="labels",
        )


def zero_shot_classes(embedded: EmbeddingResult, labels: Sequence[str]) -> ClassResult:
    """Classifies inputs among label texts; `embedded` has the inputs, then the labels. See AsyncEngine.zero_shot."""
    inputs, label_vectors = _split(embedded, len(labels))
    return ClassResult(
        zero_shot_scores(inputs, label_vectors), tuple(labels), _count_inputs(embedded.num_tokens, len(inputs))
    )


def few_shot_classes(embedded: EmbeddingResult, example_labels: Sequence[str]) -> ClassResult:
    """Classifies inputs given labelled examples; `embedded` has the inputs, then the examples."""
    inputs, examples = _split(embedded, len(example_labels))
    columns = {label: column for column, label in enumerate(dict.fromkeys(example_labels))}
    scores = few_shot_scores(inputs, examples, [columns[label] for label in example_labels], len(columns))
    return ClassResult(scores, tuple(columns), _count_inputs(embedded.num_tokens, len(inputs)))


def _count_inputs(num_tokens: list[int], num_inputs: int) -> list[int]:
    """Returns the tokens of each input; the tokens of labels and examples count for the first."""
    return [num_tokens[0] + sum(num_tokens[num_inputs:]), *num_tokens[1:num_inputs]]


def _split(embedded: EmbeddingResult, num_last: int) -> tuple[Array, Array]:
    num_inputs = len(embedded.num_tokens) - num_last
    return embedded.embeddings[:num_inputs], embedded.embeddings[num_inputs:]
