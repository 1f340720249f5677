"""A fake engine behind the real application."""

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import httpx
import numpy as np

from penstock.engine.async_engine import RequestOptions
from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.client.dispatcher import DispatcherStats
from penstock.engine.client.replica_group import ReplicaStatus
from penstock.engine.images.image_file import ImageLimits
from penstock.engine.protocol.errors import EngineOverloadedError, InvalidRequestError, RequestTooLongError
from penstock.engine.protocol.images import ImageInput, MixedInput, PatchGrid
from penstock.engine.protocol.model_info import Activation, ModelInfo, ModelKind
from penstock.engine.protocol.multi_vector import SparseVector
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.results import (
    ClassResult,
    CombinedResult,
    EmbeddingResult,
    ScoreResult,
    SparseResult,
    TokenizedText,
    TokenResult,
)
from penstock.engine.protocol.tasks import PoolingTask, PoolingType
from penstock.engine.protocol.templates import ChatOptions, ChatTemplate
from penstock.engine.tokenization.chat_renderer import ChatRenderer
from penstock.server.app import Application, create_app
from penstock.server.models.served_model import ServedModel
from penstock.server.settings import ServerSettings, load_settings

WIDTH = 8
VOCAB_SIZE = 1000
MAX_MODEL_LEN = 64
NUM_IMAGE_TOKENS = 50
DEFAULTS = RequestOptions()
CHAT_DEFAULTS = ChatOptions()
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}{{ extra }}"
CHAT_TEMPLATE += (
    "{% if tools %}{{ tools | length }} tools {% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TASKS = {
    ModelKind.EMBEDDING: (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SCORE),
    ModelKind.SEQUENCE_CLASSIFIER: (PoolingTask.CLASSIFY,),
    ModelKind.CROSS_ENCODER: (PoolingTask.CLASSIFY, PoolingTask.SCORE),
    ModelKind.TOKEN_CLASSIFIER: (PoolingTask.TOKEN_CLASSIFY,),
}


