"""The public interface of the engine, which converts text or token ids to numpy arrays, without torch.

engine = await AsyncEngine.start(EngineConfig(model="path/or/hub-id"))
result = await engine.embed(["some text"], PoolingParams())  # and in the end: await engine.close()
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Self

from .client.combined_embedder import CombinedEmbedder
from .client.core_supervisor import EngineState
from .client.dispatcher import Dispatcher
from .client.engine_process import EngineProcess
from .client.replica_group import ReplicaGroup, ReplicaStatus, replica_configs
from .client.scoring import PairScorer, check_embeds, check_labels, few_shot_classes, zero_shot_classes
from .client.shared_engine import EngineClient
from .client.stats import DispatcherStats
from .client.vector_cache.cache import VectorCache
from .client.vector_cache.model_cache import ModelCache
from .images.image_file import ImageLimits
from .images.preprocessor import ImagePreprocessor
from .protocol.config import EngineConfig
from .protocol.errors import InvalidRequestError
from .protocol.images import ImageInput, MixedInput
from .protocol.messages import ModelReady, Start
from .protocol.model_info import ModelInfo, ModelKind, TokenizerSpec
from .protocol.params import DEFAULT_OPTIONS, Input, PoolingParams, RequestOptions, TextOrImage
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
"""Maximum number of cached resolved parameters."""


class AsyncEngine:
    """A model that is ready for requests, on one event loop. Create it with `start`.

    Every method that runs the model raises InvalidRequestError for a wrong request (see PoolingParams.verify and
    TokenizerPool), and EngineUnavailableError, EngineOverloadedError, DeadlineExceededError and
    ModelExecutionError; see Dispatcher.open and OpenRequest.run.

    Args:
        dispatcher: Its stats get the counters of `images`.
        group: The replicas, or a connection to an engine that another process supervises.
        images: Decodes images; None: the model reads texts only.

    Attributes:
        info: The resolved model.
        tokenizer_config: Class and settings of the tokenizer; see TokenizerSpec.
        image_limits: Limits of an image.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        tokenizer: TokenizerPool,
        dispatcher: Dispatcher,
        group: ReplicaGroup | EngineClient,
        images: ImagePreprocessor | None = None,
    ) -> None:
        self.info = info
        self.tokenizer_config = tokenizer.config
        self.image_limits = ImageLimits(max_pixels=config.max_image_pixels)
        self._tokenizer = tokenizer
        self._dispatcher = dispatcher
        self._group = group

        @lru_cache(_NUM_PARAMS)
        def resolved(params: PoolingParams, task: PoolingTask, adapter: str | None) -> PoolingParams:
            return params.resolved(task, info, adapter)

        self._resolved = resolved
        self._images = images
        dispatcher.stats.images = None if images is None else images.stats
        self._encoder = InputEncoder(info, tokenizer, config, images)
        self._scorer = PairScorer(info, self._encoder, dispatcher)
        self._combined = CombinedEmbedder(info, self._encoder, dispatcher, tokenizer.multi_vector_tokens)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        log_level: str = "INFO",
        log_format: str = "console",
        process: EngineProcess | None = None,
        cache: VectorCache | None = None,
    ) -> Self:
        """Loads the model and returns an engine that is ready for requests.

        Args:
            config: Model and settings.
            log_level: Lowest level that the engine process logs.
            log_format: Format of its log lines, "console" or "json"; see logs.py.
            process: An engine process that is already started; None starts a new one.
            cache: Cache of vectors, which several engines may share; None for no cache.

        Raises:
            ModelLoadError: The model cannot be loaded; the message has the reason.
        """
        configs = replica_configs(config)
        limits = config.scheduler
        model_cache = None if cache is None else ModelCache(cache)
        dispatcher = Dispatcher(limits.max_queued_tokens, limits.max_queue_s, model_cache, num_replicas=len(configs))
        group = ReplicaGroup([Start(each, log_level, log_format) for each in configs], dispatcher, process)
        ready = await group.start()
        try:
            return cls.attached(config, ready, dispatcher, group)
        except BaseException:  # stop the engine processes, also after an interrupt
            await group.close()
            raise

    @classmethod
    def attached(
        cls, config: EngineConfig, ready: ModelReady, dispatcher: Dispatcher, group: ReplicaGroup | EngineClient
    ) -> Self:
        """Returns an engine for a loaded model.

        Args:
            config: Model and settings.
            ready: The message from the engine process that the model is loaded.
            dispatcher: Dispatcher of the requests.
            group: The replicas, or a connection to an engine that another process supervises.
        """

        def tokenizer_pool(info: ModelInfo, spec: TokenizerSpec) -> TokenizerPool:
            query_tokenizer = None
            if info.query_model is not None and spec.query_tokenizer is not None:
                query_tokenizer = tokenizer_pool(info.query_model, spec.query_tokenizer)
            return TokenizerPool(
                spec,
                vocab_size=info.vocab_size,
                do_lower_case=info.do_lower_case,
                num_threads=config.tokenizer_workers,
                max_chars=config.max_queued_chars,
                on_rejection=dispatcher.stats.count_rejection,
                query_tokenizer=query_tokenizer,
            )

        images = None
        reader = ready.info.image or ready.info
        if reader.image_spec is not None:
            images = ImagePreprocessor(
                reader.image_spec,
                num_threads=config.tokenizer_workers,
                limits=ImageLimits(max_pixels=config.max_image_pixels),
                max_decoding_bytes=config.image_memory,
                max_queue_s=config.scheduler.max_queue_s,
                on_rejection=dispatcher.stats.count_rejection,
            )
        return cls(config, ready.info, tokenizer_pool(ready.info, ready.tokenizer), dispatcher, group, images)

    @property
    def state(self) -> EngineState:
        """State of the engine. READY if at least one replica takes requests."""
        return self._group.state

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the engine processes."""
        return self._group.num_restarts

    @property
    def replicas(self) -> list[ReplicaStatus]:
        """Status of each replica; empty if the only one uses the whole machine."""
        return self._group.replicas

    @property
    def is_full(self) -> bool:
        """Whether the queue is full, so that `check_queue` rejects clients that have used their share.

        False if requests look up their inputs in a cache before they are rejected.
        """
        return self._dispatcher.admission.is_full and not self._dispatcher.allows_lookups

    @property
    def queue_s(self) -> float:
        """Estimated seconds for all requests in the queue, at the speed of the last forwards; 0 before the first."""
        return self._dispatcher.admission.queue_s

    def host_bytes(self) -> int:
        """Returns the memory of the engine processes in bytes, without shared files such as libraries; 0 if unknown."""
        return self._group.host_bytes()

    def check_queue(self, client: str = "") -> None:
        """Raises an error if the queue has no space for a request of `client`; see QueueAdmission.check."""
        self._dispatcher.admission.check(client)

    def stats(self) -> DispatcherStats:
        """Returns the counters and the numbers of requests and tokens in the queue."""
        return self._dispatcher.stats

    async def drain(self, timeout_s: float) -> bool:
        """Rejects new requests and waits for the others; returns False if there are still some after `timeout_s`."""
        self._group.drain()
        return await self._dispatcher.wait_until_idle(timeout_s)

    async def close(self) -> None:
        """Stops the engine; requests in progress raise EngineUnavailableError."""
        await self._group.close()
        self._tokenizer.close()
        if self._images is not None:
            self._images.close()

    async def reset_prefix_cache(self) -> int | None:
        """Clears the prefix cache. Returns the number of blocks; None without a cache.

        Raises:
            EngineUnavailableError: No engine process is running, or one ends.
        """
        return await self._dispatcher.backend.reset_prefix_cache()

    async def embed(
        self, inputs: Sequence[Input], params: PoolingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> EmbeddingResult:
        """Returns one vector for each text or image; long-text mode supports texts of any length (long_text.py)."""
        params = self._resolved(self._encoder.with_query_flag(params, options), PoolingTask.EMBED, options.adapter)
        async with self._dispatcher.open(options, is_cacheable=True) as request:
            tokenized = await self._encoder.encode(inputs, params, options)
            windows = await self._encoder.windows(inputs, tokenized, options)
            outputs = await request.run(windows.sequences, params)
        vectors = stacked([output["embedding"] for output in outputs])
        return EmbeddingResult(windows.join(vectors, normalized=bool(params.normalize)), windows.num_tokens)

    async def embed_late(
        self, inputs: Sequence[Input], params: PoolingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> EmbeddingResult:
        """Returns a vector for each input, computed in the context of all inputs as one text (late_chunking.py).

        Raises:
            InvalidRequestError: The model does not use MEAN pooling, or an input has no tokens.
        """
        return await self._combined.embed_late(inputs, params, options)

    async def token_embed(
        self, inputs: Sequence[Input], params: PoolingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> TokenResult:
        """Returns a vector for every token of each input; multi-vector models omit some tokens."""
        result = await self._combined.embed(inputs, (PoolingTask.TOKEN_EMBED,), params, options)
        assert result.vectors is not None, "the task was requested"
        assert result.token_ids is not None, "the task was requested"
        return TokenResult(result.vectors, result.token_ids, result.num_tokens)

    async def sparse_embed(
        self, inputs: Sequence[Input], params: PoolingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> SparseResult:
        """Returns a sparse vector over the vocabulary for each input (multi_vector.py)."""
        result = await self._combined.embed(inputs, (PoolingTask.SPARSE_EMBED,), params, options)
        return SparseResult(result.sparse or [], result.num_tokens)

    async def embed_combined(
        self,
        inputs: Sequence[Input],
        tasks: Sequence[PoolingTask],
        params: PoolingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> CombinedResult:
        """Runs several of the tasks EMBED, TOKEN_EMBED and SPARSE_EMBED with one forward.

        Raises:
            UnsupportedTaskError: The model does not support a task, or computes long inputs in chunks and therefore
                supports one task per request.
        """
        if set(tasks) == {PoolingTask.EMBED}:
            dense = await self.embed(inputs, params, options)
            return CombinedResult(dense.num_tokens, dense.embeddings)
        return await self._combined.embed(inputs, tasks, params, options)

    async def classify(
        self, inputs: Sequence[Input], params: PoolingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> ClassResult:
        """Returns a score for each class of the model, for every input."""
        params = self._resolved(params, PoolingTask.CLASSIFY, options.adapter)
        async with self._dispatcher.open(options) as request:
            tokenized = await self._encoder.encode(inputs, params, options)
            outputs = await request.run(tokenized, params)
        return ClassResult(stacked([o["scores"] for o in outputs]), self.info.labels, [len(t) for t in tokenized])

    async def classify_pairs(
        self, pairs: Sequence[tuple[str, str]], params: PoolingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> ClassResult:
        """Returns a score for each class of the model, for every pair of texts as one sequence."""
        is_scorer = self.info.kind is ModelKind.CROSS_ENCODER
        task = PoolingTask.SCORE if is_scorer else PoolingTask.CLASSIFY
        params = self._resolved(params, task, options.adapter)
        async with self._dispatcher.open(options) as request:
            tokenized = await self._encoder.pairs(pairs, params, options, param="input")
            outputs = await request.run(tokenized, params)
        return ClassResult(stacked([o["scores"] for o in outputs]), self.info.labels, [len(t) for t in tokenized])

    async def token_classify(
        self, inputs: Sequence[Input], params: PoolingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> TokenResult:
        """Returns a score for each class of the model, for every token of each input."""
        params = self._resolved(params, PoolingTask.TOKEN_CLASSIFY, options.adapter)
        async with self._dispatcher.open(options) as request:
            tokenized = await self._encoder.encode(inputs, params, options)
            token_ids = [tokens.token_ids.tolist() for tokens in tokenized]
            if params.step_tag_id is not None:
                token_ids = [[i for i in ids if i == params.step_tag_id] for ids in token_ids]
            options.report_rows(sum(map(len, token_ids)), len(params.returned_token_ids or self.info.labels))
            outputs = await request.run(tokenized, params)
        rows = [output["token_scores"] for output in outputs]
        return TokenResult(rows, token_ids, [len(tokens) for tokens in tokenized], self.info.labels)

    async def score(
        self,
        left: Sequence[TextOrImage],
        right: Sequence[TextOrImage],
        params: PoolingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> ScoreResult:
        """Scores pairs of queries and documents.

        A cross-encoder scores a pair as one sequence, an embedding model by cosine similarity, and a multi-vector model
        by MaxSim: the sum of the largest similarity of each query token. An instruction becomes part of the prompt of a
        reranker, or of the query prompt of an embedding model.

        Args:
            left: One query for all documents, or one for each.
            right: Documents.
            params: Only use_activation and truncation are allowed.
            options: Options of the request.

        Raises:
            InvalidRequestError: The numbers of queries and documents do not match.
        """
        return await self._scorer.score(left, right, params, options)

    async def zero_shot(
        self,
        inputs: Sequence[Input],
        labels: Sequence[str],
        params: PoolingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> ClassResult:
        """Classifies inputs by the similarity of their embeddings to those of the labels; each row sums to 1.

        Raises:
            InvalidRequestError: There are fewer than two labels, or two labels are equal.
        """
        check_labels(labels, "labels")
        embedded = await self._embed_for_classes([*inputs, *labels], params, options)
        return zero_shot_classes(embedded, labels)

    async def few_shot(
        self,
        inputs: Sequence[Input],
        examples: Sequence[tuple[str, str]],
        params: PoolingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> ClassResult:
        """Classifies inputs by the similarity of their embeddings to examples (text, label); each row sums to 1.

        Raises:
            InvalidRequestError: There are fewer than two different labels.
        """
        labels = [label for _, label in examples]
        check_labels(dict.fromkeys(labels), "examples")
        embedded = await self._embed_for_classes([*inputs, *(text for text, _ in examples)], params, options)
        return few_shot_classes(embedded, labels)

    async def render_chats(
        self, conversations: Sequence[Conversation], options: ChatOptions | None = None
    ) -> list[str]:
        """Returns the text of each chat from the chat template of the model, with special tokens.

        To embed or classify the text, set `is_rendered` and `add_special_tokens=False` in the options of that call.

        Args:
            conversations: Lists of messages with a `role` and a `content`, which is a text or parts of type text; for
                models that read images in chats also of type image.
            options: Options of the template; None for the default.

        Raises:
            InvalidRequestError: The model has no chat template, or the template does not support the messages.
        """
        return await self._tokenizer.render_chats(conversations, options or ChatOptions())

    def insert_images(self, prompt: str, images: Sequence[ImageInput]) -> MixedInput:
        """Replaces the placeholders of a rendered chat by images. Embed it with `is_rendered` in the options.

        Args:
            prompt: A prompt from `render_chats`, with a placeholder for each image.
            images: The images, in order.

        Raises:
            InvalidRequestError: The number of placeholders differs, or the model reads no images in chats.
        """
        if self._encoder.prompt_encoder is None:
            raise InvalidRequestError(f"{self.info.name} reads no images in chats.", param="messages")
        return self._encoder.prompt_encoder.insert_images(prompt, images)

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, on_count: OnCount | None = None
    ) -> list[list[int]]:
        """Returns the token ids of each text, not truncated; see TokenizerPool.token_details."""
        return await self._tokenizer.token_ids(texts, add_special_tokens=add_special_tokens, on_count=on_count)

    async def tokenize_details(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, on_count: OnCount | None = None
    ) -> list[TokenizedText]:
        """Returns the tokens of each text with their offsets, not truncated; see TokenizerPool.token_details."""
        return await self._tokenizer.token_details(texts, add_special_tokens=add_special_tokens, on_count=on_count)

    async def detokenize(self, batches: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Returns the text of each list of token ids; raises InvalidRequestError for an id outside the vocabulary."""
        return await self._tokenizer.decode(batches, skip_special_tokens=skip_special_tokens)

    async def _embed_for_classes(
        self, texts: Sequence[Input], params: PoolingParams, options: RequestOptions
    ) -> EmbeddingResult:
        """Returns normalized vectors of inputs and of the labels or examples for a comparison."""
        check_embeds(self.info)
        return await self.embed(texts, params.clone(use_activation=None, normalize=True), options)
