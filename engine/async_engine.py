"""The public face of the engine: text or token ids in, numpy arrays out. Belongs to one event loop; imports no torch.

engine = await AsyncEngine.start(EngineConfig(model="path/or/hub-id"))
result = await engine.embed(["some text"], PoolingParams())
await engine.close()
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .config import EngineConfig
from .dispatcher import Arrays, Dispatcher, DispatcherStats
from .errors import DeadlineExceededError, EngineUnavailableError, InvalidRequestError, UnsupportedTaskError
from .instructions import instructed_prompt
from .late_chunking import LateChunking, verify_late_chunking
from .long_text import LongText, Windows
from .model_info import ModelInfo, ModelKind
from .params import PoolingParams, PoolingTask
from .request import TokenizedInput
from .results import ClassResult, EmbeddingResult, ScoreResult, TokenResult
from .similarity import few_shot_scores, paired_cosine, zero_shot_scores
from .supervisor import CoreSupervisor, EngineState
from .tokenizer import Text, TokenizerPool, Truncation

_QUERY_PROMPTS = ("query", "search_query")
_DOCUMENT_PROMPTS = ("document", "passage", "corpus", "search_document")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How to treat a request, apart from what it asks of pooling.

    Attributes:
        timeout_s: Seconds until its answer is of no use.
        priority: Lower goes first; a level is worth one second of waiting.
        prompt_name: Named prompt of the model to put before every text.
        prompt: Text to put before every text; wins over `prompt_name`.
        instruction: What `score` tells the model to look for; None takes the model's own.
    """

    timeout_s: float | None = None
    priority: int = 0
    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None


