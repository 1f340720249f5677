"""The public face of the engine: text or token ids in, numpy arrays out. Belongs to one event loop; imports no torch.

engine = await AsyncEngine.start(EngineConfig(model="path/or/hub-id"))
result = await engine.embed(["some text"], PoolingParams())  # and in the end: await engine.close()
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Self

from .client.combined import CombinedEmbedder
from .client.core_supervisor import EngineState
from .client.dispatcher import Dispatcher
from .client.engine_process import EngineProcess
from .client.replica_group import ReplicaGroup, ReplicaStatus, replica_configs
from .client.scoring import PairScorer, check_embeds, check_labels, few_shot_classes, zero_shot_classes
from .client.shared_engine import EngineClient
from .client.stats import DispatcherStats
from .client.vector_cache.cache import VectorCache
from .client.vector_cache.model_cache import ModelCache
from .protocol.config import EngineConfig
from .protocol.messages import ModelReady
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
"""Number of resolved parameters that are cached."""


class AsyncEngine:
    """One served model. Create it with `start`.

    Every call that runs the model raises InvalidRequestError where the request is wrong (see PoolingParams.verify and
    TokenizerPool), and EngineUnavailableError, EngineOverloadedError, DeadlineExceededError and
    ModelExecutionError; see Dispatcher.open and OpenRequest.run.

    Args:
        config: What is served.
        info: The attribute.
        tokenizer: Tokenizer of the model.
        dispatcher: Holds the requests under way.
        group: The replicas, or the connection to an engine that another process supervises.

    Attributes:
        info: The resolved description of the model.
        tokenizer_config: The class of its tokenizer, and what transformers made it of.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        tokenizer: TokenizerPool,
        dispatcher: Dispatcher,
        group: ReplicaGroup | EngineClient,
    ) -> None:
        self.info = info
        self.tokenizer_config = tokenizer.config
        self._tokenizer = tokenizer
        self._dispatcher = dispatcher
        self._group = group

        # Equal parameters share one object, which a message to the core contains once.
        @lru_cache(_NUM_PARAMS)
        def resolved(params: PoolingParams, task: PoolingTask) -> PoolingParams:
            return params.resolved(task, info)

        self._resolved = resolved
        self._encoder = InputEncoder(info, tokenizer, config)
        self._scorer = PairScorer(info, self._encoder, dispatcher)
        self._combined = CombinedEmbedder(info, self._encoder, dispatcher, tokenizer.recipe_tokens)

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
        """Loads the model and returns the engine when it can serve.

        Args:
            config: What to serve.
            log_level: Least severe level that the engine process logs.
            log_format: Its log lines, "console" or "json"; see logs.py.
            process: An engine process that has been started already; None to start one.
            cache: Where vectors are looked up and kept, with those of other engines; None for nowhere.

        Raises:
            ModelLoadError: The model cannot be served; the message says why.
        """
        configs = replica_configs(config)
        limits = config.scheduler
        own = None if cache is None else ModelCache(cache)
        dispatcher = Dispatcher(limits.max_queued_tokens, limits.max_queue_s, own, num_replicas=len(configs))
        group = ReplicaGroup(configs, dispatcher, log_level=log_level, log_format=log_format, process=process)
        ready = await group.start()
        try:
            return cls.attached(config, ready, dispatcher, group)
        except BaseException:
            await group.close()
            raise

    @classmethod
    def attached(
        cls, config: EngineConfig, ready: ModelReady, dispatcher: Dispatcher, group: ReplicaGroup | EngineClient
    ) -> Self:
        """Returns the engine over a model that has been loaded.

        Args:
            config: What is served.
            ready: The message of the engine process.
            dispatcher: Holds the requests under way.
            group: The replicas, or the connection to an engine that another process supervises.
        """
        tokenizer = TokenizerPool(
            ready.tokenizer,
            vocab_size=ready.info.vocab_size,
            do_lower_case=ready.info.do_lower_case,
            num_workers=config.tokenizer_workers,
            max_chars=config.max_queued_chars,
            on_refusal=dispatcher.stats.count_refusal,
        )
        return cls(config, ready.info, tokenizer, dispatcher, group)

    @property
    def state(self) -> EngineState:
        """State of the engine."""
        return self._group.state

    @property
    def num_restarts(self) -> int:
        """How often a dead core was replaced."""
        return self._group.num_restarts

    @property
    def places(self) -> list[str]:
        """Where each replica runs, in words; empty where the only one has all of the machine."""
        return self._group.places

    @property
    def replicas(self) -> list[ReplicaStatus]:
        """Each replica where there are several; empty for one."""
        return self._group.replicas

    @property
    def is_full(self) -> bool:
        """Whether the queue of a working engine is full: `check_room` then refuses clients that have their share.

        False while a cache looks inputs up first: requests are refused after that.
        """
        return self._dispatcher.admission.is_full and not self._dispatcher.looks_while_full

    @property
    def queue_s(self) -> float:
        """Seconds that what waits or runs takes at the rate of the last forwards; 0 before that is measured."""
        return self._dispatcher.admission.queue_s

    def host_bytes(self) -> int:
        """Returns the Bytes of memory that its processes hold for themselves; 0 where that is not known.

        Files that they have mapped, such as libraries, are not counted: processes share them.
        """
        return self._group.host_bytes()

    def check_room(self, client: str = "") -> None:
        """Refuses a request of `client` that the queue cannot take now; see Admission.check."""
        self._dispatcher.admission.check(client)

    async def wait_for_cache(self) -> None:
        """Waits until the cache looks inputs up, if there is one: that needs one pass over the weights."""
        if self._dispatcher.cache is not None:
            await self._dispatcher.cache.wait()

    def stats(self) -> DispatcherStats:
        """Returns counters and what is under way."""
        return self._dispatcher.stats

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for those under way. Returns False if some were left after `timeout_s`."""
        self._group.drain()
        return await self._dispatcher.wait_until_idle(timeout_s)

    async def close(self) -> None:
        """Stops the engine; requests under way fail with EngineUnavailableError. May be called twice."""
        await self._group.close()
        self._tokenizer.close()

    async def clear_prefixes(self) -> int | None:
        """Empties the prefix cache; see Dispatcher.clear_prefixes."""
        return await self._dispatcher.clear_prefixes()

    async def embed(
        self, inputs: Sequence[Text], params: PoolingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> EmbeddingResult:
        """Embeds each input into one vector; in long-text mode, longer ones than the model takes too (long_text.py)."""
        params = self._resolved(params, PoolingTask.EMBED)
        async with self._dispatcher.open(options, looks_up=True) as request:
            tokenized = await self._encoder.encode(inputs, params, options)
            windows = await self._encoder.windows(inputs, tokenized, options)
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
        """Embeds each input into a sparse vector over the vocabulary (multi_vector.py)."""
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