class FakeEngine:
    """Implements AsyncEngine. A token is a word; a vector is random, with the text as its seed."""

    def __init__(self, kind: str = "embedding", labels: Sequence[str] = (), **info: object) -> None:
        kind = ModelKind(kind)
        fields = {
            "name": "fake-model",
            "path": str(Path(__file__).parent),
            "architecture": "FakeModel",
            "model_type": "fake",
            "packed": True,
            "kind": kind,
            "tasks": TASKS[kind],
            "hidden_size": WIDTH,
            "vocab_size": VOCAB_SIZE,
            "max_model_len": MAX_MODEL_LEN,
            "embedding_size": WIDTH,
            "sequence_pooling": (PoolingType.MEAN,),
            "labels": tuple(labels),
            "activation": Activation.SOFTMAX,
            "prompts": {"query": "query: "},
        }
        fields.update(info)
        self.info = ModelInfo(**fields, sources=dict.fromkeys(ModelInfo.__dataclass_fields__, "test"))
        self.state = EngineState.READY
        self.num_restarts = 0
        self.replicas: list[ReplicaStatus] = []
        self.queue_s = 2.5
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.chat_template: str | None = CHAT_TEMPLATE
        self.failure: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.tokenizer_config = {"tokenizer_class": "FakeTokenizer", "unk_token": "?"}
        self.image_limits = ImageLimits()
        self.cached_blocks: int | None = None
        self.on_enter: Callable[[], None] = lambda: None
        self.entered = asyncio.Event()
        self.was_cancelled = False
        self.is_closed = False
        self.num_chars_read = 0
        self.special_tokens: list[bool] = []

    @property
    def is_full(self) -> bool:
        return isinstance(self.failure, EngineOverloadedError)

    def check_queue(self, client: str = "") -> None:
        if self.failure is not None:
            raise self.failure

    def stats(self) -> DispatcherStats:
        return DispatcherStats(num_requests=3, num_tokens=42)

    async def drain(self, timeout_s: float) -> bool:
        self.state = EngineState.DRAINING
        return True

    async def close(self) -> None:
        self.state = EngineState.DEAD
        self.is_closed = True

    async def embed(self, inputs, params, options=DEFAULTS):
        params = params.resolved(PoolingTask.EMBED, self.info)
        await self._enter("embed", inputs, params, options)
        counts = self._counts(inputs, params)
        rows = np.stack([self._vector(item) for item in inputs])[:, : params.dimensions or WIDTH]
        if params.normalize:
            rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return EmbeddingResult(np.ascontiguousarray(rows, np.float32), counts)

    async def embed_late(self, inputs, params, options=DEFAULTS):
        params = params.resolved(PoolingTask.EMBED, self.info)
        await self._enter("embed_late", inputs, params, options)
        return EmbeddingResult(np.eye(len(inputs), WIDTH, dtype=np.float32), self._counts(inputs, params))

    async def score(self, left, right, params, options=DEFAULTS):
        if len(left) not in (1, len(right)):
            raise InvalidRequestError(f"{len(left)} texts cannot be paired with {len(right)}.", param="text_2")
        params.verify(PoolingTask.SCORE, self.info)
        await self._enter("score", left, right, params, options)
        counts = self._counts(right, params)
        lefts = list(left) * (len(right) // len(left))
        words = [[{*item.split()} if isinstance(item, str) else {item} for item in side] for side in (lefts, right)]
        overlap = [len(a & b) / 10 for a, b in zip(*words, strict=True)]
        return ScoreResult(np.array(overlap, np.float32), counts)

    async def classify(self, inputs, params, options=DEFAULTS):
        params = params.resolved(PoolingTask.CLASSIFY, self.info)
        await self._enter("classify", inputs, params, options)
        return self._classes(inputs, self.info.labels, params)

    async def classify_pairs(self, pairs, params, options=DEFAULTS):
        params = params.resolved(PoolingTask.CLASSIFY, self.info)
        await self._enter("classify_pairs", pairs, params, options)
        return self._classes([" ".join(pair) for pair in pairs], self.info.labels, params)

    async def zero_shot(self, inputs, labels, params, options=DEFAULTS):
        await self._enter("zero_shot", inputs, labels, params, options)
        return self._classes(inputs, labels, params)

    async def few_shot(self, inputs, examples, params, options=DEFAULTS):
        await self._enter("few_shot", inputs, examples, params, options)
        return self._classes(inputs, list(dict.fromkeys(label for _, label in examples)), params)

    async def token_classify(self, inputs, params, options=DEFAULTS):
        params = params.resolved(PoolingTask.TOKEN_CLASSIFY, self.info)
        ids = [[1, *(len(word) for word in text.split()), 2] for text in inputs]
        width = len(self.info.labels)
        options.report_rows(sum(map(len, ids)), width)
        await self._enter("token_classify", inputs, params, options)
        rows = [np.eye(width, dtype=np.float32)[np.array(row) % width] for row in ids]
        return TokenResult(rows, ids, [len(row) for row in ids], self.info.labels)

    async def token_embed(self, inputs, params, options=DEFAULTS):
        params = params.resolved(PoolingTask.TOKEN_EMBED, self.info)
        counts = self._counts(inputs, params)
        options.report_rows(sum(counts), WIDTH)
        await self._enter("token_embed", inputs, params, options)
        return TokenResult(self._token_rows(inputs, counts), [[1] * n for n in counts], counts)

    async def sparse_embed(self, inputs, params, options=DEFAULTS):
        params = params.resolved(PoolingTask.SPARSE_EMBED, self.info)
        await self._enter("sparse_embed", inputs, params, options)
        return SparseResult(self._sparse(inputs), self._counts(inputs, params))

    async def embed_combined(self, inputs, tasks, params, options=DEFAULTS):
        for task in tasks:
            (PoolingParams() if task is PoolingTask.SPARSE_EMBED else params).verify(task, self.info)
        counts = self._counts(inputs, params)
        if PoolingTask.TOKEN_EMBED in tasks:
            options.report_rows(sum(counts), WIDTH)
        await self._enter("embed_combined", inputs, tuple(tasks), params, options)
        fields = {}
        if PoolingTask.EMBED in tasks:
            fields["embeddings"] = np.stack([self._vector(item) for item in inputs]).astype(np.float32)
        if PoolingTask.SPARSE_EMBED in tasks:
            fields["sparse"] = self._sparse(inputs)
        if PoolingTask.TOKEN_EMBED in tasks:
            fields |= {"vectors": self._token_rows(inputs, counts), "token_ids": [list(range(n)) for n in counts]}
            fields["patches"] = [PatchGrid(1, 2, [0, 1]) if isinstance(item, ImageInput) else None for item in inputs]
        return CombinedResult(counts, **fields)

    def _token_rows(self, inputs, counts):
        pairs = zip(inputs, counts, strict=True)
        return [np.resize(self._vector(item), (n, WIDTH)).astype(np.float32) for item, n in pairs]

    def _sparse(self, inputs):
        words = [len(set(item.split())) if isinstance(item, str) else len(set(item)) for item in inputs]
        return [SparseVector(np.arange(n, dtype=np.int32), np.full(n, 0.5, np.float32)) for n in words]

    async def render_chats(self, conversations, options=CHAT_DEFAULTS):
        await self._enter("render_chats", conversations, options)
        if self.chat_template is None:
            raise InvalidRequestError("The served model has no chat template.", param="messages")
        renderer = ChatRenderer(ChatTemplate(source=self.chat_template))
        return [renderer.render(conversation, options) for conversation in conversations]

    async def tokenize(self, texts, *, add_special_tokens=True, on_count=None):
        self.special_tokens.append(add_special_tokens)
        self.num_chars_read += sum(map(len, texts))
        if on_count is not None:
            on_count(sum(len(text.split()) for text in texts))
        return [[zlib.crc32(w.encode()) % VOCAB_SIZE for w in text.split()] for text in texts]

    async def tokenize_details(self, texts, *, add_special_tokens=True, on_count=None):
        await self._enter("tokenize_details", texts, add_special_tokens)
        batches = await self.tokenize(texts, add_special_tokens=add_special_tokens, on_count=on_count)
        return [
            TokenizedText(ids, text.split(), [word.span() for word in re.finditer(r"\S+", text)], [False] * len(ids))
            for ids, text in zip(batches, texts, strict=True)
        ]

    async def detokenize(self, batches, *, skip_special_tokens=True):
        self.special_tokens.append(not skip_special_tokens)
        return [" ".join(f"t{token_id}" for token_id in ids) for ids in batches]

    def host_bytes(self) -> int:
        return 0

    async def reset_prefix_cache(self) -> int | None:
        return self.cached_blocks

    async def _enter(self, name: str, *arguments: object) -> None:
        self.calls.append((name, arguments))
        self.on_enter()
        self.entered.set()
        if self.failure is not None:
            raise self.failure
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise

    def _count(self, item: str | list[int] | ImageInput | MixedInput) -> int:
        if isinstance(item, ImageInput | MixedInput):
            return NUM_IMAGE_TOKENS
        return len(item.split()) + 2 if isinstance(item, str) else len(item)

    def _counts(self, inputs: Sequence[str | list[int]], params: PoolingParams) -> list[int]:
        if not self.info.reads_images and any(isinstance(item, ImageInput) for item in inputs):
            raise InvalidRequestError("the model reads no images.", param="input")
        counts = [self._count(item) for item in inputs]
        for item in inputs:
            if isinstance(item, list) and max(item) >= VOCAB_SIZE:
                raise InvalidRequestError(f"token id {max(item)} is out of vocabulary.", param="input")
        wanted = params.truncate_prompt_tokens
        limit, name = (MAX_MODEL_LEN, None) if wanted in (None, -1) else (wanted, "{truncate_prompt_tokens}")
        cut = not params.reject_too_long and (wanted is not None or self.info.auto_truncate)
        if not cut and max(counts) > limit:
            raise RequestTooLongError.over_limit(
                f"input {np.argmax(counts)} has {max(counts)} tokens",
                "Please send less.",
                num_tokens=max(counts),
                max_num_tokens=limit,
                limit_name=name,
            )
        return counts

    def _vector(self, item: str | list[int]) -> np.ndarray:
        return np.random.default_rng(zlib.crc32(repr(item).encode())).normal(size=WIDTH)

    def _classes(self, inputs, labels, params) -> ClassResult:
        logits = np.stack([np.resize(self._vector(item), len(labels)) for item in inputs])
        scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        return ClassResult(scores.astype(np.float32), tuple(labels), self._counts(inputs, params))


@asynccontextmanager
async def client_of(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    """Runs an application. Returns its client."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http


Serving = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@asynccontextmanager
async def serving(
    engine: FakeEngine, names: tuple[str, ...] = ("fake-model", "alias"), **settings: object
) -> AsyncIterator[httpx.AsyncClient]:
    """Serves an engine: `async with serving(engine, names=("a", "b"), api_key=("k",)) as client`."""

    async def start() -> FakeEngine:
        return engine

    default_prompt_name = settings.pop("default_prompt_name", None)
    loaded = load_settings(ServerSettings, settings)
    app = create_app([ServedModel(names, start, default_prompt_name, loaded.engine)], loaded)
    async with client_of(app) as client:
        await app.state.context.models.manager.wait_until_started()
        yield client