class AsyncEngine:
    """One served model. Create it with `start`.

    Attributes:
        info: The resolved description of the model.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        tokenizer: TokenizerPool,
        dispatcher: Dispatcher,
        supervisor: CoreSupervisor,
    ) -> None:
        self.info = info
        self._auto_truncate = config.auto_truncate
        self._max_queued_tokens = config.scheduler.max_queued_tokens
        self._long_text = LongText.of(info, tokenizer.special_tokens)
        self._tokenizer = tokenizer
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._num_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def start(cls, config: EngineConfig, *, log_level: str = "INFO") -> AsyncEngine:
        """Loads the model and returns the engine when it can serve.

        Raises:
            ModelLoadError: The model cannot be served; the message says why.
        """
        dispatcher = Dispatcher(config.scheduler.max_queued_tokens)
        supervisor = CoreSupervisor(config, dispatcher, log_level=log_level)
        ready = await supervisor.start()
        tokenizer = TokenizerPool(
            ready.tokenizer,
            vocab_size=ready.info.vocab_size,
            do_lower_case=ready.info.do_lower_case,
            num_workers=config.tokenizer_workers,
        )
        return cls(config, ready.info, tokenizer, dispatcher, supervisor)

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self._supervisor.state

    @property
    def num_restarts(self) -> int:
        """How often a dead core was replaced."""
        return self._supervisor.num_restarts

    def stats(self) -> DispatcherStats:
        """Returns counters and what is under way."""
        return self._dispatcher.stats

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for those under way. Returns False if some were left after `timeout_s`."""
        self._supervisor.drain()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stops the core; requests under way fail with EngineUnavailableError. May be called twice."""
        await self._supervisor.close()
        self._tokenizer.close()

    async def embed(
        self, inputs: Sequence[Text], params: PoolingParams, options: RequestOptions = RequestOptions()
    ) -> EmbeddingResult:
        """Embeds each input into one vector; in long-text mode, longer ones than the model takes too (long_text.py).

        Raises:
            InvalidRequestError: See PoolingParams.verify and TokenizerPool.encode.
            EngineError: See Dispatcher.run.
        """
        params = params.resolved(PoolingTask.EMBED, self.info)
        async with self._request(options):
            windows = await self._windows(inputs, params, options)
            outputs = await self._run(windows.sequences, params, options)
        return EmbeddingResult(_joined(windows, outputs, params), windows.num_tokens)

    async def embed_late(
        self, inputs: Sequence[Text], params: PoolingParams, options: RequestOptions = RequestOptions()
    ) -> EmbeddingResult:
        """Embeds the inputs as parts of one text, one vector each that knows all of it (late_chunking.py).

        Raises:
            InvalidRequestError: The model does not pool by MEAN, an input has no tokens, or as `embed`.
            EngineError: As `embed`.
        """
        normalize = bool(params.resolved(PoolingTask.EMBED, self.info).normalize)
        verify_late_chunking(self.info)
        params = params.clone(task=None, normalize=False, use_activation=False)
        params = params.resolved(PoolingTask.TOKEN_EMBED, self.info)
        special = self._tokenizer.special_tokens
        if special is None:
            raise InvalidRequestError(
                f"late_chunking needs a tokenizer that puts special tokens around a text; that of {self.info.name} "
                "does more to it.",
                param="late_chunking",
            )
        async with self._request(options):
            _check_given(inputs)
            prompt = self._prompt(options) if isinstance(inputs[0], str) else ""
            truncation = self._truncation(params, param="input")
            late = LateChunking(
                special=special,
                include_prompt=self.info.include_prompt,
                max_num_tokens=truncation.max_num_tokens,
                cut=truncation.cut,
                cuts_left=self._tokenizer.cuts_left(truncation),
            )
            parts, is_whole = await self._tokenizer.encode_parts(inputs, truncation, prompt=prompt)
            prompt_ids = await self._prompt_ids(prompt)
            text = late.join(parts, [isinstance(i, str) for i in inputs], prompt_ids, is_whole=is_whole)
            (output,) = await self._run([text.tokens], params, options)
        return EmbeddingResult(text.pool(output["token_embeddings"], normalize=normalize), text.num_tokens)

    async def token_embed(
        self, inputs: Sequence[Text], params: PoolingParams, options: RequestOptions = RequestOptions()
    ) -> TokenResult:
        """Embeds every token of each input. Raises as `embed`."""
        return await self._token_level(PoolingTask.TOKEN_EMBED, "token_embeddings", inputs, params, options)

    async def classify(
        self, inputs: Sequence[Text], params: PoolingParams, options: RequestOptions = RequestOptions()
    ) -> ClassResult:
        """Gives every input a score for each class of the model. Raises as `embed`."""
        params = params.resolved(PoolingTask.CLASSIFY, self.info)
        async with self._request(options):
            tokenized = await self._tokenize(inputs, params, options)
            outputs = await self._run(tokenized, params, options)
        return ClassResult(np.stack([o["scores"] for o in outputs]), self.info.labels, [len(t) for t in tokenized])

    async def token_classify(
        self, inputs: Sequence[Text], params: PoolingParams, options: RequestOptions = RequestOptions()
    ) -> TokenResult:
        """Gives every token of each input a score for each class of the model. Raises as `embed`."""
        result = await self._token_level(PoolingTask.TOKEN_CLASSIFY, "token_scores", inputs, params, options)
        return replace(result, labels=self.info.labels)

    async def score(
        self,
        left: Sequence[str],
        right: Sequence[str],
        params: PoolingParams,
        options: RequestOptions = RequestOptions(),
    ) -> ScoreResult:
        """Scores pairs: with a cross-encoder as one joint sequence, with an embedding model by cosine.

        An instruction stands in the prompt of a reranker, or in the query prompt of an embedding model that has one.

        Args:
            left: Queries: one for all of `right`, or as many.
            right: Documents.
            params: use_activation and truncation.
            options: See RequestOptions.

        Raises:
            InvalidRequestError: The numbers do not match, or as `embed`.
        """
        if not left or not right:
            raise InvalidRequestError(
                "Scoring needs at least one text on each side.", param="text_1" if not left else "text_2"
            )
        if len(left) not in (1, len(right)):
            raise InvalidRequestError(
                f"{len(left)} texts cannot be paired with {len(right)}; give 1 to 1, 1 to N or N to N.", param="text_2"
            )
        if self.info.kind is ModelKind.CROSS_ENCODER:
            return await self._score_joint(left, right, params, options)
        return await self._score_cosine(left, right, params, options)

    async def zero_shot(
        self,
        inputs: Sequence[Text],
        labels: Sequence[str],
        params: PoolingParams,
        options: RequestOptions = RequestOptions(),
    ) -> ClassResult:
        """Classifies inputs among label texts by the similarity of embeddings. Rows of scores sum to 1.

        Raises:
            InvalidRequestError: Fewer than two labels, a label twice, or as `embed`.
        """
        self._check_labels(labels, "labels")
        embedded = await self._embed_for_classes([*inputs, *labels], params, options)
        scores = zero_shot_scores(embedded.embeddings[: len(inputs)], embedded.embeddings[len(inputs) :])
        return ClassResult(scores, tuple(labels), _counted(embedded.num_tokens, len(inputs)))

    async def few_shot(
        self,
        inputs: Sequence[Text],
        examples: Sequence[tuple[str, str]],
        params: PoolingParams,
        options: RequestOptions = RequestOptions(),
    ) -> ClassResult:
        """Classifies inputs given labelled examples (text, label) by the similarity of embeddings. Rows sum to 1.

        Raises:
            InvalidRequestError: Fewer than two different labels, or as `embed`.
        """
        labels = list(dict.fromkeys(label for _, label in examples))
        self._check_labels(labels, "examples")
        embedded = await self._embed_for_classes([*inputs, *(text for text, _ in examples)], params, options)
        places = {label: place for place, label in enumerate(labels)}
        label_ids = [places[label] for _, label in examples]
        vectors = embedded.embeddings
        scores = few_shot_scores(vectors[: len(inputs)], vectors[len(inputs) :], label_ids, len(labels))
        return ClassResult(scores, tuple(labels), _counted(embedded.num_tokens, len(inputs)))

    async def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Returns the token ids of each text, uncut."""
        return await self._tokenizer.token_ids(texts, add_special_tokens=add_special_tokens)

    async def detokenize(self, batches: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Returns the text of each list of token ids. Raises InvalidRequestError for an id outside the vocabulary."""
        return await self._tokenizer.decode(batches, skip_special_tokens=skip_special_tokens)

    async def _score_joint(
        self, left: Sequence[str], right: Sequence[str], params: PoolingParams, options: RequestOptions
    ) -> ScoreResult:
        params = params.resolved(PoolingTask.SCORE, self.info)
        queries = left if len(left) == len(right) else [left[0]] * len(right)
        truncation = self._truncation(params, param=None)
        async with self._request(options):
            tokenized = await self._tokenizer.encode_pairs(
                list(zip(queries, right, strict=True)), truncation, instruction=options.instruction
            )
            outputs = await self._run(tokenized, params, options)
        return ScoreResult(np.array([o["scores"][0] for o in outputs], np.float32), [len(t) for t in tokenized])

    async def _score_cosine(
        self, left: Sequence[str], right: Sequence[str], params: PoolingParams, options: RequestOptions
    ) -> ScoreResult:
        params.verify(PoolingTask.SCORE, self.info)
        embedding = params.clone(use_activation=None, normalize=True).resolved(PoolingTask.EMBED, self.info)
        prompts = self.info.prompts
        sides: list[Windows] = []
        async with self._request(options):
            for texts, names in ((left, _QUERY_PROMPTS), (right, _DOCUMENT_PROMPTS)):
                own = options
                if options.instruction and texts is left:
                    asked = (*names, self.info.default_prompt_name or "")
                    own = replace(options, prompt=instructed_prompt(self.info, asked, options.instruction))
                elif options.prompt is None and options.prompt_name is None:
                    own = replace(options, prompt_name=next((n for n in names if n in prompts), None))
                sides.append(await self._windows(texts, embedding, own, param=None))
            queries, documents = sides
            outputs = await self._run([*queries.sequences, *documents.sequences], embedding, options)
        split = len(queries.sequences)
        query_vectors = _joined(queries, outputs[:split], embedding)
        document_vectors = _joined(documents, outputs[split:], embedding)
        lengths = list(documents.num_tokens)
        for i, num_tokens in enumerate(queries.num_tokens):
            lengths[i] += num_tokens
        return ScoreResult(paired_cosine(query_vectors, document_vectors), lengths)

    async def _token_level(
        self, task: PoolingTask, name: str, inputs: Sequence[Text], params: PoolingParams, options: RequestOptions
    ) -> TokenResult:
        params = params.resolved(task, self.info)
        async with self._request(options):
            tokenized = await self._tokenize(inputs, params, options)
            outputs = await self._run(tokenized, params, options)
        token_ids = [t.token_ids.tolist() for t in tokenized]
        if task is PoolingTask.TOKEN_CLASSIFY and params.step_tag_id is not None:
            token_ids = [[i for i in ids if i == params.step_tag_id] for ids in token_ids]
        return TokenResult([o[name] for o in outputs], token_ids, [len(t) for t in tokenized])

    async def _embed_for_classes(
        self, texts: Sequence[Text], params: PoolingParams, options: RequestOptions
    ) -> EmbeddingResult:
        if PoolingTask.EMBED not in self.info.tasks:
            raise UnsupportedTaskError(
                f"{self.info.name} is a {self.info.kind.value} with classes of its own; "
                "labels and examples need an embedding model.",
                param="labels",
            )
        return await self.embed(texts, params.clone(use_activation=None, normalize=True), options)

    @staticmethod
    def _check_labels(labels: Sequence[str], field: str) -> None:
        if len(labels) < 2 or len(set(labels)) != len(labels):
            raise InvalidRequestError(f"{field} must name at least two different labels, each once.", param=field)

    async def _windows(
        self, inputs: Sequence[Text], params: PoolingParams, options: RequestOptions, *, param: str | None = "input"
    ) -> Windows:
        """Tokenizes inputs of the embed task and cuts those that are longer than the model takes."""
        tokenized = await self._tokenize(inputs, params, options, param=param)
        if self._long_text is None or all(len(tokens) <= self.info.max_model_len for tokens in tokenized):
            return Windows.whole(tokenized)
        prompt_ids = await self._prompt_ids(self._prompt(options))
        return self._long_text.cut(tokenized, [isinstance(item, str) for item in inputs], prompt_ids)

    async def _prompt_ids(self, prompt: str) -> Sequence[int]:
        """Returns the token ids of a prompt by itself, without special tokens."""
        return (await self._tokenizer.token_ids([prompt], add_special_tokens=False))[0] if prompt else ()

    async def _tokenize(
        self, inputs: Sequence[Text], params: PoolingParams, options: RequestOptions, *, param: str | None = "input"
    ) -> list[TokenizedInput]:
        _check_given(inputs)
        prompt = self._prompt(options)
        truncation = self._truncation(params, param=param)
        skip_prompt = not self.info.include_prompt
        return await self._tokenizer.encode(inputs, truncation, prompt=prompt, skip_prompt=skip_prompt)

    def _prompt(self, options: RequestOptions) -> str:
        if options.prompt is not None:
            return options.prompt
        name = options.prompt_name or self.info.default_prompt_name
        if name is None:
            return ""
        if name not in self.info.prompts:
            known = ", ".join(self.info.prompts) or "none"
            raise InvalidRequestError(f"prompt_name is {name!r}; the model has: {known}.", param="prompt_name")
        return self.info.prompts[name]

    def _truncation(self, params: PoolingParams, *, param: str | None) -> Truncation:
        asked = params.truncate_prompt_tokens
        limit, name = self.info.max_model_len, None
        if asked is not None and asked != -1:
            limit = asked
        elif self._long_text is not None and params.task is PoolingTask.EMBED:
            longest = self.info.max_embed_len
            limit, name = (longest, "max_embed_len") if longest else (self._max_queued_tokens, "max_queued_tokens")
        cut = asked is not None or self._auto_truncate
        return Truncation(max_num_tokens=limit, cut=cut, side=params.truncation_side, param=param, name=name)

    @contextlib.asynccontextmanager
    async def _request(self, options: RequestOptions) -> AsyncIterator[None]:
        """Holds one request: refused before it costs anything, ended at its deadline, waited for by `drain`.

        Raises:
            EngineUnavailableError: The engine is not ready.
            DeadlineExceededError: The deadline passed inside.
        """
        self._ensure_ready()
        self._num_requests += 1
        self._idle.clear()
        try:
            async with asyncio.timeout(options.timeout_s):
                yield
        except TimeoutError as error:
            raise DeadlineExceededError(f"The deadline of {options.timeout_s:g} s passed before the answer.") from error
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._idle.set()

    def _ensure_ready(self) -> None:
        if self.state is EngineState.STARTING:
            raise EngineUnavailableError("The engine is being started again. Please try again in a moment.")
        if self.state is EngineState.DRAINING:
            raise EngineUnavailableError("The server is shutting down. Please try again elsewhere.")
        if self.state is not EngineState.READY:
            raise EngineUnavailableError("The engine is down. Please try again later or elsewhere.")

    async def _run(
        self, tokenized: Sequence[TokenizedInput], params: PoolingParams, options: RequestOptions
    ) -> list[Arrays]:
        empty = next((index for index, tokens in enumerate(tokenized) if not len(tokens)), None)
        if empty is not None:
            raise InvalidRequestError(
                f"Input {empty} is empty: the tokenizer of {self.info.name} makes no token of it. Send some text.",
                param="input",
            )
        return await self._dispatcher.run(tokenized, params, priority=options.priority, timeout_s=options.timeout_s)


def _joined(windows: Windows, outputs: Sequence[Arrays], params: PoolingParams) -> NDArray[np.float32]:
    """Returns the embedding of each input [N, D] from those of its windows."""
    return windows.join(np.stack([output["embedding"] for output in outputs]), normalized=bool(params.normalize))


def _check_given(inputs: Sequence[Text]) -> None:
    if not inputs:
        raise InvalidRequestError("Give at least one input.", param="input")


def _counted(num_tokens: list[int], num_inputs: int) -> list[int]:
    """Returns the tokens of each input; what labels or examples took is added to the first."""
    return [num_tokens[0] + sum(num_tokens[num_inputs:]), *num_tokens[1:num_inputs]]
